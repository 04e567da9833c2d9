//! The real side: the same arrivals sent to a supervisor, open loop. Latency counts from the scheduled arrival to
//! the last byte of the answer.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;
use shadowslice_tests::cases::ClientTensor;
use shadowslice_tests::client::{InferGrpcClient, ModelInputSpec};
use shadowslice_tests::home::Home;
use shadowslice_tests::server::ServerUnderTest;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{sleep_until, timeout};
use tonic::Code;

use crate::Failure;
use crate::arrivals::{Arrival, INTERVAL, LEAD};
use crate::figures::{Figures, Part};
use crate::host::{Reading, load_average};

/// How long an answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// As many intervals as policies count at most: gslice changes shares in every fifth.
const TURN: Duration = INTERVAL.saturating_mul(5);

/// The longest latency told apart, in microseconds: [`ANSWER_WITHIN`] lies below.
const LONGEST_US: u64 = 60_000_000;

/// If other programs take more of the machine than this, in percent, a round is disturbed.
const DISTURBED_PERCENT: f64 = 10.0;

/// A run, and its possible disturbances.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Round {
    pub(crate) figures: Figures,
    /// The CPU time that other programs and hosts took of the machine, in percent of all cores.
    pub(crate) others_percent: f64,
    /// With which delay 99 of 100 requests were sent at most, in ms.
    pub(crate) sent_late_ms: f64,
    /// The machine's load average before.
    pub(crate) load_average: f64,
}

impl Round {
    /// Whether it had the machine nearly for itself.
    pub(crate) fn is_quiet(&self) -> bool {
        self.others_percent <= DISTURBED_PERCENT
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { figures, others_percent, sent_late_ms, load_average } = self;
        let Part { offered, in_time, refused, p99_ms, repartitions, .. } = figures.all;
        write!(
            f,
            "{in_time} of {offered} in time, {refused} refused, p99 {p99_ms:.1} ms, {repartitions} repartitions; \
             others {others_percent:.0} %, sent late by {sent_late_ms:.1} ms, load average {load_average:.1}"
        )
    }
}

/// A model as its client knows it.
struct Model {
    name: String,
    client: InferGrpcClient,
    inputs: Vec<ClientTensor>,
}

/// The outcome of a request.
enum Answer {
    After(Duration),
    Refused,
    Wrong(String),
}

/// A request that was sent.
struct Sent {
    model: usize,
    late: Duration,
    answer: JoinHandle<Answer>,
}

/// Starts a supervisor on that configuration and sends it these arrivals; `like` names the models.
pub(crate) async fn replay(config: &Path, arrivals: &[Arrival], like: &Figures) -> Result<Round, Failure> {
    let load_average = load_average();
    let mut started = Instant::now();
    let mut home = Home::new()?;
    home.set_log(config.with_extension("log"));
    let mut server = ServerUnderTest::start(home, Some(config))?;
    server.wait_ready().await?;
    let mut models = Vec::new();
    for name in like.per_model.keys() {
        models.push(Arc::new(Model::meet(&server, name).await?));
    }
    // If the machine is so busy that the supervisor is not ready by then, all requests come later,
    // by a whole turn of intervals.
    while started.elapsed() > LEAD {
        started += TURN;
    }
    let processes = || server.children().into_iter().chain([server.process()]);
    let before = Reading::take(processes());
    let sent = send(arrivals, &models, started).await?;
    let last = arrivals.last().map_or(LEAD, |last| last.at);
    let longest = like.per_model.values().map(|part| part.slo_ms).fold(0.0, f64::max);
    sleep_until((started + last + Duration::from_secs_f64(longest / 1e3)).into()).await;
    let others_percent = Reading::take(processes()).others_percent(&before);
    let repartitions: BTreeMap<String, u64> = server
        .status()
        .await?
        .models
        .into_iter()
        .map(|model| (model.name, model.handovers.completed))
        .collect();
    let (figures, sent_late_ms) = collect(&models, sent, like, &repartitions).await?;
    server.stop().await?;
    Ok(Round { figures, others_percent, sent_late_ms, load_average })
}

