//! `ModelStreamInfer`: requests come one after the other on a call, and answers as they are there.
//!
//! Answers of models that give one answer to a request come in the order of their requests, as
//! Triton's do. Those of models that stream come as soon as they are there, each with its request's
//! id; the next one is asked for when the connection has room for it. A request that fails gets a
//! message that says why, and the call goes on.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Instant;

use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, FuturesOrdered, SelectAll, Stream, StreamExt, unfold};
use prost::Message as _;
use shadowslice_datapath::access::{AccessEntry, AccessProtocol, RequestHead};
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::{Answers, Metadata, RequestArrival, RequestOutput};
use tonic::{Code, Status, Streaming};

use crate::Frontend;
use crate::admission::access;
use crate::admission::budgets::{Pool, Taken};
use crate::admission::deliveries::{Beginnings, Deliveries};
use crate::admission::memory_permit::{RESERVED, Reserved};
use crate::admission::request_error::RequestError;
use crate::admission::stop::Stop;
use crate::api::inference::{Inference, inference, response};
use crate::api::model::{self, Wanted};
use crate::proto::infer_parameter::ParameterChoice;
use crate::proto::{InferParameter, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse};

pub(crate) const STREAM: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

/// The most requests of a call at a time; further ones are not read.
const MOST: usize = 64;

/// Whether a client wants to hear of the end of a stream, and how it does.
const WANTS_END: &str = "triton_enable_empty_final_response";
const IS_END: &str = "triton_final_response";

/// Of a call.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) front: Arc<Frontend>,
    pub(crate) peer: Arc<Peer>,
    pub(crate) call: Arc<Reserved>,
    /// The times at which its messages began.
    pub(crate) beginnings: Beginnings,
}

impl Context {
    /// Begins the record of one of the call's requests, if answers are logged.
    fn record(&self, request: &ModelInferRequest, began: Instant) -> Option<AccessEntry> {
        let log = self.front.access.as_ref()?;
        let head =
            RequestHead { protocol: AccessProtocol::Grpc, method: "POST", path: STREAM, request_id: None };
        let access = log.begin(head, &self.peer, began);
        access.add_received(request.encoded_len());
        Some(access)
    }
}

/// The answers of a call.
pub(crate) struct Conversation {
    context: Context,
    /// Until the client has no more.
    requests: Option<Streaming<ModelInferRequest>>,
    /// The memory of the request that comes.
    next: Arc<Reserved>,
    in_order: FuturesOrdered<BoxFuture<'static, Answered>>,
    streams: SelectAll<BoxStream<'static, ModelStreamInferResponse>>,
    stop: BoxFuture<'static, ()>,
    stopping: bool,
    /// An answer was given since it was looked for one in vain, and may not be written yet.
    told: bool,
    /// What was wrong with the last message; it is told when all before it is answered.
    fault: Option<Status>,
}

/// An answer, and its memory.
type Answered = (ModelStreamInferResponse, Arc<Reserved>);

impl Conversation {
    pub(crate) fn new(
        context: Context,
        requests: Streaming<ModelInferRequest>,
        stop: Stop,
    ) -> Result<Self, RequestError> {
        let client = Arc::clone(context.call.client());
        let stop = async move {
            tokio::select! {
                () = stop.begun() => {}
                () = client.left() => {}
            }
        };
        Ok(Self {
            next: unused(&context)?,
            context,
            requests: Some(requests),
            in_order: FuturesOrdered::new(),
            streams: SelectAll::new(),
            stop: Box::pin(stop),
            stopping: false,
            told: false,
            fault: None,
        })
    }

    /// Begins the requests that have come; an error ends the call.
    fn begin_those_here(&mut self, cx: &mut TaskContext<'_>) -> Result<(), Status> {
        while self.in_order.len() + self.streams.len() < MOST {
            let Some(requests) = self.requests.as_mut().filter(|_| !self.stopping) else { return Ok(()) };
            let came = RESERVED.sync_scope(Arc::clone(&self.next), || requests.poll_next_unpin(cx));
            match came {
                Poll::Pending => return Ok(()),
                Poll::Ready(None) => self.requests = None,
                Poll::Ready(Some(request)) => self.begin(request?)?,
            }
        }
        Ok(())
    }

