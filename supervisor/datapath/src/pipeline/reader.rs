//! A lane's reader: takes a worker's answers, and notices its death.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use shadowslice_shared::batch::{
    self, BatchAnswer, BatchOutput, Command, MAX_MESSAGE_BYTES, RunFailure, WorkerMessage,
};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::slab::AnswerSlab;
use shadowslice_shared::units::Timestamp;

use super::Pipeline;
use super::answer;
use super::delivery::{Delivery, Underway};
use super::durations::Spent;
use super::facts::LaneFact;
use super::link::{Arrival, Link};
use super::note;
use super::pending::{InFlight, Waiting};
use super::request::{Failure, Metadata, Output};
use super::state;
use super::streams::{Given, OpenStream, Then};
use super::totals::Took;
use crate::pipeline::BatchSocket;
use crate::trace::Lost;
use shadowslice_shared::errors;

#[derive(Debug)]
pub struct LaneReader {
    pipeline: Arc<Pipeline>,
    metadata: Arc<Metadata>,
    worker: WorkerId,
    socket: Arc<BatchSocket>,
    slab: AnswerSlab,
}

impl LaneReader {
    /// Attaches a warm worker, to which nothing is routed yet.
    pub fn attach(
        pipeline: Arc<Pipeline>,
        metadata: Arc<Metadata>,
        arrival: Arrival,
        (socket, slab): (Arc<BatchSocket>, AnswerSlab),
    ) -> Self {
        let worker = arrival.worker;
        let (link, lane) = Link::new(arrival, &metadata, pipeline.profile.as_ref(), Arc::clone(&socket));
        let mut state = pipeline.state.lock();
        state.links.push(link);
        state.scheduler.attach(lane);
        drop(state);
        Self { pipeline, metadata, worker, socket, slab }
    }

    /// Reads until the worker is gone, and then takes its lane away.
    pub async fn run(self) {
        let mut message = vec![0; MAX_MESSAGE_BYTES];
        loop {
            match self.socket.receive(&mut message).await {
                Ok(0) => break,
                Ok(length) => {
                    if let Err(why) = self.reported(&message[..length]) {
                        self.broken(why);
                        // Until its end the worker may still read its requests, so their memory
                        // stays taken. Nothing more that it says is listened to.
                        while self.socket.receive(&mut message).await.is_ok_and(|length| length > 0) {}
                        break;
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "a worker's socket is gone");
                    break;
                }
            }
        }
        let now = self.pipeline.now();
        self.pipeline.change(|state| state.died(self.worker, now));
    }

    /// The worker gets no more work, and its requests are served elsewhere.
    fn broken(&self, why: String) {
        let now = self.pipeline.now();
        self.pipeline.change(|state| {
            state.report(LaneFact::Broken(self.worker, why));
            state.condemn(self.worker, now);
        });
    }

    fn reported(&self, message: &[u8]) -> Result<(), String> {
        match batch::decode(message).map_err(|error| errors::chain(&error))? {
            WorkerMessage::Answer(answer) => self.answered(answer),
            WorkerMessage::Prepared(prepared) => {
                let fact = LaneFact::Prepared(self.worker, prepared);
                self.pipeline.state.lock().report(fact);
                Ok(())
            }
        }
    }

    fn answered(&self, answer: BatchAnswer) -> Result<(), String> {
        let now = self.pipeline.now();
        let taken = self.pipeline.state.lock().answered(self.worker, answer.id, now);
        let batch =
            taken.ok_or_else(|| format!("it answered batch {}, which it does not have", answer.id))?;
        if batch.requests.is_empty() {
            self.pipeline.change(|state| {
                if let Some(link) = state.link_mut(self.worker).filter(|_| answer.more) {
                    link.command(Command::Close(batch.id));
                }
                state.recycle(self.worker, batch.slot, now);
            });
            return Ok(());
        }
        match answer.result {
            Ok(outputs) => {
                let execution = Duration::from_micros(answer.execution_us);
                self.completed(batch, (&outputs, answer.more), execution, now)
            }
            Err(failure) => {
                self.failed(batch, &failure);
                Ok(())
            }
        }
    }

