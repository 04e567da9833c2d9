//! Open-loop and closed-loop requests with checked answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_tests::cases::{ClientTensor, RequestCase, compare};
use shadowslice_tests::client::{EncodedRequest, InferGrpcClient, ModelInputSpec};
use shadowslice_tests::load::{self, ArrivalPattern, LoadPlan, LoadTally, RequestOutcome, SplitTally};
use shadowslice_tests::server::ServerUnderTest;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::Status;

use crate::error::StageError;
use crate::models::inputs;

/// The maximum allowed difference between two answers to the same input, relative to the largest
/// value of the first answer. Answers differ because kernels and the order of sums depend on the
/// batch size and the share.
pub(crate) const TOLERANCE: f32 = 0.02;

/// The maximum allowed difference for BF16, whose significand has eight bits.
const TOLERANCE_BF16: f32 = 0.06;

/// The maximum allowed difference for an arbitrary model. This limit detects only gross errors.
const TOLERANCE_UNKNOWN: f32 = 0.1;

/// The number of different inputs that the requests of a model contain.
const INPUTS: u64 = 8;

/// The number of connections that all loads of a model share. The clients of
/// [`TestedModel::saturate`] have their own connections instead.
const CONNECTIONS: usize = 24;

/// The length of each part of a load. Each part has its own random arrivals.
const PART: Duration = Duration::from_secs(2);

const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A model, with requests whose answers are known.
#[derive(Debug)]
pub(crate) struct TestedModel {
    pub(crate) model: String,
    inputs: Vec<ModelInputSpec>,
    clients: Vec<InferGrpcClient>,
    cases: Vec<KnownAnswer>,
}

/// A request, with its first answer.
#[derive(Debug)]
struct KnownAnswer {
    case: RequestCase,
    encoded: EncodedRequest,
    /// The maximum allowed difference of another answer from the first answer.
    tolerance: f32,
}

impl TestedModel {
    /// Sends each input once and stores the answers. The load compares all later answers with the
    /// stored answers. Returns an error if all inputs have the same answer.
    pub(crate) async fn learn(server: &ServerUnderTest, model: &str) -> Result<Arc<Self>, StageError> {
        let allowed = if model.ends_with("-bf16") { TOLERANCE_BF16 } else { TOLERANCE };
        let subject = Self::send_each(server, model, allowed).await?;
        if subject.cases.len() < 2 {
            let why = "all inputs have the same answer, so wrong answers would go unnoticed".into();
            return Err(StageError::Request { model: model.into(), why });
        }
        Ok(subject)
    }

    /// Sends each input of an arbitrary model once and stores the answers. Unlike [`Self::learn`],
    /// accepts equal answers for all inputs, and allows a larger difference of later answers.
    pub(crate) async fn learn_loosely(
        server: &ServerUnderTest,
        model: &str,
    ) -> Result<Arc<Self>, StageError> {
        Self::send_each(server, model, TOLERANCE_UNKNOWN).await
    }

    async fn send_each(server: &ServerUnderTest, model: &str, allowed: f32) -> Result<Arc<Self>, StageError> {
        let failed = |why: String| StageError::Request { model: model.into(), why };
        let mut client = server.client();
        let specs = client.inputs(model).await.map_err(|status| failed(status.message().into()))?;
        let mut cases: Vec<KnownAnswer> = Vec::new();
        for seed in 1..=INPUTS {
            let inputs = inputs(&specs, 1, seed)?;
            let encoded = EncodedRequest::new(model, &inputs);
            let answered = timeout(REQUEST_TIMEOUT, client.infer_encoded(&encoded)).await;
            let answered = answered.map_err(|_| failed("no answer in time".into()))?;
            let outputs = answered.map_err(|status| failed(status.message().into()))?;
            let largest = largest(&outputs).ok_or_else(|| failed("the answer is not finite".into()))?;
            let tolerance = allowed * largest;
            let alike = |known: &KnownAnswer| {
                compare(&known.case.outputs, &outputs, 2.0 * known.tolerance.max(tolerance)).is_ok()
            };
            if !cases.iter().any(alike) {
                cases.push(KnownAnswer {
                    case: RequestCase { inputs, outputs, truth: None },
                    encoded,
                    tolerance,
                });
            }
        }
        let mut clients: Vec<InferGrpcClient> = (0..CONNECTIONS).map(|_| server.client()).collect();
        for client in &mut clients {
            // This call opens the connection, so its answer does not matter.
            client.server_ready().await.ok();
        }
        Ok(Arc::new(Self { model: model.into(), inputs: specs, clients, cases }))
    }