    fn begin(&mut self, request: ModelInferRequest) -> Result<(), RequestError> {
        let next = unused(&self.context)?;
        let reserved = std::mem::replace(&mut self.next, next);
        let context = self.context.clone();
        let began = context.beginnings.next();
        let access = context.record(&request, began);
        let journal = access.as_ref().map(|access| access.journal().clone());
        let coming = RequestArrival { began, ..RequestArrival::now(journal) };
        let route = model::find(&context.front.router, &request.model_name, &request.model_version);
        if route.is_ok_and(|route| route.streams()) {
            self.streams.push(answers(context, request, (reserved, coming, access)).boxed());
        } else {
            self.in_order.push_back(Box::pin(answer(context, request, (reserved, coming, access))));
        }
        Ok(())
    }

    /// Its memory goes over to the call's.
    fn tell(&self, (answer, reserved): Answered) -> ModelStreamInferResponse {
        let bytes = answer.infer_response.as_ref().map_or(0, |answer| {
            answer.id.len() + answer.raw_output_contents.iter().map(bytes::Bytes::len).sum::<usize>()
        });
        let deliveries = reserved.deliveries();
        drop(reserved);
        // It is there twice while it is written.
        match self.context.call.grow(2 * bytes) {
            Ok(()) => {
                self.context.call.carry(deliveries);
                answer
            }
            Err(why) => {
                deliveries.failed(&why);
                failed(answer.infer_response.unwrap_or_default().id, &why)
            }
        }
    }

    fn is_over(&self) -> bool {
        self.in_order.is_empty() && self.streams.is_empty()
    }
}

impl Stream for Conversation {
    type Item = Result<ModelStreamInferResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Option<Self::Item>> {
        self.stopping = self.stopping || self.stop.as_mut().poll(cx).is_ready();
        if let Err(status) = self.begin_those_here(cx) {
            (self.requests, self.fault) = (None, Some(status));
        }
        if let Poll::Ready(Some(answer)) = self.in_order.poll_next_unpin(cx) {
            self.told = true;
            return Poll::Ready(Some(Ok(self.tell(answer))));
        }
        if let Poll::Ready(Some(answer)) = self.streams.poll_next_unpin(cx) {
            self.told = true;
            return Poll::Ready(Some(Ok(answer)));
        }
        if !self.is_over() {
            return Poll::Pending;
        }
        if !std::mem::take(&mut self.told) {
            self.context.call.rest();
        }
        match self.requests.take() {
            None => Poll::Ready(self.fault.take().map(Err)),
            Some(_) if self.stopping => Poll::Ready(Some(Err(Status::unavailable(
                "the server is stopping, or needs the connection; call again",
            )))),
            waiting => {
                self.requests = waiting;
                Poll::Pending
            }
        }
    }
}

/// The memory of a request that may never come.
fn unused(context: &Context) -> Result<Arc<Reserved>, RequestError> {
    let reserved = Reserved::new(context.call.client(), Pool::Memory)?;
    reserved.rest();
    Ok(reserved)
}

/// To a request of a model that gives one.
async fn answer(context: Context, request: ModelInferRequest, (reserved, coming, access): Came) -> Answered {
    let (id, wants_end) = (request.id.clone(), wants_end(&request));
    let outputs = async {
        let Inference { name, route, metadata, request, _place } =
            inference(&context.front, request, coming.journal.as_ref(), &reserved).await?;
        let by = (&*context.peer, coming);
        let outputs = model::infer(&context.front, &route, &metadata, request, by, &reserved).await?;
        reserved.replace(2 * id.len() + model::bytes(&outputs))?;
        Ok(response(name, id.clone(), outputs))
    };
    let answer = match outputs.await {
        Ok(mut response) => {
            if wants_end {
                mark(&mut response, true);
            }
            if let Some(access) = &access {
                access.set_code(Code::Ok as u16);
            }
            told(response)
        }
        Err(why) => {
            reserved.deliveries().failed(&why);
            if let Some(access) = &access {
                access::failed(access, &why);
            }
            failed(id.clone(), &why)
        }
    };
    if let Some(access) = access {
        access.add_sent(answer.encoded_len());
        reserved.carry(access.into());
    }
    (answer, reserved)
}

/// The companions of a request: its memory, its arrival, its record.
type Came = (Arc<Reserved>, RequestArrival, Option<AccessEntry>);

enum Turn {
    Asked(Context, Box<ModelInferRequest>, Came),
    Open(Box<Open>),
    Over,
}

