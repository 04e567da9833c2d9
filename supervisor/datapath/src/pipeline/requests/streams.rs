//! Streams: sequences of answers to one request, for models that generate their output step by
//! step.
//!
//! The first answer arrives like the answer of any model, and opens the stream in the worker. A
//! step requests the next answer, and is scheduled like a batch. As a result, streams are served
//! alternately, and a client that reads slowly delays no other client. A change of share takes
//! effect with the next answer. A hand-over ends the streams of the previous worker.

use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::scheduler::QueuedRequest;
use shadowslice_policy::tenants::TenantId;
use shadowslice_shared::batch::Command;
use shadowslice_shared::ids::WorkerId;
use tokio::sync::oneshot;

use super::claim::{Claim, stopping};
use super::delivery::Delivery;
use super::memory::Reservation;
use super::pending::PendingRequest;
use super::request::{RequestArrival, RequestFailure, RequestInput, RequestOptions, RequestOutput};
use crate::pipeline::Pipeline;
use crate::pipeline::cache::CacheLookup;
use crate::pipeline::workers::LaneEvent;
use crate::relay::RelayedStream;
use crate::router::RouteHold;

/// A worker's answer to one request.
#[derive(Debug)]
pub(crate) struct WorkerAnswer {
    pub(crate) outputs: Vec<RequestOutput>,
    pub(crate) then: Continuation,
    pub(crate) delivery: Delivery,
}

/// The state of a stream after an answer.
#[derive(Debug)]
pub(crate) enum Continuation {
    /// This was the only answer, or the end of a stream. The end of a stream has no outputs.
    End,
    /// This is the first answer of a stream.
    Opened(OpenStream),
    More,
}

/// A stream that is open in a worker. Dropping this value closes the stream in the worker.
#[derive(Debug)]
pub(crate) struct OpenStream {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) worker: WorkerId,
    /// The id of the batch that opened the stream.
    pub(crate) id: u64,
    pub(crate) tenant: TenantId,
    /// The inputs of the request.
    pub(crate) inputs: Arc<Reservation>,
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let now = self.pipeline.now();
        self.pipeline.change(|state| {
            if let Some(link) = state.link_mut(self.worker) {
                link.command(Command::Close(self.id));
            }
            if state.scheduler.close_stream(self.worker) {
                state.report(LaneEvent::Drained(self.worker));
            }
            // The worker can now open another stream, so a waiting request may start.
            state.dispatch(now);
        });
    }
}

/// The answers to a request. Dropping this value cancels the answers that have not arrived.
#[derive(Debug)]
pub struct Answers {
    first: Option<Vec<RequestOutput>>,
    /// The delivery of the first answer.
    delivery: Delivery,
    rest: FurtherAnswers,
    /// The hold that keeps the model's workers running until the stream ends.
    route_hold: Option<RouteHold>,
}

/// The source of the answers after the first answer.
#[derive(Debug)]
enum FurtherAnswers {
    /// The request has only one answer, or its stream has ended.
    None,
    /// The answers come from a worker of this supervisor.
    Here(OpenStream, RequestOptions),
    /// The answers come from another supervisor's worker.
    Relayed(RelayedStream),
}

impl Answers {
    /// Creates the answers to a relayed request. `further` is the rest of the stream. It is `None`
    /// if the stream has ended or the model gives one answer.
    pub(crate) fn from_relay(
        first: Vec<RequestOutput>,
        further: Option<RelayedStream>,
        streams: bool,
    ) -> Self {
        let first = (further.is_some() || !streams).then_some(first);
        let rest = further.map_or(FurtherAnswers::None, FurtherAnswers::Relayed);
        Self { first, delivery: Delivery::default(), rest, route_hold: None }
    }

    /// Creates the only answer to a request.
    pub(crate) fn single(outputs: Vec<RequestOutput>, delivery: Delivery) -> Self {
        Self { first: Some(outputs), delivery, rest: FurtherAnswers::None, route_hold: None }
    }

    pub(crate) fn with_hold(self, route_hold: RouteHold) -> Self {
        Self { route_hold: Some(route_hold), ..self }
    }

    /// Returns the delivery of the most recent answer. Only the first answer of a request is
    /// counted.
    pub fn delivery(&mut self) -> Delivery {
        std::mem::take(&mut self.delivery)
    }

    /// Returns the outputs of the first answer and their delivery, and cancels all other answers.
    pub fn into_single(mut self) -> (Vec<RequestOutput>, Delivery) {
        (self.first.take().unwrap_or_default(), self.delivery())
    }

