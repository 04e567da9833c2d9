//! Streams: models that give many answers to a request, one after the other.
//!
//! The request's first answer comes as any answer does, and opens the stream in the worker. From then
//! on each further answer is asked for, by a step in the place of a batch: so streams take turns with
//! each other, a client that reads slowly holds nobody up, and a change of share takes effect with the
//! next answer. A hand-over lets the old worker's streams end there.

use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::scheduler::Entry;
use shadowslice_shared::batch::Command;
use shadowslice_shared::ids::WorkerId;
use tokio::sync::oneshot;

use super::Pipeline;
use super::claim::{Claim, stopping};
use super::delivery::Delivery;
use super::lane_events::LaneEvent;
use super::memory::Reservation;
use super::pending::PendingRequest;
use super::request::{InputTensor, OutputTensor, RequestArrival, RequestFailure, RequestOptions};
use crate::relay::RelayedStream;
use crate::router::RouteHold;

/// What a worker gave.
#[derive(Debug)]
pub(crate) struct WorkerAnswer {
    pub(crate) outputs: Vec<OutputTensor>,
    pub(crate) then: Continuation,
    pub(crate) delivery: Delivery,
}

#[derive(Debug)]
pub(crate) enum Continuation {
    /// It was the only answer, or is the end of a stream and has no outputs.
    End,
    Opened(OpenStream),
    More,
}

/// A stream in a worker, which is closed there when this is dropped.
#[derive(Debug)]
pub(crate) struct OpenStream {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) worker: WorkerId,
    /// The id of the batch that began it.
    pub(crate) id: u64,
    /// The request's.
    pub(crate) inputs: Arc<Reservation>,
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let now = self.pipeline.now();
        self.pipeline.change(|state| {
            if let Some(link) = state.link_mut(self.worker) {
                link.command(Command::Close(self.id));
            }
            if state.scheduler.closed(self.worker) {
                state.report(LaneEvent::Drained(self.worker));
            }
            // Another may begin in its place.
            state.dispatch(now);
        });
    }
}

/// The answers to a request. Dropping them gives up those that have not come.
#[derive(Debug)]
pub struct Answers {
    first: Option<Vec<OutputTensor>>,
    /// The delivery of the first answer.
    delivery: Delivery,
    rest: FurtherAnswers,
    /// So that the model's workers stay until the stream ends.
    route_hold: Option<RouteHold>,
}

/// Where further answers come from.
#[derive(Debug)]
enum FurtherAnswers {
    /// There are none.
    None,
    Here(OpenStream, RequestOptions),
    /// Another supervisor's worker.
    Relayed(RelayedStream),
}

impl Answers {
    /// `onward`: if it is a stream that goes on; `None` for its end, and for a model that gives one
    /// answer to a request.
    pub(crate) fn relayed(first: Vec<OutputTensor>, onward: Option<RelayedStream>, streams: bool) -> Self {
        let first = (onward.is_some() || !streams).then_some(first);
        let rest = onward.map_or(FurtherAnswers::None, FurtherAnswers::Relayed);
        Self { first, delivery: Delivery::default(), rest, route_hold: None }
    }

    pub(crate) fn held(self, route_hold: RouteHold) -> Self {
        Self { route_hold: Some(route_hold), ..self }
    }

    /// Returns the delivery of the last answer. Only the first answer of a request counts.
    pub fn delivery(&mut self) -> Delivery {
        std::mem::take(&mut self.delivery)
    }

    /// `None` after the last one, and after a failure.
    pub async fn next(&mut self) -> Option<Result<Vec<OutputTensor>, RequestFailure>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        let next = match &mut self.rest {
            FurtherAnswers::None => return None,
            FurtherAnswers::Here(open, options) => open.next(*options).await,
            FurtherAnswers::Relayed(onward) => onward.next().await,
        };
        if !matches!(next, Some(Ok(_))) {
            (self.rest, self.route_hold) = (FurtherAnswers::None, None);
        }
        next
    }
}

impl OpenStream {
    async fn next(&self, options: RequestOptions) -> Option<Result<Vec<OutputTensor>, RequestFailure>> {
        match self.step(options).await {
            Ok(WorkerAnswer { outputs, then: Continuation::More, .. }) => Some(Ok(outputs)),
            Ok(_) => None,
            Err(failure) => Some(Err(failure)),
        }
    }

    async fn step(&self, options: RequestOptions) -> Result<WorkerAnswer, RequestFailure> {
        let Self { ref pipeline, worker, id, ref inputs } = *self;
        let (reply_tx, reply_rx) = oneshot::channel();
        let given_up = AbandonedStep(Claim::default());
        let now = pipeline.now();
        pipeline.change(|state| {
            let item = PendingRequest {
                memory: Arc::clone(inputs),
                reply_tx,
                claim: given_up.0.clone(),
                received: now,
                copy_in: Duration::ZERO,
                deaths: 0,
                journal: None,
                stream: Some(id),
            };
            let deadline = now + state.scheduler.slo();
            let step = Entry {
                shape: Vec::new().into(),
                rows: 1,
                arrived: now,
                deadline,
                level: options.level(),
                alone: true,
                item,
            };
            if state.scheduler.step(worker, step).is_err() {
                state.stats.totals.streams_failed += 1;
                return Err(broken_off());
            }
            state.dispatch(now);
            Ok(())
        })?;
        reply_rx.await.unwrap_or_else(|_| stopping())
    }
}

/// So that a step that waits for its turn, and whose client has gone, does not get it.
struct AbandonedStep(Claim);

impl Drop for AbandonedStep {
    fn drop(&mut self) {
        self.0.take();
    }
}

/// Of a stream in whose step its worker died.
pub(crate) fn died_in_step() -> RequestFailure {
    let why =
        "the worker died while it computed this stream's next answer; inputs that do so again are refused";
    RequestFailure::Unavailable(why.to_owned())
}

/// Of a stream whose worker cannot go on: another worker could not either.
pub(crate) fn broken_off() -> RequestFailure {
    RequestFailure::Unavailable(
        "the worker that gave this stream has ended; send the request again".to_owned(),
    )
}

impl Pipeline {
    /// As [`Self::infer`], for all models: those that do not stream give one answer. It returns when
    /// the first is there.
    pub async fn stream(
        &self,
        inputs: Vec<InputTensor>,
        options: RequestOptions,
        arrival: RequestArrival,
    ) -> Result<Answers, RequestFailure> {
        let WorkerAnswer { outputs, then, mut delivery } = self.submit(inputs, options, arrival).await?;
        let (first, rest) = match then {
            Continuation::Opened(open) => (Some(outputs), FurtherAnswers::Here(open, options)),
            // The end of a stream carries no answer, so nothing will be written.
            Continuation::End | Continuation::More => {
                ((!self.streams()).then_some(outputs), FurtherAnswers::None)
            }
        };
        if first.is_none() {
            delivery.written();
        }
        Ok(Answers { first, delivery, rest, route_hold: None })
    }

    /// Whether the model gives many answers to a request.
    pub fn streams(&self) -> bool {
        self.metadata().is_some_and(|model| model.streams.is_some())
    }
}
