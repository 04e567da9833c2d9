//! The real runs, which send the arrivals of a case to a supervisor in an open loop. Latency is the
//! time from the scheduled arrival to the last byte of the answer.

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

use crate::MeasureError;

use super::arrivals::{INTERVAL, LEAD, ReplayArrival};
use super::host::{HostReading, load_average};
use super::outcomes::{OutcomeCounts, RunOutcome};

/// The maximum time that the program waits for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest time between two share changes of a policy. The policy gslice changes shares in
/// every fifth interval.
const POLICY_PERIOD: Duration = INTERVAL.saturating_mul(5);

/// The longest latency that the histogram can represent, in microseconds. It is longer than
/// [`ANSWER_TIMEOUT`].
const LONGEST_US: u64 = 60_000_000;

/// The maximum CPU time of other programs in an undisturbed round, in percent of all cores.
const DISTURBED_PERCENT: f64 = 10.0;

/// The outcome of one real run, and the load of other programs during the run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ReplayResult {
    pub(crate) figures: RunOutcome,
    /// The CPU time that other programs and virtual machines used, in percent of all cores.
    pub(crate) others_percent: f64,
    /// The 99th percentile of the delay between the scheduled arrival of a request and its sending,
    /// in ms.
    pub(crate) sent_late_ms: f64,
    /// The host's load average before the run.
    pub(crate) load_average: f64,
}

impl ReplayResult {
    /// Returns true if other programs used at most 10 % of the host's CPU time.
    pub(crate) fn is_quiet(&self) -> bool {
        self.others_percent <= DISTURBED_PERCENT
    }
}

impl fmt::Display for ReplayResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { figures, others_percent, sent_late_ms, load_average } = self;
        let OutcomeCounts { offered, in_time, refused, p99_ms, repartitions, .. } = figures.all;
        write!(
            f,
            "{in_time} of {offered} in time, {refused} refused, p99 {p99_ms:.1} ms, {repartitions} repartitions; \
             others {others_percent:.0} %, send delay {sent_late_ms:.1} ms, load average {load_average:.1}"
        )
    }
}

/// A model with its client and its prepared request.
struct ReplayModel {
    name: String,
    client: InferGrpcClient,
    inputs: Vec<ClientTensor>,
}

/// The outcome of one request.
enum ReplayAnswer {
    /// An answer, after this latency.
    Within(Duration),
    Refused,
    /// A wrong answer or a failure, with a description.
    Failed(String),
}

/// A request that was sent.
struct SentRequest {
    model: usize,
    late: Duration,
    answer: JoinHandle<ReplayAnswer>,
}

/// Starts a supervisor with this configuration and sends it the arrivals. `like` is a simulated
/// outcome that contains the names of the models.
pub(crate) async fn replay(
    config: &Path,
    arrivals: &[ReplayArrival],
    like: &RunOutcome,
) -> Result<ReplayResult, MeasureError> {
    let load_average = load_average();
    let mut started = Instant::now();
    let mut home = Home::new()?;
    home.set_log(config.with_extension("log"));
    let mut server = ServerUnderTest::start(home, Some(config))?;
    server.wait_ready().await?;
    let mut models = Vec::new();
    for name in like.per_model.keys() {
        models.push(Arc::new(ReplayModel::connect(&server, name).await?));
    }
    // On a busy machine, the supervisor may not be ready in time. All requests are then delayed by
    // a whole number of the policy's periods.
    while started.elapsed() > LEAD {
        started += POLICY_PERIOD;
    }
    let processes = || server.children().into_iter().chain([server.process()]);
    let before = HostReading::take(processes());
    let sent = send(arrivals, &models, started).await?;
    let last = arrivals.last().map_or(LEAD, |last| last.at);
    let longest = like.per_model.values().map(|part| part.slo_ms).fold(0.0, f64::max);
    sleep_until((started + last + Duration::from_secs_f64(longest / 1e3)).into()).await;
    let others_percent = HostReading::take(processes()).others_percent(&before);
    let repartitions: BTreeMap<String, u64> = server
        .status()
        .await?
        .models
        .into_iter()
        .map(|model| (model.name, model.handovers.completed))
        .collect();
    let (figures, sent_late_ms) = collect(&models, sent, like, &repartitions).await?;
    server.stop().await?;
    Ok(ReplayResult { figures, others_percent, sent_late_ms, load_average })
}