    /// Returns the next answer. Returns `None` after the last answer and after a failure.
    pub async fn next(&mut self) -> Option<Result<Vec<RequestOutput>, RequestFailure>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        let next = match &mut self.rest {
            FurtherAnswers::None => return None,
            FurtherAnswers::Here(open, options) => open.next(*options).await,
            FurtherAnswers::Relayed(stream) => stream.next().await,
        };
        if !matches!(next, Some(Ok(_))) {
            (self.rest, self.route_hold) = (FurtherAnswers::None, None);
        }
        next
    }
}

impl OpenStream {
    async fn next(&self, options: RequestOptions) -> Option<Result<Vec<RequestOutput>, RequestFailure>> {
        match self.step(options).await {
            Ok(WorkerAnswer { outputs, then: Continuation::More, .. }) => Some(Ok(outputs)),
            Ok(_) => None,
            Err(failure) => Some(Err(failure)),
        }
    }

    async fn step(&self, options: RequestOptions) -> Result<WorkerAnswer, RequestFailure> {
        let Self { ref pipeline, worker, id, tenant, ref inputs } = *self;
        let (reply_tx, reply_rx) = oneshot::channel();
        let guard = StepGuard(Claim::default());
        let now = pipeline.now();
        pipeline.change(|state| {
            let item = PendingRequest {
                memory: Arc::clone(inputs),
                reply_tx,
                claim: guard.0.clone(),
                received: now,
                copy_in: Duration::ZERO,
                deaths: 0,
                journal: None,
                stream: Some(id),
            };
            let deadline = now + state.scheduler.slo();
            let step = QueuedRequest {
                shape: Vec::new().into(),
                rows: 1,
                arrived: now,
                deadline,
                expires: None,
                level: options.level(),
                tenant,
                alone: true,
                item,
            };
            if state.scheduler.queue_step(worker, step).is_err() {
                state.stats.totals.streams_failed += 1;
                return Err(broken_off());
            }
            state.dispatch(now);
            Ok(())
        })?;
        reply_rx.await.unwrap_or_else(|_| stopping())
    }
}

/// A guard that takes the claim of a step when the guard is dropped. The step then does not run
/// after its client has disconnected.
struct StepGuard(Claim);

impl Drop for StepGuard {
    fn drop(&mut self) {
        self.0.take();
    }
}

/// Returns the failure of a stream whose worker died in a step.
pub(crate) fn died_in_step() -> RequestFailure {
    let why = "the worker died while computing this stream's next answer; the server refuses inputs that cause this again";
    RequestFailure::Unavailable(why.to_owned())
}

/// Returns the failure of a stream whose worker cannot continue. No other worker can continue the
/// stream either.
pub(crate) fn broken_off() -> RequestFailure {
    RequestFailure::Unavailable("the worker of this stream has exited; send the request again".to_owned())
}

impl Pipeline {
    /// Runs a request, and returns when the first answer has arrived. If the model does not stream,
    /// the first answer is the only answer. The outputs are in the order of the model's metadata.
    ///
    /// The caller must have checked `inputs` against this metadata. `inputs` must be in the order
    /// of the metadata. If the request has any optional input, all optional inputs follow the
    /// required inputs. [`RequestInput::left_out`] stands for each optional input that the request
    /// omits.
    ///
    /// If the model has a cache, a request with known inputs gets its answer from there. Dropping the
    /// future cancels the request, so that a waiting request does not run. The
    /// pipeline also cancels a request when the request's timeout expires. The deadline is the SLO
    /// or the timeout, whichever is shorter. The request is counted when the delivery of its first
    /// answer ends.
    pub async fn infer(
        self: &Arc<Self>,
        inputs: Vec<RequestInput>,
        options: RequestOptions,
        arrival: RequestArrival,
    ) -> Result<Answers, RequestFailure> {
        let missed = match self.look_up(&inputs, &arrival) {
            CacheLookup::Found(answered) => return answered,
            CacheLookup::Missed(inputs) => Some(inputs),
            CacheLookup::Off => None,
        };
        let WorkerAnswer { outputs, then, mut delivery } = self.submit(inputs, options, arrival).await?;
        if let Some(inputs) = missed {
            self.store_answer(inputs, &outputs);
        }
        let (first, rest) = match then {
            Continuation::Opened(open) => (Some(outputs), FurtherAnswers::Here(open, options)),
            // The end of a stream has no answer, so there is nothing to write.
            Continuation::End | Continuation::More => {
                ((!self.streams()).then_some(outputs), FurtherAnswers::None)
            }
        };
        if first.is_none() {
            delivery.mark_written();
        }
        Ok(Answers { first, delivery, rest, route_hold: None })
    }

    /// Returns whether the model gives many answers to a request.
    pub fn streams(&self) -> bool {
        self.metadata().is_some_and(|model| model.streams.is_some())
    }
}