    /// Sends the n-th request, and checks its answer.
    async fn send(&self, n: usize) -> RequestOutcome {
        let KnownAnswer { case, encoded, tolerance } = &self.cases[n % self.cases.len()];
        match self.clients[n % self.clients.len()].infer_encoded(encoded).await {
            Ok(answer) => compare(&case.outputs, &answer, *tolerance)
                .map_or_else(RequestOutcome::Wrong, |()| RequestOutcome::Right),
            Err(status) => RequestOutcome::Failed(reason(&status)),
        }
    }

    /// Runs a closed-loop load for the time `span`. Returns two tallies: one for the time up to
    /// `split`, and one for the remaining time.
    pub(crate) async fn load_closed_loop(
        self: &Arc<Self>,
        clients: usize,
        span: Duration,
        split: Duration,
    ) -> [LoadTally; 2] {
        let (tallies, subject) = (SplitTally::after(split), Arc::clone(self));
        // The load has a fixed length.
        let work = sleep(span);
        load::run_closed_split(clients, &tallies, move |n| Arc::clone(&subject).send_owned(n), work).await;
        tallies.take()
    }

    /// Runs an open-loop load. Returns two tallies: one of the requests that were due up to
    /// `split`, and one of the remaining requests.
    pub(crate) async fn load_open_loop(self: &Arc<Self>, plan: &LoadPlan, split: Duration) -> [LoadTally; 2] {
        let tallies = SplitTally::after(split);
        load::run_split(plan, &tallies, |n| Arc::clone(self).send_owned(n)).await;
        tallies.take()
    }

    async fn send_owned(self: Arc<Self>, n: usize) -> RequestOutcome {
        self.send(n).await
    }

    /// Keeps several requests in flight for the time `span`, each on its own connection.
    pub(crate) async fn saturate(
        self: &Arc<Self>,
        server: &ServerUnderTest,
        load: Saturation,
        span: Duration,
    ) -> Result<ClosedLoopResult, StageError> {
        let inputs = self.client_inputs(load)?;
        self.saturate_with(server, &inputs, span).await
    }

    /// Makes the inputs that the clients of a closed-loop load send.
    pub(crate) fn client_inputs(
        &self,
        Saturation { rows, in_flight }: Saturation,
    ) -> Result<ClientInputs, StageError> {
        let inputs = (0..in_flight as u64).map(|seed| inputs(&self.inputs, rows, 100 + seed));
        Ok(ClientInputs { rows, inputs: inputs.collect::<Result<_, _>>()? })
    }

    /// Runs a closed-loop load with prepared inputs, so that the result excludes the time to make
    /// inputs.
    pub(crate) async fn saturate_with(
        self: &Arc<Self>,
        server: &ServerUnderTest,
        ClientInputs { rows, inputs }: &ClientInputs,
        span: Duration,
    ) -> Result<ClosedLoopResult, StageError> {
        let begun = Instant::now();
        let mut tasks = JoinSet::new();
        for inputs in inputs {
            let (subject, client, inputs) = (Arc::clone(self), server.client(), inputs.clone());
            tasks.spawn(async move { subject.send_in_turn(client, &inputs, begun + span).await });
        }
        let mut latencies_ms = Vec::new();
        while let Some(ended) = tasks.join_next().await {
            let panicked = |_| StageError::Unusable("a client's task panicked".into());
            latencies_ms.extend(ended.map_err(panicked)??);
        }
        let seconds = begun.elapsed().as_secs_f64();
        let rows_per_s = latencies_ms.len() as f64 * f64::from(*rows) / seconds;
        Ok(ClosedLoopResult { rows_per_s, latencies_ms })
    }

    /// Sends at least one request, and further requests one by one until `end`. Returns the latency
    /// of each request in ms.
    async fn send_in_turn(
        &self,
        mut client: InferGrpcClient,
        inputs: &[ClientTensor],
        end: Instant,
    ) -> Result<Vec<f64>, StageError> {
        let failed = |why: String| StageError::Request { model: self.model.clone(), why };
        let mut latencies_ms = Vec::new();
        while latencies_ms.is_empty() || Instant::now() < end {
            let sent = Instant::now();
            let answered = timeout_at(sent + REQUEST_TIMEOUT, client.infer(&self.model, inputs)).await;
            let answered = answered.map_err(|_| failed("no answer in time".into()))?;
            answered.map_err(|status| failed(status.message().into()))?;
            latencies_ms.push(sent.elapsed().as_secs_f64() * 1e3);
        }
        Ok(latencies_ms)
    }
}