/// A stream under way.
struct Open {
    call: Arc<Reserved>,
    name: String,
    metadata: Arc<Metadata>,
    wanted: Wanted,
    answers: Answers,
    id: String,
    wants_end: bool,
    access: Option<AccessEntry>,
    /// Until its end: a place among the requests in flight, memory.
    _held: (Taken, Arc<Reserved>),
}

/// To a request of a model that streams.
fn answers(
    context: Context,
    request: ModelInferRequest,
    came: Came,
) -> impl Stream<Item = ModelStreamInferResponse> {
    unfold(Turn::Asked(context, Box::new(request), came), |turn| async {
        let mut open = match turn {
            Turn::Over => return None,
            Turn::Open(open) => open,
            Turn::Asked(context, request, came) => {
                let (id, access) = (request.id.clone(), came.2.clone());
                match open(context, *request, came).await {
                    Ok(open) => Box::new(open),
                    Err(why) => {
                        end(access.as_ref(), Some(&why));
                        return Some((failed(id, &why), Turn::Over));
                    }
                }
            }
        };
        match open.next().await {
            Some(Ok(response)) => {
                if let Some(access) = &open.access {
                    access.add_sent(response.encoded_len());
                }
                Some((told(response), Turn::Open(open)))
            }
            Some(Err(why)) => {
                end(open.access.as_ref(), Some(&why));
                Some((failed(open.id, &why), Turn::Over))
            }
            None => {
                end(open.access.as_ref(), None);
                open.wants_end.then(|| {
                    let mut end = response(open.name, open.id, Vec::new());
                    mark(&mut end, true);
                    (told(end), Turn::Over)
                })
            }
        }
    })
}

/// Notes how a stream ended; one that is dropped before was left by its client.
fn end(access: Option<&AccessEntry>, why: Option<&RequestError>) {
    let Some(access) = access else { return };
    match why {
        Some(why) => access::failed(access, why),
        None => access.set_code(Code::Ok as u16),
    }
    access.mark_delivered();
}

async fn open(
    context: Context,
    request: ModelInferRequest,
    (reserved, coming, access): Came,
) -> Result<Open, RequestError> {
    let (id, wants_end) = (request.id.clone(), wants_end(&request));
    let Inference { name, route, metadata, request, _place } =
        inference(&context.front, request, coming.journal.as_ref(), &reserved).await?;
    let (inputs, terms, wanted) =
        model::ready_made(&context.front, &metadata, request, &context.peer, &reserved).await?;
    let answers = route.stream(inputs, terms, coming).await?;
    // Its inputs lie in the model's memory now.
    reserved.replace(id.len())?;
    let _held = (_place, reserved);
    Ok(Open { call: context.call, name, metadata, wanted, answers, id, wants_end, access, _held })
}

impl Open {
    async fn next(&mut self) -> Option<Result<ModelInferResponse, RequestError>> {
        let outputs = self.answers.next().await?;
        let delivery = Deliveries::from(self.answers.delivery());
        let response = outputs.map_err(RequestError::from).and_then(|outputs| self.response(outputs));
        match &response {
            Ok(_) => self.call.carry(delivery),
            Err(why) => delivery.failed(why),
        }
        Some(response)
    }

    fn response(&self, outputs: Vec<RequestOutput>) -> Result<ModelInferResponse, RequestError> {
        let outputs = self.wanted.of(&self.metadata, outputs)?;
        self.call.grow(2 * (self.id.len() + model::bytes(&outputs)))?;
        let mut response = response(self.name.clone(), self.id.clone(), outputs);
        mark(&mut response, false);
        Ok(response)
    }
}

fn wants_end(request: &ModelInferRequest) -> bool {
    let choice = request.parameters.get(WANTS_END).and_then(|wanted| wanted.parameter_choice.as_ref());
    matches!(choice, Some(ParameterChoice::BoolParam(true)))
}

fn mark(response: &mut ModelInferResponse, end: bool) {
    let is_end = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(end)) };
    response.parameters = HashMap::from([(IS_END.to_owned(), is_end)]);
}

fn told(response: ModelInferResponse) -> ModelStreamInferResponse {
    ModelStreamInferResponse { error_message: String::new(), infer_response: Some(response) }
}

fn failed(id: String, why: &RequestError) -> ModelStreamInferResponse {
    let mut response = ModelInferResponse { id, ..Default::default() };
    mark(&mut response, true);
    ModelStreamInferResponse { error_message: why.message(), infer_response: Some(response) }
}
