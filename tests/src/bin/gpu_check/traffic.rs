//! Requests with checked answers, open-loop and closed-loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_tests::cases::{ClientTensor, RequestCase, compare};
use shadowslice_tests::client::{EncodedRequest, InferGrpcClient};
use shadowslice_tests::load::{self, ArrivalPattern, LoadPlan, LoadTally, RequestOutcome, SplitTally};
use shadowslice_tests::server::ServerUnderTest;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::Status;

use crate::error::StageError;
use crate::models::{Described, inputs};

/// How far an answer may lie from the first answer to the same input, as part of its largest value:
/// kernels and the order of sums depend on the batch size and the share.
pub(crate) const TOLERANCE: f32 = 0.02;

/// The same for BF16, which has eight bits.
const TOLERANCE_BF16: f32 = 0.06;

/// The same for a model of which little is known: only gross faults count.
const TOLERANCE_UNKNOWN: f32 = 0.1;

/// The number of different inputs that can be told apart by their answers.
const INPUTS: u64 = 8;

/// Connections that a model's loads share: in most loads, every client has its own connection.
const CONNECTIONS: usize = 24;

/// A load consists of parts of this length, each with arrivals of its own.
const PART: Duration = Duration::from_secs(2);

/// How long one answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// A model, and requests with known answers.
#[derive(Debug)]
pub(crate) struct TestedModel {
    pub(crate) model: String,
    described: Vec<Described>,
    clients: Vec<InferGrpcClient>,
    cases: Vec<KnownAnswer>,
}

/// A request with its first answer.
#[derive(Debug)]
struct KnownAnswer {
    case: RequestCase,
    prepared: EncodedRequest,
    /// How far another answer to it may lie from the first one.
    tolerance: f32,
}

impl TestedModel {
    /// Asks each input once; from then on, the same input must get the same answer.
    pub(crate) async fn learn(server: &ServerUnderTest, model: &str) -> Result<Arc<Self>, StageError> {
        let allowed = if model.ends_with("-bf16") { TOLERANCE_BF16 } else { TOLERANCE };
        let subject = Self::ask_each(server, model, allowed).await?;
        if subject.cases.len() < 2 {
            let why = "different inputs have the same answer, so nothing could be checked".into();
            return Err(StageError::Request { model: model.into(), why });
        }
        Ok(subject)
    }

    /// Does the same for a model of which little is known: its answers need not differ by input,
    /// and may lie farther from the first ones.
    pub(crate) async fn meet(server: &ServerUnderTest, model: &str) -> Result<Arc<Self>, StageError> {
        Self::ask_each(server, model, TOLERANCE_UNKNOWN).await
    }

    async fn ask_each(server: &ServerUnderTest, model: &str, allowed: f32) -> Result<Arc<Self>, StageError> {
        let failed = |why: String| StageError::Request { model: model.into(), why };
        let mut client = server.client();
        let described = client.inputs(model).await.map_err(|status| failed(status.message().into()))?;
        let mut cases: Vec<KnownAnswer> = Vec::new();
        for seed in 1..=INPUTS {
            let inputs = inputs(&described, 1, seed)?;
            let prepared = EncodedRequest::new(model, &inputs);
            let answered = timeout(ANSWER_WITHIN, client.infer_prepared(&prepared)).await;
            let answered = answered.map_err(|_| failed("no answer in time".into()))?;
            let outputs = answered.map_err(|status| failed(status.message().into()))?;
            let largest = largest(&outputs).ok_or_else(|| failed("its answer is not finite".into()))?;
            let tolerance = allowed * largest;
            let alike = |known: &KnownAnswer| {
                compare(&known.case.outputs, &outputs, 2.0 * known.tolerance.max(tolerance)).is_ok()
            };
            if !cases.iter().any(alike) {
                cases.push(KnownAnswer {
                    case: RequestCase { inputs, outputs, truth: None },
                    prepared,
                    tolerance,
                });
            }
        }
        let mut clients: Vec<InferGrpcClient> = (0..CONNECTIONS).map(|_| server.client()).collect();
        for client in &mut clients {
            // Connects; the answer doesn't matter.
            client.server_ready().await.ok();
        }
        Ok(Arc::new(Self { model: model.into(), described, clients, cases }))
    }