impl Model {
    /// Connects, and asks for the model's inputs.
    async fn meet(server: &ServerUnderTest, name: &str) -> Result<Self, Failure> {
        let mut client = server.client();
        let inputs = client.inputs(name).await?;
        let tensor = |ModelInputSpec { name, datatype, shape }| {
            let shape: Vec<i64> = shape.into_iter().map(|axis| axis.max(1)).collect();
            let count = usize::try_from(shape.iter().product::<i64>()).unwrap_or_default();
            let elements: Vec<f32> = (0..count).map(|at| at as f32).collect();
            ClientTensor { datatype, ..ClientTensor::fp32(&name, &shape, &elements) }
        };
        Ok(Self { name: name.to_owned(), client, inputs: inputs.into_iter().map(tensor).collect() })
    }

    /// One request; the emulated engine answers with the request's own tensor.
    async fn ask(&self, due: Instant) -> Answer {
        let mut client = self.client.clone();
        let answered = timeout(ANSWER_WITHIN, client.infer(&self.name, &self.inputs)).await;
        let latency = due.elapsed();
        match answered {
            Ok(Ok(outputs))
                if outputs
                    .iter()
                    .map(|output| &output.data)
                    .eq(self.inputs.iter().map(|input| &input.data)) =>
            {
                Answer::After(latency)
            }
            Ok(Ok(_)) => Answer::Wrong("the answer is not the request's tensor".to_owned()),
            Ok(Err(status)) if status.code() == Code::Unavailable => Answer::Refused,
            Ok(Err(status)) => Answer::Wrong(status.to_string()),
            Err(_) => Answer::Wrong(format!("no answer within {ANSWER_WITHIN:?}")),
        }
    }
}

/// Sends each request at its time. A thread waits for that, since the reactor knows only
/// milliseconds.
async fn send(arrivals: &[Arrival], models: &[Arc<Model>], start: Instant) -> Result<Vec<Sent>, Failure> {
    let index = |name: &str| models.iter().position(|model| model.name == name);
    let due: Option<Vec<(Instant, usize)>> =
        arrivals.iter().map(|arrival| Some((start + arrival.at, index(&arrival.model)?))).collect();
    let due = due.ok_or("an arrival is for a model that is not served")?;
    let (models, reactor) = (models.to_vec(), Handle::current());
    let (done, all) = oneshot::channel();
    let pacing = thread::spawn(move || {
        let one = |(due, model): (Instant, usize)| {
            #[expect(
                clippy::disallowed_methods,
                reason = "a request's time is a deadline, and this thread has no other"
            )]
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let late = due.elapsed();
            let asked = Arc::clone(&models[model]);
            Sent { model, late, answer: reactor.spawn(async move { asked.ask(due).await }) }
        };
        // The receiver is gone if this program is interrupted.
        done.send(due.into_iter().map(one).collect()).ok();
    });
    let sent = all.await;
    pacing.join().map_err(|_| "the thread that sends panicked")?;
    Ok(sent?)
}

/// Waits for all answers; also says how late requests were sent.
async fn collect(
    models: &[Arc<Model>],
    sent: Vec<Sent>,
    like: &Figures,
    repartitions: &BTreeMap<String, u64>,
) -> Result<(Figures, f64), Failure> {
    let histogram = || Histogram::<u64>::new_with_max(LONGEST_US, 3);
    let (mut all, mut late) = (histogram()?, histogram()?);
    let mut per_model = Vec::new();
    for model in models {
        let slo_ms = like.per_model[&model.name].slo_ms;
        let repartitions = repartitions.get(&model.name).copied().unwrap_or_default();
        per_model.push((Part { slo_ms, repartitions, ..Part::default() }, histogram()?));
    }
    for Sent { model, late: by, answer } in sent {
        late.saturating_record(micros(by));
        let (part, latency_us) = &mut per_model[model];
        part.offered += 1;
        match answer.await? {
            Answer::After(latency) => {
                part.in_time += u64::from(latency.as_secs_f64() * 1e3 <= part.slo_ms);
                latency_us.saturating_record(micros(latency));
                all.saturating_record(micros(latency));
            }
            Answer::Refused => part.refused += 1,
            Answer::Wrong(how) => return Err(format!("{}: {how}", models[model].name).into()),
        }
    }
    let p99 = |histogram: &Histogram<u64>| histogram.value_at_quantile(0.99) as f64 / 1e3;
    let named = models.iter().zip(per_model);
    let parts =
        named.map(|(model, (part, latency))| (model.name.clone(), Part { p99_ms: p99(&latency), ..part }));
    Ok((Figures::of(parts.collect(), p99(&all)), p99(&late)))
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(LONGEST_US)
}
