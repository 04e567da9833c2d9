//! The reader's handling of streams: their starts, and the answers to steps.

use std::time::{Duration, SystemTime};

use shadowslice_shared::batch::{RunFailure, StepAnswer, StreamAnswer};
use shadowslice_shared::units::Timestamp;

use super::reader::{ExecutionTimes, LaneReader, SplitAnswer};
use crate::pipeline::figures::BatchTimes;
use crate::pipeline::requests::{
    Continuation, InFlightBatch, ReplyTarget, RequestFailure, StreamKey, WaitingRequest, WorkerAnswer, answer,
};
use crate::pipeline::state::{self, PipelineState};
use crate::pipeline::trace_event;
use crate::trace::RunEnd;

/// The answer of one stream to a step.
struct SteppedStream {
    request: WaitingRequest,
    answer: SplitAnswer,
    /// True if the stream has further answers.
    more: bool,
}

/// The times of a step.
#[derive(Clone, Copy)]
struct StepTimes {
    sent: Timestamp,
    took: BatchTimes,
    now: Timestamp,
}

impl LaneReader {
    /// Handles a batch that opened a stream whose first answer needs a step.
    pub(super) fn handle_start(
        &self,
        mut batch: InFlightBatch,
        reported: Duration,
        received: Timestamp,
    ) -> Result<(), String> {
        let (true, 1) = (self.metadata.streams.is_some(), batch.requests.len()) else {
            self.take_back_unanswered(batch);
            return Err("the worker opened a stream, but the model gives one answer to a request".to_owned());
        };
        let ExecutionTimes { reported, predicted } = Self::execution(&batch, reported, received);
        let key = StreamKey { worker: self.worker, id: batch.id };
        self.trace_answer(&batch, RunEnd::Answered { received, execution: reported, copied: received });
        let requests = std::mem::take(&mut batch.requests);
        let input = requests.iter().map(|request| request.item.copy_in).sum();
        let took = BatchTimes { input, infer: reported, output: Duration::ZERO };
        self.pipeline.change(|state| {
            state.scheduler.open_stream(self.worker);
            state.stats.totals.add_batch(batch.rows, 0, took, SystemTime::now());
            for mut request in requests {
                if request.item.claim.is_taken() {
                    // The client has left, so nobody else closes the stream.
                    state.close_stream(key);
                    continue;
                }
                request.item.claim.set_opened(Some(key));
                request.item.stream = Some(key.id);
                request.alone = request.item.deaths > 0;
                if let Err(request) = state.scheduler.queue_step(self.worker, request) {
                    state.put_back(vec![request], received);
                }
            }
            state.complete(self.worker, &batch, predicted, received);
        });
        Ok(())
    }

    /// Handles the answers to a step. Queues the next step of each stream before the lane is free, so that
    /// the next step contains all streams again.
    pub(super) fn handle_step(&self, answer: StepAnswer) -> Result<(), String> {
        let received = self.pipeline.now();
        let mut batch = self.take_answered(answer.id, true, received)?;
        if batch.requests.is_empty() {
            self.pipeline.change(|state| state.recycle(self.worker, batch.slot, received));
            return Ok(());
        }
        let answers = match self.split_step(&batch, &answer.streams) {
            Ok(answers) => answers,
            Err(why) => {
                self.take_back_unanswered(batch);
                return Err(why);
            }
        };
        let reported = Duration::from_micros(answer.execution_us);
        let ExecutionTimes { reported, predicted } = Self::execution(&batch, reported, received);
        let now = self.pipeline.now();
        let took = BatchTimes { input: Duration::ZERO, infer: reported, output: now.since(received) };
        let times = StepTimes { sent: batch.sent, took, now };
        self.trace_answer(&batch, RunEnd::Answered { received, execution: reported, copied: now });
        let requests = std::mem::take(&mut batch.requests).into_iter().zip(answers);
        let stepped = requests.map(|(request, (answer, more))| SteppedStream { request, answer, more });
        let mut replies = Vec::new();
        self.pipeline.change(|state| {
            state.stats.totals.stream_steps.add(reported);
            for stream in stepped {
                replies.extend(self.continue_stepped(state, stream, times));
            }
            state.record_answered(self.worker, replies.len());
            state.complete(self.worker, &batch, predicted, now);
        });
        // A client that has left drops its reply here, which closes the stream.
        for (request, answer) in replies {
            state::reply(request, answer);
        }
        Ok(())
    }