    /// Sends the n-th request, and checks its answer.
    async fn ask(&self, n: usize) -> RequestOutcome {
        let KnownAnswer { case, prepared, tolerance } = &self.cases[n % self.cases.len()];
        match self.clients[n % self.clients.len()].infer_prepared(prepared).await {
            Ok(answer) => compare(&case.outputs, &answer, *tolerance)
                .map_or_else(RequestOutcome::Wrong, |()| RequestOutcome::Right),
            Err(status) => RequestOutcome::Failed(reason(&status)),
        }
    }

    /// Keeps so many clients asking for a while, each again as soon as it is answered; returns the
    /// tallies of the time up to `split` and of the rest.
    pub(crate) async fn ask_in_turn(
        self: &Arc<Self>,
        clients: usize,
        span: Duration,
        split: Duration,
    ) -> [LoadTally; 2] {
        let (tallies, subject) = (SplitTally::after(split), Arc::clone(self));
        // A measured time: there is no event to wait for.
        let work = sleep(span);
        load::run_closed_split(clients, &tallies, move |n| Arc::clone(&subject).asked(n), work).await;
        tallies.take()
    }

    /// Sends the planned requests, whether or not earlier requests were answered; returns tallies
    /// as above.
    pub(crate) async fn ask_at_random(self: &Arc<Self>, plan: &LoadPlan, split: Duration) -> [LoadTally; 2] {
        let tallies = SplitTally::after(split);
        load::run_split(plan, &tallies, |n| Arc::clone(self).asked(n)).await;
        tallies.take()
    }

    async fn asked(self: Arc<Self>, n: usize) -> RequestOutcome {
        self.ask(n).await
    }

    /// Keeps `concurrency` requests of so many rows under way for a while, each on a connection of its own.
    pub(crate) async fn saturate(
        self: &Arc<Self>,
        server: &ServerUnderTest,
        (rows, concurrency): (u32, usize),
        span: Duration,
    ) -> Result<ClosedLoopResult, StageError> {
        let made = self.make(rows, concurrency)?;
        self.saturate_with(server, &made, span).await
    }

    /// The inputs of so many clients, of so many rows each.
    pub(crate) fn make(&self, rows: u32, clients: usize) -> Result<ClientInputs, StageError> {
        let inputs = (0..clients as u64).map(|seed| inputs(&self.described, rows, 100 + seed));
        Ok(ClientInputs { rows, inputs: inputs.collect::<Result<_, _>>()? })
    }

    /// The same with inputs that are there, as making them takes time that must not count.
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
            tasks.spawn(async move { subject.in_turn(client, &inputs, begun + span).await });
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

    /// Sends requests one after the other until `end`, at least one; returns the latency of each in
    /// ms.
    async fn in_turn(
        &self,
        mut client: InferGrpcClient,
        inputs: &[ClientTensor],
        end: Instant,
    ) -> Result<Vec<f64>, StageError> {
        let failed = |why: String| StageError::Request { model: self.model.clone(), why };
        let mut latencies_ms = Vec::new();
        while latencies_ms.is_empty() || Instant::now() < end {
            let sent = Instant::now();
            let answered = timeout_at(sent + ANSWER_WITHIN, client.infer(&self.model, inputs)).await;
            let answered = answered.map_err(|_| failed("no answer in time".into()))?;
            answered.map_err(|status| failed(status.message().into()))?;
            latencies_ms.push(sent.elapsed().as_secs_f64() * 1e3);
        }
        Ok(latencies_ms)
    }
}

/// Inputs for a closed loop.
#[derive(Debug)]
pub(crate) struct ClientInputs {
    rows: u32,
    /// Of each client.
    inputs: Vec<Vec<ClientTensor>>,
}