/// The size of a closed-loop load.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Saturation {
    /// The number of rows of each request.
    pub(crate) rows: u32,
    pub(crate) in_flight: usize,
}

/// The inputs that the clients of a closed-loop load send.
#[derive(Debug)]
pub(crate) struct ClientInputs {
    rows: u32,
    /// The inputs of each client.
    inputs: Vec<Vec<ClientTensor>>,
}

#[derive(Debug)]
pub(crate) struct ClosedLoopResult {
    pub(crate) rows_per_s: f64,
    pub(crate) latencies_ms: Vec<f64>,
}

/// Returns the reason for a failure with all digits masked, so that failures can be counted by
/// reason.
fn reason(status: &Status) -> String {
    let message = status.message().replace(|letter: char| letter.is_ascii_digit(), "#");
    format!("{:?}: {message}", status.code())
}

/// Returns the largest magnitude among the FP32 outputs, or `None` if an element is not finite.
fn largest(outputs: &[ClientTensor]) -> Option<f32> {
    let mut elements = outputs.iter().filter_map(ClientTensor::as_fp32).flatten();
    elements.try_fold(0.0_f32, |largest, value| value.is_finite().then(|| largest.max(value.abs())))
}

/// The scheduled arrival and the end time of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TrafficTimes {
    pub(crate) due: Instant,
    pub(crate) end: Instant,
}

/// An open-loop load in the background, which runs in parts of length [`PART`]. The n-th part is
/// seeded with n, so its arrivals are the same in every run at the same rate.
#[derive(Debug)]
pub(crate) struct BackgroundLoad {
    task: JoinHandle<()>,
    stop: Arc<AtomicBool>,
    parts: Arc<AtomicU64>,
    tally: Arc<Mutex<LoadTally>>,
    spans: Arc<Mutex<Vec<TrafficTimes>>>,
}

#[derive(Debug)]
pub(crate) struct LoadResult {
    pub(crate) tally: LoadTally,
    pub(crate) spans: Vec<TrafficTimes>,
}

impl BackgroundLoad {
    /// Starts a load with Poisson arrivals. The load ends after `limit` parts, if there is a limit,
    /// or when it is stopped.
    pub(crate) fn start(subject: &Arc<TestedModel>, rate: f64, limit: Option<u64>) -> Self {
        let (stop, parts) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (tally, spans) = (Arc::<Mutex<LoadTally>>::default(), Arc::<Mutex<Vec<TrafficTimes>>>::default());
        let task = tokio::spawn({
            let (subject, stop, parts) = (Arc::clone(subject), Arc::clone(&stop), Arc::clone(&parts));
            let (tally, spans) = (Arc::clone(&tally), Arc::clone(&spans));
            async move {
                while !stop.load(Ordering::Relaxed)
                    && limit.is_none_or(|limit| parts.load(Ordering::Relaxed) < limit)
                {
                    let seed = parts.fetch_add(1, Ordering::Relaxed) + 1;
                    let plan = LoadPlan { rate, span: PART, arrivals: ArrivalPattern::Poisson, seed };
                    run_part(&subject, &plan, &tally, &spans).await;
                }
            }
        });
        Self { task, stop, parts, tally, spans }
    }

    /// Waits for the end of the current part if `at_once` is true, or else for the end of the last
    /// part.
    pub(crate) async fn finish(mut self, at_once: bool) -> Result<LoadResult, StageError> {
        self.stop.store(at_once, Ordering::Relaxed);
        (&mut self.task).await.map_err(|_| StageError::Unusable("a load's task panicked".into()))?;
        let (tally, spans) = (self.tally.lock().clone(), std::mem::take(&mut *self.spans.lock()));
        Ok(LoadResult { tally, spans })
    }

    /// Returns the number of parts that have started.
    pub(crate) fn parts(&self) -> u64 {
        self.parts.load(Ordering::Relaxed)
    }
}

impl Drop for BackgroundLoad {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run_part(
    subject: &Arc<TestedModel>,
    plan: &LoadPlan,
    tally: &Arc<Mutex<LoadTally>>,
    spans: &Arc<Mutex<Vec<TrafficTimes>>>,
) {
    let schedule = plan.schedule();
    let begun = Instant::now();
    load::run(plan, tally, |n| {
        let (subject, spans) = (Arc::clone(subject), Arc::clone(spans));
        let due = begun + schedule.get(n).copied().unwrap_or_default();
        async move {
            let outcome = subject.send(n).await;
            spans.lock().push(TrafficTimes { due, end: Instant::now() });
            outcome
        }
    })
    .await;
}
