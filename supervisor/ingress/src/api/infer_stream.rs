//! `ModelStreamInfer`, a call with many requests and answers.
//!
//! The answers of models that give one answer to a request have the order of their requests, as in
//! Triton. Models that stream send their answers as soon as possible, each with the id of its
//! request. The next answer is requested when the connection has room for it. A request that fails
//! receives a message with the reason, and the call continues.

use std::collections::HashMap;
use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, FuturesOrdered, SelectAll, Stream, StreamExt, TryStreamExt};
use hyper::HeaderMap;
use prost::Message as _;
use shadowslice_datapath::access::AccessEntry;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::RequestArrival;
use shadowslice_datapath::router::Route;
use shadowslice_datapath::tenants::TenantId;
use tonic::{Code, Status, Streaming};

use super::frontend::Frontend;
use super::grpc_infer::{self, response, response_bytes};
use super::inference::{CheckedRequest, Target, tensor_bytes};
use super::model;
use crate::admission::{Budget, CALL_PERMIT, Deliveries, MemoryPermit, RequestError, Stop, log_error};
use crate::proto::infer_parameter::ParameterChoice;
use crate::proto::{InferParameter, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse};
use crate::transport::MessageStarts;

pub(super) const STREAM: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

/// The maximum number of concurrent requests of a call. Further requests are not read.
const MAX_REQUESTS: usize = 64;

/// The parameter by which a client requests a message at the end of a stream.
const WANTS_END: &str = "triton_enable_empty_final_response";

/// The parameter of an answer that tells whether it is the last one.
const IS_END: &str = "triton_final_response";

/// The context of a call.
#[derive(Clone)]
pub(super) struct StreamContext {
    pub(super) front: Arc<Frontend>,
    pub(super) peer: Arc<Peer>,
    pub(super) tenant: TenantId,
    pub(super) call: Arc<MemoryPermit>,
    pub(super) starts: MessageStarts,
    /// The deadline of the call, or `None` if it has none.
    pub(super) ends: Option<Instant>,
    pub(super) headers: Arc<HeaderMap>,
}

/// The answers of a call.
pub(super) struct InferStream {
    context: StreamContext,
    /// The requests, or `None` after the client's last request.
    requests: Option<Streaming<ModelInferRequest>>,
    /// The permit of the next request.
    next_permit: Arc<MemoryPermit>,
    in_order: FuturesOrdered<BoxFuture<'static, AnswerWithPermit>>,
    streams: SelectAll<BoxStream<'static, ModelStreamInferResponse>>,
    stop: BoxFuture<'static, ()>,
    is_stopping: bool,
    /// True if an answer that may not be written yet was returned since the last poll without one.
    has_answered: bool,
    /// The fault of the last message. It is reported after the answers to all earlier messages.
    fault: Option<Status>,
}

type AnswerWithPermit = (ModelStreamInferResponse, Arc<MemoryPermit>);

/// A request of the call.
struct StreamedRequest {
    context: StreamContext,
    /// The route to the model, or the reason why there is none.
    route: Result<Route, RequestError>,
    message: ModelInferRequest,
    permit: Arc<MemoryPermit>,
    arrival: RequestArrival,
    entry: Option<AccessEntry>,
}

impl InferStream {
    pub(super) fn new(
        context: StreamContext,
        requests: Streaming<ModelInferRequest>,
        stop: Stop,
    ) -> Result<Self, RequestError> {
        let client = Arc::clone(context.call.client());
        Ok(Self {
            next_permit: unused_permit(&context)?,
            context,
            requests: Some(requests),
            in_order: FuturesOrdered::new(),
            streams: SelectAll::new(),
            stop: Box::pin(async move { client.must_end(stop).await }),
            is_stopping: false,
            has_answered: false,
            fault: None,
        })
    }

    /// Begins the requests that have arrived. An error ends the call.
    fn begin_arrived(&mut self, cx: &mut Context<'_>) -> Result<(), Status> {
        while self.in_order.len() + self.streams.len() < MAX_REQUESTS {
            let Some(requests) = self.requests.as_mut().filter(|_| !self.is_stopping) else { return Ok(()) };
            let permit = Arc::clone(&self.next_permit);
            match CALL_PERMIT.sync_scope(permit, || requests.poll_next_unpin(cx)) {
                Poll::Pending => return Ok(()),
                Poll::Ready(None) => self.requests = None,
                Poll::Ready(Some(request)) => self.begin(request?)?,
            }
        }
        Ok(())
    }