/// The result of a closed loop.
#[derive(Debug)]
pub(crate) struct ClosedLoopResult {
    pub(crate) rows_per_s: f64,
    pub(crate) latencies_ms: Vec<f64>,
}

/// Returns why a request failed without the numbers in it, so that failures can be counted by it.
fn reason(status: &Status) -> String {
    let message = status.message().replace(|letter: char| letter.is_ascii_digit(), "#");
    format!("{:?}: {message}", status.code())
}

/// The largest magnitude among the FP32 outputs; `None` if an output is no number.
fn largest(outputs: &[ClientTensor]) -> Option<f32> {
    let mut elements = outputs.iter().filter_map(ClientTensor::as_fp32).flatten();
    elements.try_fold(0.0_f32, |largest, value| value.is_finite().then(|| largest.max(value.abs())))
}

/// From a request's scheduled arrival to its answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestTimes {
    pub(crate) due: Instant,
    pub(crate) end: Instant,
}

/// An open-loop load that goes on until it is ended. The n-th part of a load always has the same arrivals.
#[derive(Debug)]
pub(crate) struct BackgroundLoad {
    task: JoinHandle<()>,
    stop: Arc<AtomicBool>,
    parts: Arc<AtomicU64>,
    tally: Arc<Mutex<LoadTally>>,
    spans: Arc<Mutex<Vec<RequestTimes>>>,
}

/// The outcome of a load.
#[derive(Debug)]
pub(crate) struct LoadResult {
    pub(crate) tally: LoadTally,
    pub(crate) spans: Vec<RequestTimes>,
}

impl BackgroundLoad {
    /// Loads a model with Poisson arrivals, `limit` parts or until it is ended.
    pub(crate) fn begin(subject: &Arc<TestedModel>, rate: f64, limit: Option<u64>) -> Self {
        let (stop, parts) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (tally, spans) = (Arc::<Mutex<LoadTally>>::default(), Arc::<Mutex<Vec<RequestTimes>>>::default());
        let task = tokio::spawn({
            let (subject, stop, parts) = (Arc::clone(subject), Arc::clone(&stop), Arc::clone(&parts));
            let (tally, spans) = (Arc::clone(&tally), Arc::clone(&spans));
            async move {
                while !stop.load(Ordering::Relaxed)
                    && limit.is_none_or(|limit| parts.load(Ordering::Relaxed) < limit)
                {
                    let seed = parts.fetch_add(1, Ordering::Relaxed) + 1;
                    let plan = LoadPlan { rate, span: PART, arrivals: ArrivalPattern::Poisson, seed };
                    part(&subject, &plan, &tally, &spans).await;
                }
            }
        });
        Self { task, stop, parts, tally, spans }
    }

    /// Waits for the end of the part under way, or of the last part.
    pub(crate) async fn end(mut self, at_once: bool) -> Result<LoadResult, StageError> {
        self.stop.store(at_once, Ordering::Relaxed);
        (&mut self.task).await.map_err(|_| StageError::Unusable("a load's task panicked".into()))?;
        let (tally, spans) = (self.tally.lock().clone(), std::mem::take(&mut *self.spans.lock()));
        Ok(LoadResult { tally, spans })
    }

    /// How many parts it has begun.
    pub(crate) fn parts(&self) -> u64 {
        self.parts.load(Ordering::Relaxed)
    }
}

impl Drop for BackgroundLoad {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn part(
    subject: &Arc<TestedModel>,
    plan: &LoadPlan,
    tally: &Arc<Mutex<LoadTally>>,
    spans: &Arc<Mutex<Vec<RequestTimes>>>,
) {
    let schedule = plan.schedule();
    let begun = Instant::now();
    load::run(plan, tally, |n| {
        let (subject, spans) = (Arc::clone(subject), Arc::clone(spans));
        let due = begun + schedule.get(n).copied().unwrap_or_default();
        async move {
            let outcome = subject.ask(n).await;
            spans.lock().push(RequestTimes { due, end: Instant::now() });
            outcome
        }
    })
    .await;
}
