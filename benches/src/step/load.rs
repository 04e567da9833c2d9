//! An open-loop load whose rate steps up once.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use shadowslice_tests::cases::Tensor;
use shadowslice_tests::client::Client;
use shadowslice_tests::load::Arrivals;
use shadowslice_tests::random::SplitMix64;
use tokio::runtime::Handle;
use tokio::task;
use tokio::time::timeout;
use tonic::Code;

use crate::Failure;

/// How long an answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// New rates that may wait for the thread that sends.
const STEPS: usize = 1;

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// It was right, so long after its time had come.
    After(Duration),
    /// The server has no room.
    Refused,
    /// There was none, or a wrong one.
    Failed,
}

/// A request, and what became of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    /// When its time had come.
    pub(super) due: Instant,
    /// How much later it was sent.
    pub(super) late: Duration,
    pub(super) answer: Answer,
}

/// When the rate changed, by both clocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) at: Instant,
    pub(super) time: SystemTime,
}

/// What a load came to.
pub(super) struct Done {
    pub(super) requests: Vec<Request>,
    pub(super) step: Step,
}

/// A model as its client knows it.
struct Model {
    name: String,
    client: Client,
    input: Tensor,
}

/// A load that goes on.
pub(super) struct Load {
    /// Nobody to send any more ends it.
    step: SyncSender<f64>,
    pacing: JoinHandle<Paced>,
}

/// Requests on their way.
#[derive(Default)]
struct Paced {
    sent: Vec<(Instant, Duration, task::JoinHandle<Answer>)>,
    step: Option<Step>,
}

impl Load {
    /// Begins with so many requests a second, which arrive like that; if at random, as the seed says.
    pub(super) fn begin(client: Client, model: String, (rate, arrivals): (f64, Arrivals), seed: u64) -> Self {
        let input = Tensor::fp32("x", &[1, 16], &[1.0; 16]);
        let model = Arc::new(Model { name: model, client, input });
        let (step, steps) = sync_channel(STEPS);
        let reactor = Handle::current();
        let random = SplitMix64::new(seed);
        let pacing = thread::spawn(move || pace(&model, (rate, arrivals), random, &steps, &reactor));
        Self { step, pacing }
    }

    /// Goes on with so many requests a second.
    pub(super) fn step(&self, rate: f64) -> Result<(), Failure> {
        self.step.send(rate).map_err(|_| "the thread that sends has ended".into())
    }

    /// Sends no more, and waits for all answers.
    pub(super) async fn end(self) -> Result<Done, Failure> {
        drop(self.step);
        let joined = task::spawn_blocking(|| self.pacing.join()).await?;
        let Paced { sent, step } = joined.map_err(|_| "the thread that sends panicked")?;
        let mut requests = Vec::with_capacity(sent.len());
        for (due, late, answer) in sent {
            requests.push(Request { due, late, answer: answer.await? });
        }
        Ok(Done { requests, step: step.ok_or("the load has not stepped up")? })
    }
}

/// Sends each request when its time has come, until nobody holds the other end of `steps`. It is a thread, since the
/// reactor knows only milliseconds.
fn pace(
    model: &Arc<Model>,
    (mut rate, arrivals): (f64, Arrivals),
    mut random: SplitMix64,
    steps: &Receiver<f64>,
    reactor: &Handle,
) -> Paced {
    let mut paced = Paced::default();
    let mut due = Instant::now();
    loop {
        due += Duration::from_secs_f64(arrivals.distance(&mut random) / rate);
        match steps.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => {
                let asked = Arc::clone(model);
                paced.sent.push((due, due.elapsed(), reactor.spawn(async move { asked.ask(due).await })));
            }
            Ok(next) => {
                // What comes at random comes no sooner because nothing has come for long.
                (rate, due) = (next, Instant::now());
                paced.step = Some(Step { at: due, time: SystemTime::now() });
            }
            Err(RecvTimeoutError::Disconnected) => return paced,
        }
    }
}

impl Model {
    /// One request; the emulated engine answers with what it was asked.
    async fn ask(&self, due: Instant) -> Answer {
        let mut client = self.client.clone();
        match timeout(ANSWER_WITHIN, client.infer(&self.name, std::slice::from_ref(&self.input))).await {
            Ok(Ok(outputs)) if outputs.iter().map(|output| &output.data).eq([&self.input.data]) => {
                Answer::After(due.elapsed())
            }
            Ok(Err(status)) if status.code() == Code::Unavailable => Answer::Refused,
            Ok(_) | Err(_) => Answer::Failed,
        }
    }
}