    fn begin(&mut self, message: ModelInferRequest) -> Result<(), RequestError> {
        let next = unused_permit(&self.context)?;
        let permit = std::mem::replace(&mut self.next_permit, next);
        let context = self.context.clone();
        let began = context.starts.next();
        let entry = context.front.log_streamed(&message, STREAM, &context.peer, began);
        let journal = entry.as_ref().map(|entry| entry.journal().clone());
        let timeout = context.ends.map(|ends| ends.saturating_duration_since(began));
        let arrival =
            RequestArrival { began, timeout, tenant: context.tenant, ..RequestArrival::now(journal) };
        let StreamContext { front, headers, .. } = &context;
        let route = model::select(&front.router, &message.model_name, &message.model_version, headers);
        let streams = route.as_ref().is_ok_and(Route::streams);
        let request = StreamedRequest { context, route, message, permit, arrival, entry };
        if streams {
            self.streams.push(request.answers().boxed());
        } else {
            self.in_order.push_back(Box::pin(request.answer()));
        }
        Ok(())
    }

    /// Moves the memory of an answer to the call's permit.
    fn take_answer(&self, (answer, permit): AnswerWithPermit) -> ModelStreamInferResponse {
        let bytes =
            answer.infer_response.as_ref().map_or(0, |answer| answer.id.len() + response_bytes(answer));
        let deliveries = permit.take_deliveries();
        drop(permit);
        // The answer is in memory twice while it is written.
        match self.context.call.grow(2 * bytes) {
            Ok(()) => {
                self.context.call.add_deliveries(deliveries);
                answer
            }
            Err(why) => {
                deliveries.mark_failed(&why);
                failure(answer.infer_response.unwrap_or_default().id, &why)
            }
        }
    }
}

impl Stream for InferStream {
    type Item = Result<ModelStreamInferResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.is_stopping = self.is_stopping || self.stop.as_mut().poll(cx).is_ready();
        if let Err(status) = self.begin_arrived(cx) {
            (self.requests, self.fault) = (None, Some(status));
        }
        if let Poll::Ready(Some(answer)) = self.in_order.poll_next_unpin(cx) {
            self.has_answered = true;
            return Poll::Ready(Some(Ok(self.take_answer(answer))));
        }
        if let Poll::Ready(Some(answer)) = self.streams.poll_next_unpin(cx) {
            self.has_answered = true;
            return Poll::Ready(Some(Ok(answer)));
        }
        if !self.in_order.is_empty() || !self.streams.is_empty() {
            return Poll::Pending;
        }
        if !std::mem::take(&mut self.has_answered) {
            self.context.call.release();
        }
        match self.requests.take() {
            None => Poll::Ready(self.fault.take().map(Err)),
            Some(_) if self.is_stopping => Poll::Ready(Some(Err(stopping()))),
            waiting => {
                self.requests = waiting;
                Poll::Pending
            }
        }
    }
}

/// Returns the status of calls that end because serving ends, or because their connection must make
/// room.
pub(super) fn stopping() -> Status {
    Status::unavailable("the server is stopping, or needs the connection; call again")
}

/// Returns a permit for a request that may never arrive.
fn unused_permit(context: &StreamContext) -> Result<Arc<MemoryPermit>, RequestError> {
    let permit = MemoryPermit::new(context.call.client(), Budget::Memory, 0)?;
    permit.release();
    Ok(permit)
}

impl StreamedRequest {
    /// Answers a request of a model that gives one answer.
    async fn answer(self) -> AnswerWithPermit {
        let Self { context, route, message, permit, arrival, entry } = self;
        let (id, wants_end) = (message.id.clone(), wants_end(&message));
        let answer = async {
            let StreamContext { front, peer, .. } = &context;
            let (response, _) = grpc_infer::infer(front, route?, message, peer, arrival, &permit).await?;
            permit.replace(2 * id.len() + response_bytes(&response))?;
            Ok(response)
        };
        let answer = match answer.await {
            Ok(mut response) => {
                if wants_end {
                    mark(&mut response, true);
                }
                if let Some(entry) = &entry {
                    entry.set_code(Code::Ok as u16);
                }
                success(response)
            }
            Err(why) => {
                permit.take_deliveries().mark_failed(&why);
                if let Some(entry) = &entry {
                    log_error(entry, &why);
                }
                failure(id, &why)
            }
        };
        if let Some(entry) = entry {
            entry.add_sent(answer.encoded_len());
            permit.add_deliveries(entry.into());
        }
        (answer, permit)
    }

