//! The reader of a lane receives a worker's answers and notices the worker's death.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use shadowslice_policy::scheduler::Unanswered;
use shadowslice_shared::batch::{
    self, BatchAnswer, BatchOutput, Command, MAX_MESSAGE_BYTES, RunFailure, WorkerMessage,
};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::slab::AnswerSlab;
use shadowslice_shared::units::Timestamp;

use super::BatchSocket;
use super::lane_events::LaneEvent;
use super::link::{LaneWorker, LinkModel, WorkerLink};
use crate::pipeline::Pipeline;
use crate::pipeline::figures::{BatchTimes, RequestTimes};
use crate::pipeline::requests::{
    Continuation, Delivery, InFlightBatch, Metadata, OpenStream, RequestFailure, RequestOutput,
    UnwrittenAnswer, WaitingRequest, WorkerAnswer, answer,
};
use crate::pipeline::state::{self, PipelineState};
use crate::pipeline::trace_event;
use crate::trace::{LostReason, RunEnd};
use shadowslice_shared::errors;

/// The reader of a lane. A lane belongs to one worker.
#[derive(Debug)]
pub struct LaneReader {
    pipeline: Arc<Pipeline>,
    metadata: Arc<Metadata>,
    worker: WorkerId,
    socket: Arc<BatchSocket>,
    slab: AnswerSlab,
}

impl LaneReader {
    /// Attaches a warm worker. No requests are routed to this worker yet.
    pub fn attach(
        pipeline: Arc<Pipeline>,
        metadata: Arc<Metadata>,
        lane_worker: LaneWorker,
        (socket, slab): (Arc<BatchSocket>, AnswerSlab),
    ) -> Self {
        let worker = lane_worker.worker;
        let (profile, now) = (pipeline.profile.as_ref(), pipeline.now());
        let model = LinkModel {
            name: Arc::clone(&pipeline.name),
            sm_time: Arc::clone(&pipeline.sm_time),
            pause_word: Arc::clone(slab.pause_word()),
        };
        let (link, lane) = WorkerLink::new(lane_worker, &metadata, profile, Arc::clone(&socket), model, now);
        let mut state = pipeline.state.lock();
        state.links.push(link);
        state.scheduler.attach(lane);
        state.residency.changed.notify_one();
        drop(state);
        Self { pipeline, metadata, worker, socket, slab }
    }

    /// Reads messages until the worker has ended, and then removes the worker's lane.
    pub async fn run(self) {
        let mut message = vec![0; MAX_MESSAGE_BYTES];
        loop {
            match self.socket.receive(&mut message).await {
                Ok(0) => break,
                Ok(length) => {
                    if let Err(why) = self.handle_message(&message[..length]) {
                        self.report_invalid(why);
                        // The worker may read its requests until it ends, so their memory stays
                        // reserved. Further messages from this worker are ignored.
                        while self.socket.receive(&mut message).await.is_ok_and(|length| length > 0) {}
                        break;
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "a worker's socket is closed");
                    break;
                }
            }
        }
        let now = self.pipeline.now();
        self.pipeline.change(|state| state.remove_dead(self.worker, now));
    }

    /// Reports an invalid message. The worker receives no more requests, and another worker serves
    /// its requests.
    fn report_invalid(&self, why: String) {
        let now = self.pipeline.now();
        self.pipeline.change(|state| {
            state.report(LaneEvent::Broken(self.worker, why));
            state.condemn(self.worker, now);
        });
    }

    fn handle_message(&self, message: &[u8]) -> Result<(), String> {
        match batch::decode(message).map_err(|error| errors::chain(&error))? {
            WorkerMessage::Answer(answer) => self.handle_answer(answer),
            WorkerMessage::Prepared(prepared) => {
                let event = LaneEvent::Prepared(self.worker, prepared);
                self.pipeline.state.lock().report(event);
                Ok(())
            }
            WorkerMessage::Asleep(slept) => {
                let now = self.pipeline.now();
                self.pipeline.change(|state| state.handle_asleep(self.worker, slept, now))
            }
            WorkerMessage::Awake(woken) => {
                let now = self.pipeline.now();
                self.pipeline.change(|state| state.handle_awake(self.worker, woken, now))
            }
        }
    }