    fn trace_answer(&self, batch: &InFlightBatch, end: RunEnd) {
        let routed = self.pipeline.state.lock().routed;
        trace_event::record_answer(batch, end, routed);
    }

    /// Copies the answers of a step. Returns each with whether the stream has further answers.
    fn split_step(
        &self,
        batch: &InFlightBatch,
        streams: &[StreamAnswer],
    ) -> Result<Vec<(SplitAnswer, bool)>, String> {
        if streams.len() != batch.requests.len() {
            let (got, want) = (streams.len(), batch.requests.len());
            return Err(format!("the worker answered {got} streams of a step instead of {want}"));
        }
        let outputs = streams.iter().filter_map(|stream| stream.result.as_ref().ok()).flatten();
        answer::check_lengths(&self.slab, outputs)?;
        let of_stream = |(stream, request): (&StreamAnswer, &WaitingRequest)| match &stream.result {
            Ok(outputs) => {
                let request = std::slice::from_ref(request);
                let split = answer::split(&self.metadata, &self.slab, (outputs, stream.more), request)?;
                let answer = split.into_iter().next().unwrap_or_else(|| Ok(Vec::new()));
                Ok((answer, stream.more))
            }
            Err(failure) => Ok((Err(stream_failure(failure)), false)),
        };
        streams.iter().zip(&batch.requests).map(of_stream).collect()
    }

    /// Gives the answer to the stream's client, and queues the next step. Returns the reply to a request
    /// that waits for its first answer.
    fn continue_stepped(
        &self,
        state: &mut PipelineState,
        SteppedStream { request, answer, more }: SteppedStream,
        StepTimes { sent, took, now }: StepTimes,
    ) -> Option<(WaitingRequest, Result<WorkerAnswer, RequestFailure>)> {
        let has_failed = answer.is_err();
        if more && answer.as_ref().is_ok_and(Vec::is_empty) {
            // The next answer needs another step. A client that has left has closed its stream.
            if !request.item.claim.is_taken()
                && let Err(request) = state.scheduler.queue_step(self.worker, request)
            {
                state.put_back(vec![request], now);
            }
            return None;
        }
        if !more && !has_failed {
            state.quarantine.lift(&request.item.memory);
        }
        if let ReplyTarget::Stream(stream) = &request.item.reply {
            if !stream.claim.is_taken() {
                match has_failed {
                    true => state.stats.totals.streams_failed += 1,
                    false if answer.as_ref().is_ok_and(|outputs| !outputs.is_empty()) => {
                        state.record_gap(now.since(request.arrived), now);
                    }
                    false => {}
                }
                // The client needs no answers after one that has no memory.
                stream.add(answer, more && !has_failed);
                state.continue_stream(stream, false, now);
            }
            return None;
        }
        let id = request.item.stream.unwrap_or_default();
        let key = StreamKey { worker: self.worker, id };
        let Some(delivery) = self.delivery(&request, &answer, sent, took, now) else {
            // The client has left, and has closed the stream.
            return None;
        };
        request.item.claim.set_opened(None);
        let rows = state.count_rows(&request, &answer, more, now);
        state.stats.totals.rows += u64::from(rows);
        let then = if more && !has_failed {
            let open = self.open_stream(state, id, &request);
            state.continue_stream(&open.stream, false, now);
            Continuation::Opened(open)
        } else {
            state.close_stream(key);
            Continuation::End
        };
        Some((request, answer.map(|outputs| WorkerAnswer { outputs, then, delivery })))
    }
}

impl PipelineState {
    fn record_gap(&mut self, gap: Duration, now: Timestamp) {
        self.scheduler.record_gap(gap, now);
        self.stats.totals.stream_gaps.record(gap);
    }
}

fn stream_failure(failure: &RunFailure) -> RequestFailure {
    match failure {
        RunFailure::Input(_) => RequestFailure::Invalid(failure.to_string()),
        _ => RequestFailure::Internal(failure.to_string()),
    }
}