    fn completed(
        &self,
        batch: InFlight,
        (outputs, more): (&[BatchOutput], bool),
        reported: Duration,
        received: Timestamp,
    ) -> Result<(), String> {
        // A worker's report of its own speed is believed as far as the supervisor's clock bears it
        // out. The worker may have begun a batch before the supervisor read that the batch before
        // it was finished; predictions are not made from such a time.
        let reported = reported.min(received.since(batch.sent));
        let longest = batch.executing_since.map_or(Duration::ZERO, |since| received.since(since));
        let execution = reported.min(longest);
        let answers = match answer::split(&self.metadata, &self.slab, (outputs, more), &batch.requests) {
            Ok(answers) => answers,
            Err(why) => {
                let now = self.pipeline.now();
                note::lost(&batch.requests, Lost::Nonsense, now);
                self.pipeline.change(|state| {
                    let again = state.blamed(batch.requests, now);
                    state.try_alone(again, now);
                });
                return Err(why);
            }
        };
        let now = self.pipeline.now();
        let input = batch.requests.iter().map(|request| request.item.copy_in).sum();
        let took = Took { input, infer: reported, output: now.since(received) };
        let step = batch.requests.iter().any(|request| request.item.stream.is_some());
        let opens = more && !step;
        let deliveries = self.deliveries(&batch, &answers, took, (step, now));
        let mut rows = 0;
        let at = SystemTime::now();
        let routed = self.pipeline.change(|state| {
            if opens {
                state.scheduler.open_stream(self.worker);
            }
            for ((request, answer), delivery) in batch.requests.iter().zip(&answers).zip(&deliveries) {
                // Its client gave it up while it ran, and it counts as given up.
                if delivery.is_none() {
                    continue;
                }
                if step {
                    match answer {
                        Ok(_) => state.stats.totals.stream_steps.add(reported),
                        Err(_) => state.stats.totals.streams_failed += 1,
                    }
                    if !more {
                        state.quarantine.lift(&request.item.memory);
                    }
                    continue;
                }
                if answer.is_err() {
                    state.stats.failed(now.since(request.arrived), now);
                    continue;
                }
                rows += request.rows;
                if request.item.deaths > 0 && !more {
                    state.quarantine.lift(&request.item.memory);
                }
            }
            if !step {
                state.stats.totals.executed(batch.rows, rows, took, at);
            }
            state.completed(self.worker, &batch, execution, now);
            state.routed
        });
        note::answered(&batch, (received, reported, now), routed);
        for ((request, answer), delivery) in batch.requests.into_iter().zip(answers).zip(deliveries) {
            let then = match more {
                false => Then::End,
                true if opens => Then::Opened(self.opened(batch.id, &request)),
                true => Then::More,
            };
            state::reply(
                request,
                answer.map(|outputs| Given { outputs, then, delivery: delivery.unwrap_or_default() }),
            );
        }
        Ok(())
    }

    /// Returns a delivery for each request that nothing else has settled. Later answers of streams and
    /// failures get the default.
    fn deliveries(
        &self,
        batch: &InFlight,
        answers: &[Result<Vec<Output>, Failure>],
        took: Took,
        (step, now): (bool, Timestamp),
    ) -> Vec<Option<Delivery>> {
        let delivery = |(request, answer): (&Waiting, &Result<_, _>)| {
            if !request.item.claim.take() {
                return None;
            }
            if step || answer.is_err() {
                return Some(Delivery::default());
            }
            let spent = Spent {
                latency: now.since(request.arrived),
                coming: request.item.received.since(request.arrived),
                until_sent: batch.sent.since(request.item.received),
                copy_in: request.item.copy_in,
                execution: took.infer,
                copy_out: took.output,
                writing: Duration::ZERO,
            };
            let pipeline = Arc::clone(&self.pipeline);
            Some(Delivery::new(Underway { pipeline, arrived: request.arrived, answered: now, spent }))
        };
        batch.requests.iter().zip(answers).map(delivery).collect()
    }

    fn opened(&self, id: u64, request: &Waiting) -> OpenStream {
        let (pipeline, inputs) = (Arc::clone(&self.pipeline), Arc::clone(&request.item.memory));
        OpenStream { pipeline, worker: self.worker, id, inputs }
    }

    /// A request that was alone in the batch gets the engine's reason; of several, each is tried
    /// again alone.
    fn failed(&self, mut batch: InFlight, failure: &RunFailure) {
        let now = self.pipeline.now();
        let requests = std::mem::take(&mut batch.requests);
        note::lost(&requests, Lost::Failed, now);
        self.pipeline.change(|state| {
            if requests.len() > 1 {
                state.try_alone(requests, now);
            } else {
                let why = match failure {
                    RunFailure::Input(_) => Failure::Invalid(failure.to_string()),
                    _ => Failure::Internal(failure.to_string()),
                };
                requests.into_iter().for_each(|request| state.fail(request, why.clone(), now));
            }
            state.recycle(self.worker, batch.slot, now);
        });
    }
}
