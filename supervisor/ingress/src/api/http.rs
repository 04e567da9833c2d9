//! HTTP requests, from their heads to their answers.

use std::convert::Infallible;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{CONNECTION, CONTENT_LENGTH, HeaderValue};
use hyper::http::request::Parts;
use hyper::service::service_fn;
use hyper::{Method, Request};
use shadowslice_datapath::access::AccessProtocol;
use shadowslice_datapath::pipeline::Pieces;
use shadowslice_datapath::readiness::HostState;
use shadowslice_datapath::trace::{SpanProtocol, SpanStatus};

use super::answers::refusal;
use super::endpoints::{self, Dispatch};
use super::frontend::Frontend;
use super::{generate, http_infer, openai};
use crate::admission::{Budget, Caller, Client, Clipped, MemoryPermit, Resource, Stop};
use crate::transport::{
    Connection, CountedBody, HttpAnswer, RequestProgress, SHORT_BODY_BYTES, discard, guard_answer, read,
    serve_http,
};

const HEALTH: &str = "/v2/health/";

const CLOSE: HeaderValue = HeaderValue::from_static("close");

pub(super) async fn serve(front: Arc<Frontend>, connection: Connection, stop: Stop) {
    let Connection { stream, client, caller } = connection;
    let progress = RequestProgress::default();
    let handler =
        Handler { front: &front, client: &client, caller: &caller, progress: &progress, stop: &stop };
    let answered = async |request: Request<Incoming>| {
        let is_head = request.method() == Method::HEAD;
        let (request, entry) = front.begin_request(AccessProtocol::Http, request, &caller.peer);
        let (answer, permit) = handler.answer(request).await;
        client.counters().count_http(answer.status().as_u16());
        Ok::<_, Infallible>(guard_answer(answer, permit, entry, is_head))
    };
    let service = service_fn(|request| Box::pin(answered(request)));
    serve_http(stream, service, &client, &progress, stop.clone()).await;
}

/// Returns whether requests with this path are inferences, which are traced. The span of a stream
/// ends with its first answer.
fn is_inference(path: &str) -> bool {
    let endpoint = path.rsplit('/').next().unwrap_or_default();
    let is_openai = ["/v1/embeddings", "/v1/completions"].contains(&path);
    is_openai
        || path.starts_with("/v2/models/") && ["infer", "generate", "generate_stream"].contains(&endpoint)
}

/// The handler of a connection's requests.
struct Handler<'a> {
    front: &'a Frontend,
    client: &'a Arc<Client>,
    caller: &'a Caller,
    progress: &'a RequestProgress,
    stop: &'a Stop,
}

/// An answer that needs only a part of the request's body.
enum EarlyAnswer {
    BeforeBody(HttpAnswer),
    /// The connection cannot continue after this answer.
    InBody(HttpAnswer),
}

impl Handler<'_> {
    /// Answers a request. Also returns the request's memory permit.
    async fn answer(&self, request: Request<CountedBody>) -> (HttpAnswer, Option<Arc<MemoryPermit>>) {
        let (mut head, mut body) = request.into_parts();
        let is_health = head.uri.path().starts_with(HEALTH);
        let resource = if is_health { Resource::Public } else { Resource::Protected };
        let identified = self.caller.identify_in(&mut head, resource);
        let path = head.uri.path();
        let infers = head.method == Method::POST && is_inference(path);
        let protocol = || SpanProtocol::Http(Clipped(path).to_string());
        let span = (infers && identified.is_ok())
            .then(|| self.front.begin_span(&head.headers, &mut head.extensions, protocol))
            .flatten();
        self.progress.begin();
        let outcome = match identified {
            Ok(()) => self.perform(&head, &mut body).await,
            Err(why) => Err(EarlyAnswer::InBody(refusal(&why, &head))),
        };
        let (mut answer, permit, is_cut) = match outcome {
            Ok((answer, permit)) => (answer, Some(permit), false),
            Err(EarlyAnswer::BeforeBody(answer)) => (answer, None, !discard(&mut body).await),
            Err(EarlyAnswer::InBody(answer)) => (answer, None, true),
        };
        self.progress.mark_received();
        if permit.is_none() {
            self.client.touch();
        }
        if let Some(span) = span {
            span.end(SpanStatus::Http(answer.status().as_u16()));
        }
        self.add_headers(&mut answer, &head.method, is_cut);
        (answer, permit)
    }

    async fn perform(
        &self,
        head: &Parts,
        body: &mut CountedBody,
    ) -> Result<(HttpAnswer, Arc<MemoryPermit>), EarlyAnswer> {
        let (answer, permit) = match endpoints::dispatch(self.front, head) {
            Dispatch::Answered(answer) => return Err(EarlyAnswer::BeforeBody(answer)),
            Dispatch::Infer(target) => {
                let (body, permit) = self.receive(head, body, true).await?;
                (http_infer::infer(self.front, &target, head, body, &permit).await, permit)
            }
            Dispatch::Generate(target, form) => {
                let (body, permit) = self.receive(head, body, true).await?;
                (generate::answer(self.front, (target, form), head, body, &permit).await, permit)
            }
            Dispatch::OpenAi(endpoint, name) => {
                let (body, permit) = self.receive(head, body, endpoint.is_inference()).await?;
                (Ok(openai::answer(self.front, (endpoint, &name), head, body, &permit).await), permit)
            }
            Dispatch::Other(endpoint) => {
                let (body, permit) = self.receive(head, body, false).await?;
                (endpoints::answer(self.front, endpoint, head, body).await, permit)
            }
        };
        let answer = answer.unwrap_or_else(|why| {
            permit.take_deliveries().mark_failed(&why);
            permit.shrink_to(0);
            refusal(&why, head)
        });
        Ok((answer, permit))
    }

    /// Receives a request's body. Takes memory before it reads the body.
    async fn receive(
        &self,
        head: &Parts,
        body: &mut CountedBody,
        is_inference: bool,
    ) -> Result<(Pieces, Arc<MemoryPermit>), EarlyAnswer> {
        let placed = self.client.wait_for_place().await;
        placed.map_err(|why| EarlyAnswer::InBody(refusal(&why, head)))?;
        let permit = MemoryPermit::new(self.client, Budget::Memory, 0)
            .map_err(|why| EarlyAnswer::BeforeBody(refusal(&why, head)))?;
        let limit = self.front.request_bytes;
        let (limit, bound) = match is_inference {
            true => (limit, "limits.request_bytes"),
            false => (limit.min(SHORT_BODY_BYTES), "not an inference request"),
        };
        let body = read(body, limit, bound, &permit).await;
        let body = body.map_err(|why| EarlyAnswer::InBody(refusal(&why, head)))?;
        self.progress.mark_received();
        Ok((body, permit))
    }

    fn add_headers(&self, answer: &mut HttpAnswer, method: &Method, is_cut: bool) {
        if *method == Method::HEAD && answer.body().is_empty() {
            // hyper adds the length to answers to GET, and the length of other bodies to both.
            answer.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        }
        if is_cut {
            self.progress.mark_cut();
        }
        // Unless the host serves, the client connects again, to another host or the next
        // supervisor.
        if is_cut || self.front.router.host() != HostState::Serving || self.stop.hands_over() {
            answer.headers_mut().insert(CONNECTION, CLOSE);
        }
    }
}