    fn handle_answer(&self, answer: BatchAnswer) -> Result<(), String> {
        let now = self.pipeline.now();
        let taken = self.pipeline.state.lock().take_answered(self.worker, answer.id, now);
        let batch = taken
            .ok_or_else(|| format!("the worker answered batch {}, which was not sent to it", answer.id))?;
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
                self.handle_outputs(batch, (&outputs, answer.more), execution, now)
            }
            Err(failure) => {
                let is_false = failure == RunFailure::Asleep
                    && !self.pipeline.change(|state| state.may_sleep(self.worker));
                self.handle_failure(batch, &failure);
                // Without this check, the batch would be sent again and again.
                match is_false {
                    true => Err("the worker has lost its weights".to_owned()),
                    false => Ok(()),
                }
            }
        }
    }

    fn handle_outputs(
        &self,
        batch: InFlightBatch,
        (outputs, more): (&[BatchOutput], bool),
        reported: Duration,
        received: Timestamp,
    ) -> Result<(), String> {
        // `reported` is limited to the time since the batch was sent. The worker may have begun
        // this batch before the supervisor read the answer to the previous batch. `execution`,
        // which is used for predictions, only includes the time after the supervisor read that
        // answer.
        let reported = reported.min(received.since(batch.sent));
        let longest = batch.executing_since.map_or(Duration::ZERO, |since| received.since(since));
        let execution = reported.min(longest);
        let answers = match answer::split(&self.metadata, &self.slab, (outputs, more), &batch.requests) {
            Ok(answers) => answers,
            Err(why) => {
                self.take_back_unanswered(batch);
                return Err(why);
            }
        };
        let now = self.pipeline.now();
        let input = batch.requests.iter().map(|request| request.item.copy_in).sum();
        let took = BatchTimes { input, infer: reported, output: now.since(received) };
        let is_step = batch.requests.iter().any(|request| request.item.stream.is_some());
        let opens = more && !is_step;
        let deliveries = self.deliveries(&batch, &answers, took, is_step, now);
        let at = SystemTime::now();
        let routed = self.pipeline.change(|state| {
            if opens {
                state.scheduler.open_stream(self.worker);
            }
            // A client cancelled a request without a delivery while it ran, so the request has already
            // been counted as cancelled.
            let unsettled = batch.requests.iter().zip(&answers).zip(&deliveries);
            let unsettled = unsettled.filter_map(|(answered, delivery)| delivery.as_ref().map(|_| answered));
            if is_step {
                unsettled.for_each(|(request, answer)| state.count_step(request, answer, more, reported));
            } else {
                let rows =
                    unsettled.map(|(request, answer)| state.count_rows(request, answer, more, now)).sum();
                state.stats.totals.add_batch(batch.rows, rows, took, at);
            }
            state.complete(self.worker, &batch, execution, now);
            state.routed
        });
        let end = RunEnd::Answered { received, execution: reported, copied: now };
        trace_event::record_answer(&batch, end, routed);
        for ((request, answer), delivery) in batch.requests.into_iter().zip(answers).zip(deliveries) {
            let then = match more {
                false => Continuation::End,
                true if opens => Continuation::Opened(self.open_stream(batch.id, &request)),
                true => Continuation::More,
            };
            let delivery = delivery.unwrap_or_default();
            state::reply(request, answer.map(|outputs| WorkerAnswer { outputs, then, delivery }));
        }
        Ok(())
    }

    /// Takes the requests of a batch back, because the worker's answer is invalid.
    fn take_back_unanswered(&self, batch: InFlightBatch) {
        let now = self.pipeline.now();
        trace_event::record_loss(&batch.requests, LostReason::Nonsense, now);
        self.pipeline.change(|state| {
            let again = state.blame(batch.requests, now);
            state.try_alone(again, now);
        });
    }

    /// Returns a delivery for each unsettled request, and `None` for each settled request. A
    /// failure or a later answer of a stream gets the default delivery.
    fn deliveries(
        &self,
        batch: &InFlightBatch,
        answers: &[SplitAnswer],
        took: BatchTimes,
        is_step: bool,
        now: Timestamp,
    ) -> Vec<Option<Delivery>> {
        let delivery = |(request, answer): (&WaitingRequest, &SplitAnswer)| {
            if !request.item.claim.take() {
                return None;
            }
            if is_step || answer.is_err() {
                return Some(Delivery::default());
            }
            let spent = RequestTimes {
                latency: now.since(request.arrived),
                receiving: request.item.received.since(request.arrived),
                until_sent: batch.sent.since(request.item.received),
                copy_in: request.item.copy_in,
                execution: took.infer,
                copy_out: took.output,
                writing: Duration::ZERO,
            };
            let pipeline = Arc::clone(&self.pipeline);
            Some(Delivery::new(UnwrittenAnswer { pipeline, arrived: request.arrived, answered: now, spent }))
        };
        batch.requests.iter().zip(answers).map(delivery).collect()
    }

    fn open_stream(&self, id: u64, request: &WaitingRequest) -> OpenStream {
        let (pipeline, inputs) = (Arc::clone(&self.pipeline), Arc::clone(&request.item.memory));
        OpenStream { pipeline, worker: self.worker, id, tenant: request.tenant, inputs }
    }

    /// Handles a failed batch. If the batch had only one request, the client receives the engine's
    /// error. Otherwise each request is retried alone. A batch that reached a sleeping worker has not
    /// run, and waits for the next wake.
    fn handle_failure(&self, mut batch: InFlightBatch, failure: &RunFailure) {
        let now = self.pipeline.now();
        let requests = std::mem::take(&mut batch.requests);
        trace_event::record_loss(&requests, LostReason::Failed, now);
        self.pipeline.change(|state| {
            if *failure == RunFailure::Asleep {
                state.put_back(requests, now);
            } else if requests.len() > 1 {
                state.try_alone(requests, now);
            } else {
                let why = match failure {
                    RunFailure::Input(_) => RequestFailure::Invalid(failure.to_string()),
                    _ => RequestFailure::Internal(failure.to_string()),
                };
                requests.into_iter().for_each(|request| state.fail(request, why.clone(), now));
            }
            state.recycle(self.worker, batch.slot, now);
        });
    }
}

/// The answer to one request of a batch.
type SplitAnswer = Result<Vec<RequestOutput>, RequestFailure>;

impl PipelineState {
    /// Counts a later answer of a stream.
    fn count_step(&mut self, request: &WaitingRequest, answer: &SplitAnswer, more: bool, took: Duration) {
        match answer {
            Ok(_) => self.stats.totals.stream_steps.add(took),
            Err(_) => self.stats.totals.streams_failed += 1,
        }
        if !more {
            self.quarantine.lift(&request.item.memory);
        }
    }

    /// Counts a failed answer. Returns the number of answered rows.
    fn count_rows(
        &mut self,
        request: &WaitingRequest,
        answer: &SplitAnswer,
        more: bool,
        now: Timestamp,
    ) -> u32 {
        if answer.is_err() {
            self.record_unanswered(Unanswered::Failed, now.since(request.arrived), now);
            return 0;
        }
        if request.item.deaths > 0 && !more {
            self.quarantine.lift(&request.item.memory);
        }
        request.rows
    }
}
