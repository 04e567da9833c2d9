//! The answers to a request: one answer, or the answers of a stream.

use std::sync::Arc;

use super::delivery::Delivery;
use super::request::{RequestArrival, RequestFailure, RequestInput, RequestOptions, RequestOutput};
use super::streams::OpenStream;
use crate::pipeline::Pipeline;
use crate::pipeline::cache::CacheLookup;
use crate::relay::RelayedStream;
use crate::router::RouteHold;

/// A worker's answer to one request.
#[derive(Debug)]
pub(crate) struct WorkerAnswer {
    pub(crate) outputs: Vec<RequestOutput>,
    pub(crate) then: Continuation,
    pub(crate) delivery: Delivery,
}

/// The answers that follow a first answer.
#[derive(Debug)]
pub(crate) enum Continuation {
    /// The end of the answers. A stream that ended without any answer has no outputs.
    End,
    /// The rest of a stream, whose first answer this is.
    Opened(OpenStream),
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
    Here(OpenStream),
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

    /// Returns the outputs of the first answer, if it has not been taken.
    pub(crate) fn first(&self) -> Option<&[RequestOutput]> {
        self.first.as_deref()
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
            FurtherAnswers::Here(open) => open.next().await,
            FurtherAnswers::Relayed(stream) => stream.next().await,
        };
        if !matches!(next, Some(Ok(_))) {
            (self.rest, self.route_hold) = (FurtherAnswers::None, None);
        }
        next
    }
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
            Continuation::Opened(open) => (Some(outputs), FurtherAnswers::Here(open)),
            // A stream without any answer has nothing to write.
            Continuation::End if outputs.is_empty() && self.streams() => (None, FurtherAnswers::None),
            Continuation::End => (Some(outputs), FurtherAnswers::None),
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
