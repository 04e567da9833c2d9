//! Streams: models that give many answers to a request, one after the other.
//!
//! The request's first answer comes as any answer does, and opens the stream in the worker. From then
//! on each further answer is asked for, by a step in the place of a batch: so streams take turns with
//! each other, a client that reads slowly holds nobody up, and a change of share takes effect with the
//! next answer. A hand-over lets the old worker's streams end there.

use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::scheduler::QueuedRequest;
use shadowslice_shared::batch::Command;
use shadowslice_shared::ids::WorkerId;
use tokio::sync::oneshot;

use super::Pipeline;
use super::claim::{Claim, stopping};
use super::delivery::Delivery;
use super::facts::LaneFact;
use super::memory::Reservation;
use super::pending::Pending;
use super::request::{Coming, Failure, Input, Output, RequestOptions};
use crate::relay::Onward;
use crate::router::Guest;

/// What a worker gave.
#[derive(Debug)]
pub(crate) struct Given {
    pub(crate) outputs: Vec<Output>,
    pub(crate) then: Then,
    pub(crate) delivery: Delivery,
}

#[derive(Debug)]
pub(crate) enum Then {
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
            if state.scheduler.close_stream(self.worker) {
                state.report(LaneFact::Drained(self.worker));
            }
            // Another may begin in its place.
            state.dispatch(now);
        });
    }
}

/// The answers to a request. Dropping them gives up those that have not come.
#[derive(Debug)]
pub struct Answers {
    first: Option<Vec<Output>>,
    /// The delivery of the first answer.
    delivery: Delivery,
    rest: Rest,
    /// So that the model's workers stay until the stream ends.
    guest: Option<Guest>,
}

/// Where further answers come from.
#[derive(Debug)]
enum Rest {
    /// There are none.
    None,
    Here(OpenStream, RequestOptions),
    /// Another supervisor's worker.
    Relayed(Onward),
}

impl Answers {
    /// `onward`: if it is a stream that goes on; `None` for its end, and for a model that gives one
    /// answer to a request.
    pub(crate) fn relayed(first: Vec<Output>, onward: Option<Onward>, streams: bool) -> Self {
        let first = (onward.is_some() || !streams).then_some(first);
        let rest = onward.map_or(Rest::None, Rest::Relayed);
        Self { first, delivery: Delivery::default(), rest, guest: None }
    }

    pub(crate) fn held(self, guest: Guest) -> Self {
        Self { guest: Some(guest), ..self }
    }

    /// Returns the delivery of the last answer. Only the first answer of a request counts.
    pub fn delivery(&mut self) -> Delivery {
        std::mem::take(&mut self.delivery)
    }

    /// `None` after the last one, and after a failure.
    pub async fn next(&mut self) -> Option<Result<Vec<Output>, Failure>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        let next = match &mut self.rest {
            Rest::None => return None,
            Rest::Here(open, terms) => open.next(*terms).await,
            Rest::Relayed(onward) => onward.next().await,
        };
        if !matches!(next, Some(Ok(_))) {
            (self.rest, self.guest) = (Rest::None, None);
        }
        next
    }
}

impl OpenStream {
    async fn next(&self, terms: RequestOptions) -> Option<Result<Vec<Output>, Failure>> {
        match self.step(terms).await {
            Ok(Given { outputs, then: Then::More, .. }) => Some(Ok(outputs)),
            Ok(_) => None,
            Err(failure) => Some(Err(failure)),
        }
    }

    async fn step(&self, terms: RequestOptions) -> Result<Given, Failure> {
        let Self { ref pipeline, worker, id, ref inputs } = *self;
        let (reply, answer) = oneshot::channel();
        let given_up = GivenUp(Claim::default());
        let now = pipeline.now();
        pipeline.change(|state| {
            let item = Pending {
                memory: Arc::clone(inputs),
                reply,
                claim: given_up.0.clone(),
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
                level: terms.level(),
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
        answer.await.unwrap_or_else(|_| stopping())
    }
}

/// So that a step that waits for its turn, and whose client has gone, does not get it.
struct GivenUp(Claim);

impl Drop for GivenUp {
    fn drop(&mut self) {
        self.0.take();
    }
}

/// Of a stream in whose step its worker died.
pub(crate) fn died_in_step() -> Failure {
    let why =
        "the worker died while it computed this stream's next answer; inputs that do so again are refused";
    Failure::Unavailable(why.to_owned())
}

/// Of a stream whose worker cannot go on: another worker could not either.
pub(crate) fn broken_off() -> Failure {
    Failure::Unavailable("the worker that gave this stream has ended; send the request again".to_owned())
}

impl Pipeline {
    /// As [`Self::infer`], for all models: those that do not stream give one answer. It returns when
    /// the first is there.
    pub async fn stream(
        &self,
        inputs: Vec<Input>,
        terms: RequestOptions,
        coming: Coming,
    ) -> Result<Answers, Failure> {
        let Given { outputs, then, mut delivery } = self.ask(inputs, terms, coming).await?;
        let (first, rest) = match then {
            Then::Opened(open) => (Some(outputs), Rest::Here(open, terms)),
            // The end of a stream carries no answer, so nothing will be written.
            Then::End | Then::More => ((!self.streams()).then_some(outputs), Rest::None),
        };
        if first.is_none() {
            delivery.written();
        }
        Ok(Answers { first, delivery, rest, guest: None })
    }

    /// Whether the model gives many answers to a request.
    pub fn streams(&self) -> bool {
        self.metadata().is_some_and(|model| model.streams.is_some())
    }
}