    /// Returns the answers to a request of a model that streams.
    fn answers(self) -> impl Stream<Item = ModelStreamInferResponse> {
        let id = self.message.id.clone();
        let metadata = self.route.as_ref().ok().and_then(|route| route.pipeline().metadata());
        let (wants_end, entry) = (wants_end(&self.message), self.entry.clone());
        let mut has_failed = false;
        let answers = stream::once(self.open()).try_flatten().map(Some);
        answers.chain(stream::once(ready(None))).filter_map(move |answer| {
            ready(match answer {
                Some(Ok(response)) => {
                    if let Some(entry) = &entry {
                        entry.add_sent(response.encoded_len());
                    }
                    Some(success(response))
                }
                Some(Err(why)) => {
                    has_failed = true;
                    log_end(entry.as_ref(), Some(&why));
                    Some(failure(id.clone(), &why))
                }
                None if has_failed => None,
                None => {
                    log_end(entry.as_ref(), None);
                    metadata.as_deref().filter(|_| wants_end).map(|metadata| {
                        let mut end = response(metadata, id.clone(), Vec::new());
                        mark(&mut end, true);
                        success(end)
                    })
                }
            })
        })
    }

    /// Opens the stream of a model that gives many answers. It ends at the first error.
    async fn open(
        self,
    ) -> Result<impl Stream<Item = Result<ModelInferResponse, RequestError>>, RequestError> {
        let Self { context, route, message, permit, arrival, .. } = self;
        let StreamContext { front, peer, call, .. } = context;
        let (Target { route, metadata, .. }, checked) =
            grpc_infer::receive(&front, route?, message, &peer, &arrival, &permit).await?;
        let CheckedRequest { id, inputs, options, outputs: selection, place } = checked;
        let answers = route.infer(inputs, options, arrival).await?;
        place.mark_answered();
        // A stream that kept its route would keep the model from moving or being replaced.
        drop(route);
        // The model's memory contains the inputs now.
        permit.replace(id.len())?;
        let grown = Arc::clone(&call);
        let respond = move |outputs| {
            // The stream keeps its memory, and its place among the requests in flight.
            let _kept = (&permit, &place);
            let outputs = selection.select(&metadata, outputs)?;
            grown.grow(2 * (id.len() + tensor_bytes(&outputs)))?;
            let mut response = response(&metadata, id.clone(), outputs);
            mark(&mut response, false);
            Ok(response)
        };
        Ok(stream::try_unfold((answers, respond, call), |(mut answers, respond, call)| async {
            let Some(outputs) = answers.next().await else { return Ok(None) };
            let delivery = Deliveries::from(answers.delivery());
            match outputs.map_err(RequestError::from).and_then(&respond) {
                Ok(response) => {
                    call.add_deliveries(delivery);
                    Ok(Some((response, (answers, respond, call))))
                }
                Err(why) => {
                    delivery.mark_failed(&why);
                    Err(why)
                }
            }
        }))
    }
}

/// Logs how a stream ended. A stream that is dropped before its end was abandoned by its client.
fn log_end(entry: Option<&AccessEntry>, why: Option<&RequestError>) {
    let Some(entry) = entry else { return };
    match why {
        Some(why) => log_error(entry, why),
        None => entry.set_code(Code::Ok as u16),
    }
    entry.mark_delivered();
}

fn wants_end(request: &ModelInferRequest) -> bool {
    let choice = request.parameters.get(WANTS_END).and_then(|wanted| wanted.parameter_choice.as_ref());
    matches!(choice, Some(ParameterChoice::BoolParam(true)))
}

fn mark(response: &mut ModelInferResponse, is_end: bool) {
    let is_end = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(is_end)) };
    response.parameters = HashMap::from([(IS_END.to_owned(), is_end)]);
}

fn success(response: ModelInferResponse) -> ModelStreamInferResponse {
    ModelStreamInferResponse { error_message: String::new(), infer_response: Some(response) }
}

fn failure(id: String, why: &RequestError) -> ModelStreamInferResponse {
    let mut response = ModelInferResponse { id, ..Default::default() };
    mark(&mut response, true);
    ModelStreamInferResponse { error_message: why.message(), infer_response: Some(response) }
}
