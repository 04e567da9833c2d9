//! The listeners for metrics, and for the page that shows the last hour.

use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::broadcast;

use crate::admission::{BindError, Budget, BudgetShare, Budgets, Caller, Client, Resource, Stop};
use crate::transport::{
    BoundListener, Connection, Protocol, RequestProgress, Service, bind_all, run, serve_http,
};
use shadowslice_config::{LimitsConfig, Listener};
use shadowslice_datapath::peer::Refusals;
use shadowslice_datapath::phase::PhaseReceiver;
use shadowslice_datapath::sockets::{Inherited, PassableSocket};

/// The maximum number of connections. A scraper needs one, and so does an open page. If more are
/// needed, idle ones make room.
const MAX_CONNECTIONS: usize = 64;

/// The maximum number of pages that follow events, which are never idle. They leave room for
/// scrapers. The pages of one peer leave room for those of others ([`Budgets`]).
const MAX_PAGES: u64 = 48;

const DRAIN: Duration = Duration::from_secs(1);

const METRICS: &str = "/metrics";
const EVENTS: &str = "/events";

/// The headers that protect the page. The page may load only the files of this listener, and no
/// other page may show it in a frame.
const PROTECTION: [(&str, &str); 4] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
];

/// The content that the listeners return. Its functions are called on threads that serve clients,
/// so they must not block.
#[derive(Clone)]
pub struct Shown {
    /// The function that returns the text of the metrics.
    pub metrics: Arc<dyn Fn() -> String + Send + Sync>,
    /// The files of the page. They reveal nothing about the host, so they need no token.
    pub files: &'static [File],
    pub events: Arc<dyn Fn() -> Events + Send + Sync>,
}

/// A file of the page.
#[derive(Debug)]
pub struct File {
    pub path: &'static str,
    pub content_type: &'static str,
    pub text: &'static str,
}

/// The server-sent events of the past, and a receiver of new ones.
#[derive(Debug)]
pub struct Events {
    pub kept: Vec<Bytes>,
    pub news: broadcast::Receiver<Bytes>,
}

#[derive(Debug)]
pub struct MetricsListeners(Vec<BoundListener>);

impl MetricsListeners {
    /// Binds all addresses, or none of them. Must be called on a Tokio runtime.
    pub async fn bind(
        listeners: &[Listener],
        inherited: &mut Inherited,
        refusals: &Arc<Refusals>,
    ) -> Result<Self, BindError> {
        bind_all(Protocol::METRICS, listeners, inherited, refusals).await.map(Self)
    }

    /// Returns the listeners, for the report about certificates.
    pub(crate) fn bound(&self) -> &[BoundListener] {
        &self.0
    }

    /// Returns the sockets that the next supervisor may use.
    pub fn passable(&self) -> Vec<PassableSocket> {
        self.0.iter().map(BoundListener::passable).collect()
    }

    /// Serves until `stop` ends serving, or its sender is dropped, and at most 1 s longer. Removes
    /// the Unix sockets unless the next supervisor uses them.
    pub async fn run(self, shown: Shown, stop: PhaseReceiver) {
        let bound = self.0.into_iter().map(|bound| (shown.clone(), bound));
        // The metrics have budgets of their own, whose memory is the number of pages.
        let budgets = Arc::new(Budgets::new(0, MAX_PAGES, 0));
        run(bound, MAX_CONNECTIONS, budgets, Stop::new(stop, DRAIN, LimitsConfig::KEEP_ALIVE)).await;
    }
}

type Body = UnsyncBoxBody<Bytes, Infallible>;
type MetricsAnswer = Response<Body>;

impl Service for Shown {
    async fn serve(self, Connection { stream, client, caller }: Connection, stop: Stop) {
        let answered = |request| ready(Ok::<_, Infallible>(answer(&self, &client, &caller, &request, &stop)));
        serve_http(stream, service_fn(answered), &client, &RequestProgress::default(), stop.clone()).await;
    }
}

fn answer(
    shown: &Shown,
    client: &Arc<Client>,
    caller: &Caller,
    request: &Request<Incoming>,
    stop: &Stop,
) -> MetricsAnswer {
    let path = request.uri().path();
    let file = shown.files.iter().find(|file| file.path == path);
    let resource = if file.is_some() { Resource::Public } else { Resource::Protected };
    if let Err(refusal) = caller.identify(request.uri(), request.headers(), resource) {
        let mut answer = plain(refusal.status(), format!("{}\n", refusal.message()));
        refusal.add_headers(answer.headers_mut());
        return answer;
    }
    if file.is_none() && ![METRICS, EVENTS].contains(&path) {
        let text = "not found; the metrics are at /metrics, and the page is at /\n";
        return plain(StatusCode::NOT_FOUND, text.to_owned());
    }
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut refusal = plain(StatusCode::METHOD_NOT_ALLOWED, "use GET or HEAD\n".to_owned());
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refusal;
    }
    match file {
        Some(file) => protect(content(file.content_type, Full::from(file.text).boxed_unsync())),
        None if path == EVENTS => protect(match client.take(Budget::Memory, 1) {
            Some(place) => events((shown.events)(), place, stop.clone()),
            None => {
                let text = "too many pages are open; close one, or wait until another one is closed\n";
                plain(StatusCode::SERVICE_UNAVAILABLE, text.to_owned())
            }
        }),
        None => {
            content("text/plain; version=0.0.4; charset=utf-8", Full::from((shown.metrics)()).boxed_unsync())
        }
    }
}

/// Returns the events for a page, which keeps its place. They end with serving, so that the page
/// soon finds the next supervisor. They also end if the page is too far behind, so that it starts
/// again.
fn events(Events { kept, news }: Events, place: BudgetShare, stop: Stop) -> MetricsAnswer {
    let news = stream::unfold(news, |mut news| async move { Some((news.recv().await.ok()?, news)) });
    let all = stream::iter(kept).chain(news).take_until(stop.begun());
    let body = StreamBody::new(all.map(move |event| {
        let _held = &place;
        Ok(Frame::data(event))
    }));
    content("text/event-stream", body.boxed_unsync())
}

fn plain(status: StatusCode, text: String) -> MetricsAnswer {
    let mut response = content("text/plain; charset=utf-8", Full::from(text).boxed_unsync());
    *response.status_mut() = status;
    response
}

fn content(kind: &'static str, body: Body) -> MetricsAnswer {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn protect(mut answer: MetricsAnswer) -> MetricsAnswer {
    let headers = answer.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    for (name, value) in PROTECTION {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    answer
}
