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
    Continuation, Delivery, InFlightBatch, Metadata, OpenStream, RequestFailure, RequestOutput, StreamKey,
    StreamState, UnwrittenAnswer, WaitingRequest, WorkerAnswer, answer,
};
use crate::pipeline::state::{self, PipelineState};
use crate::pipeline::trace_event;
use crate::trace::{LostReason, RunEnd};
use shadowslice_shared::errors;

/// The reader of a lane. A lane belongs to one worker.
#[derive(Debug)]
pub struct LaneReader {
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) metadata: Arc<Metadata>,
    pub(super) worker: WorkerId,
    socket: Arc<BatchSocket>,
    pub(super) slab: AnswerSlab,
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
            step_timeout: pipeline.step_timeout,
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
            WorkerMessage::Stepped(answer) => self.handle_step(answer),
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
        let batch = self.take_answered(answer.id, false, now)?;
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
            Ok(outputs) if outputs.is_empty() && answer.more => {
                self.handle_start(batch, Duration::from_micros(answer.execution_us), now)
            }
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

    /// Removes an answered batch or step from its lane.
    pub(super) fn take_answered(
        &self,
        id: u64,
        is_step: bool,
        now: Timestamp,
    ) -> Result<InFlightBatch, String> {
        let taken = self.pipeline.state.lock().take_answered(self.worker, id, now);
        let batch =
            taken.ok_or_else(|| format!("the worker answered batch {id}, which was not sent to it"))?;
        if batch.step != is_step {
            self.take_back_unanswered(batch);
            return Err(format!("the worker's answer {id} has the wrong kind"));
        }
        Ok(batch)
    }

    /// Returns the reported execution time, limited to the time since the batch was sent, and the time for
    /// predictions. The worker may have begun the batch before the supervisor read the answer to the
    /// previous one. The time for predictions only includes the time after that.
    pub(super) fn execution(
        batch: &InFlightBatch,
        reported: Duration,
        received: Timestamp,
    ) -> ExecutionTimes {
        let reported = reported.min(received.since(batch.sent));
        let longest = batch.executing_since.map_or(Duration::ZERO, |since| received.since(since));
        ExecutionTimes { reported, predicted: reported.min(longest) }
    }

    fn handle_outputs(
        &self,
        batch: InFlightBatch,
        (outputs, more): (&[BatchOutput], bool),
        reported: Duration,
        received: Timestamp,
    ) -> Result<(), String> {
        let ExecutionTimes { reported, predicted: execution } = Self::execution(&batch, reported, received);
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
        let deliveries: Vec<_> = batch
            .requests
            .iter()
            .zip(&answers)
            .map(|(request, answer)| self.delivery(request, answer, batch.sent, took, now))
            .collect();
        let at = SystemTime::now();
        let routed = self.pipeline.change(|state| {
            if more {
                state.scheduler.open_stream(self.worker);
            }
            // A client cancelled a request without a delivery while it ran, so the request has already
            // been counted as cancelled.
            let unsettled = batch.requests.iter().zip(&answers).zip(&deliveries);
            let unsettled = unsettled.filter_map(|(answered, delivery)| delivery.as_ref().map(|_| answered));
            let rows = unsettled.map(|(request, answer)| state.count_rows(request, answer, more, now)).sum();
            state.stats.totals.add_batch(batch.rows, rows, took, at);
            state.complete(self.worker, &batch, execution, now);
            state.routed
        });
        let end = RunEnd::Answered { received, execution: reported, copied: now };
        trace_event::record_answer(&batch, end, routed);
        for ((request, answer), delivery) in batch.requests.into_iter().zip(answers).zip(deliveries) {
            let then = match more {
                false => Continuation::End,
                true => {
                    let open = self.pipeline.change(|state| self.open_stream(state, batch.id, &request));
                    Continuation::Opened(open)
                }
            };
            let delivery = delivery.unwrap_or_default();
            state::reply(request, answer.map(|outputs| WorkerAnswer { outputs, then, delivery }));
        }
        Ok(())
    }

    /// Takes the requests of a batch back, because the worker's answer is invalid.
    pub(super) fn take_back_unanswered(&self, batch: InFlightBatch) {
        let now = self.pipeline.now();
        trace_event::record_loss(&batch.requests, LostReason::Nonsense, now);
        self.pipeline.change(|state| {
            let again = state.blame(batch.requests, now);
            state.try_alone(again, now);
        });
    }

    /// Returns the delivery of the first or only answer to a request, or `None` if the request is settled.
    /// A failure gets the default delivery.
    pub(super) fn delivery(
        &self,
        request: &WaitingRequest,
        answer: &SplitAnswer,
        sent: Timestamp,
        took: BatchTimes,
        now: Timestamp,
    ) -> Option<Delivery> {
        if !request.item.claim.take() {
            return None;
        }
        if answer.is_err() {
            return Some(Delivery::default());
        }
        let spent = RequestTimes {
            latency: now.since(request.arrived),
            receiving: request.item.received.since(request.arrived),
            until_sent: sent.since(request.item.received),
            copy_in: request.item.copy_in,
            execution: took.infer,
            copy_out: took.output,
            writing: Duration::ZERO,
        };
        let pipeline = Arc::clone(&self.pipeline);
        Some(Delivery::new(UnwrittenAnswer { pipeline, arrived: request.arrived, answered: now, spent }))
    }

    /// Returns the client's end of the stream that a request has opened.
    pub(super) fn open_stream(&self, state: &PipelineState, id: u64, request: &WaitingRequest) -> OpenStream {
        let key = StreamKey { worker: self.worker, id };
        let together = self.metadata.streams.is_some_and(|streams| streams.per_step > 1);
        let is_suspect = request.item.deaths > 0 || state.quarantine.is_suspect(&request.item.memory);
        let stream = Arc::new(StreamState::of(key, request, together, is_suspect));
        OpenStream { pipeline: Arc::clone(&self.pipeline), stream }
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
pub(super) type SplitAnswer = Result<Vec<RequestOutput>, RequestFailure>;

/// The execution times of a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExecutionTimes {
    pub(super) reported: Duration,
    /// The time that is used for predictions.
    pub(super) predicted: Duration,
}

impl PipelineState {
    /// Counts a failed answer. Returns the number of answered rows.
    pub(super) fn count_rows(
        &mut self,
        request: &WaitingRequest,
        answer: &SplitAnswer,
        more: bool,
        now: Timestamp,
    ) -> u32 {
        let waited = now.since(request.arrived);
        match answer {
            Err(RequestFailure::Invalid(_)) => {
                self.stats.count_invalid(waited);
                return 0;
            }
            Err(_) => {
                self.record_unanswered(Unanswered::Failed, waited, now);
                return 0;
            }
            Ok(_) => {}
        }
        if request.item.deaths > 0 && !more {
            self.quarantine.lift(&request.item.memory);
        }
        request.rows
    }
}