impl ReplayModel {
    /// Connects to the server, and builds a request from the model's metadata.
    async fn connect(server: &ServerUnderTest, name: &str) -> Result<Self, MeasureError> {
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

    /// Sends one request, and returns its outcome. Checks that the answer contains the request's
    /// tensor, which the emulated engine returns.
    async fn send(&self, due: Instant) -> ReplayAnswer {
        let mut client = self.client.clone();
        let answered = timeout(ANSWER_TIMEOUT, client.infer(&self.name, &self.inputs)).await;
        let latency = due.elapsed();
        match answered {
            Ok(Ok(outputs))
                if outputs
                    .iter()
                    .map(|output| &output.data)
                    .eq(self.inputs.iter().map(|input| &input.data)) =>
            {
                ReplayAnswer::Within(latency)
            }
            Ok(Ok(_)) => ReplayAnswer::Failed("the answer is not the request's tensor".to_owned()),
            Ok(Err(status)) if status.code() == Code::Unavailable => ReplayAnswer::Refused,
            Ok(Err(status)) => ReplayAnswer::Failed(status.to_string()),
            Err(_) => ReplayAnswer::Failed(format!("no answer within {ANSWER_TIMEOUT:?}")),
        }
    }
}

/// Sends each request at its scheduled time. A separate thread waits for these times, because
/// Tokio's timers have a resolution of one millisecond.
async fn send(
    arrivals: &[ReplayArrival],
    models: &[Arc<ReplayModel>],
    start: Instant,
) -> Result<Vec<SentRequest>, MeasureError> {
    let index = |name: &str| models.iter().position(|model| model.name == name);
    let due: Option<Vec<(Instant, usize)>> =
        arrivals.iter().map(|arrival| Some((start + arrival.at, index(&arrival.model)?))).collect();
    let due = due.ok_or("an arrival names a model that the supervisor does not have")?;
    let (models, reactor) = (models.to_vec(), Handle::current());
    let (sent_tx, sent_rx) = oneshot::channel();
    let pacing = thread::spawn(move || {
        let one = |(due, model): (Instant, usize)| {
            #[expect(
                clippy::disallowed_methods,
                reason = "a request's time is a deadline, and this thread has no other"
            )]
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let late = due.elapsed();
            let receiver = Arc::clone(&models[model]);
            SentRequest { model, late, answer: reactor.spawn(async move { receiver.send(due).await }) }
        };
        // This send fails only if an interrupt has dropped the receiver. In that case, nobody
        // waits for the requests.
        sent_tx.send(due.into_iter().map(one).collect()).ok();
    });
    let sent = sent_rx.await;
    pacing.join().map_err(|_| "the sending thread panicked")?;
    Ok(sent?)
}

/// Waits for all answers. Returns the outcomes, and the p99 of the delay with which requests were
/// sent, in ms.
async fn collect(
    models: &[Arc<ReplayModel>],
    sent: Vec<SentRequest>,
    like: &RunOutcome,
    repartitions: &BTreeMap<String, u64>,
) -> Result<(RunOutcome, f64), MeasureError> {
    let histogram = || Histogram::<u64>::new_with_max(LONGEST_US, 3);
    let (mut all, mut late) = (histogram()?, histogram()?);
    let mut per_model = Vec::new();
    for model in models {
        let slo_ms = like.per_model[&model.name].slo_ms;
        let repartitions = repartitions.get(&model.name).copied().unwrap_or_default();
        per_model.push((OutcomeCounts { slo_ms, repartitions, ..OutcomeCounts::default() }, histogram()?));
    }
    for SentRequest { model, late: by, answer } in sent {
        late.saturating_record(micros(by));
        let (part, latency_us) = &mut per_model[model];
        part.offered += 1;
        match answer.await? {
            ReplayAnswer::Within(latency) => {
                part.in_time += u64::from(latency.as_secs_f64() * 1e3 <= part.slo_ms);
                latency_us.saturating_record(micros(latency));
                all.saturating_record(micros(latency));
            }
            ReplayAnswer::Refused => part.refused += 1,
            ReplayAnswer::Failed(how) => return Err(format!("{}: {how}", models[model].name).into()),
        }
    }
    let p99 = |histogram: &Histogram<u64>| histogram.value_at_quantile(0.99) as f64 / 1e3;
    let named = models.iter().zip(per_model);
    let parts = named.map(|(model, (part, latency))| {
        (model.name.clone(), OutcomeCounts { p99_ms: p99(&latency), ..part })
    });
    Ok((RunOutcome::of(parts.collect(), p99(&all)), p99(&late)))
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(LONGEST_US)
}
