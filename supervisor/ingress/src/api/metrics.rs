//! The metrics' listeners: the metrics, and the page that shows the last hour.

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
use tokio::io::AsyncWriteExt;
use tokio::sync::{broadcast, watch};

use crate::BindError;
use crate::admission::budgets::{Client, Pool, Pools, Taken};
use crate::admission::caller::{Asked, Caller};
use crate::admission::stop::{Course, Stop};
use crate::api::http;
use crate::transport::accept::{self, Stream};
use crate::transport::listen::{self, Bound, Spoken};
use shadowslice_config::{LimitsConfig, Listener};
use shadowslice_datapath::peer::Refusals;
use shadowslice_datapath::sockets::{Inherited, PassableSocket};

/// The most connections at a time; a scraper needs one, and so does an open page. For more, idle
/// ones make room.
const CONNECTIONS: usize = 64;

/// The most pages that follow events at a time, which are never idle. They leave room for scrapers,
/// and those of one peer leave room for others' ([`Pools`]).
const PAGES: u64 = 48;

const DRAIN: Duration = Duration::from_secs(1);

const METRICS: &str = "/metrics";
const EVENTS: &str = "/events";

/// A page may load what lies beside it, and nothing else; and no other page may show it in a frame.
const GUARDS: [(&str, &str); 4] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
];

/// What the listeners answer. Its functions are called on threads that serve clients: they must not
/// wait.
#[derive(Clone)]
pub struct Shown {
    /// The metrics' text.
    pub metrics: Arc<dyn Fn() -> String + Send + Sync>,
    /// They tell nothing of the host, so that they take no token.
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

/// Server-sent events: those there are, and those to come.
#[derive(Debug)]
pub struct Events {
    pub kept: Vec<Bytes>,
    pub news: broadcast::Receiver<Bytes>,
}

#[derive(Debug)]
pub struct MetricsListeners(Vec<Bound>);

impl MetricsListeners {
    /// Takes all the addresses, or none of them. Must be called on a Tokio runtime.
    pub async fn bind(
        listeners: &[Listener],
        inherited: &mut Inherited,
        refusals: &Arc<Refusals>,
    ) -> Result<Self, BindError> {
        let spoken = Spoken { name: "metrics", ..http::SPOKEN };
        listen::bind_all(spoken, listeners, inherited, refusals).await.map(Self)
    }

    pub(crate) fn bound(&self) -> &[Bound] {
        &self.0
    }

    /// What another supervisor may listen on next.
    pub fn passable(&self) -> Vec<PassableSocket> {
        self.0.iter().map(Bound::passable).collect()
    }

    /// Serves for as long as `stop` says so (and its sender is there), and at most 1 s longer. The
    /// Unix sockets are removed unless they were passed on.
    pub async fn run(self, shown: Shown, stop: watch::Receiver<Course>) {
        let bound = self.0.into_iter().map(|bound| (accept::Service::Metrics(shown.clone()), bound));
        // They share nothing with clients. What stands for memory is the places of pages.
        let pools = Arc::new(Pools::new(0, PAGES, 0));
        accept::run(bound, CONNECTIONS, pools, Stop::new(stop, DRAIN, LimitsConfig::KEEP_ALIVE)).await;
    }
}

type Body = UnsyncBoxBody<Bytes, Infallible>;
type Answer = Response<Body>;

pub(crate) async fn serve(io: Stream, shown: Shown, (client, caller): (&Arc<Client>, Caller), stop: Stop) {
    let service =
        service_fn(|request| ready(Ok::<_, Infallible>(answer(&shown, (client, &caller), &request, &stop))));
    // It only fails when the peer is gone.
    let _ = http::speak(io, service, client, stop.clone()).await.shutdown().await;
}

fn answer(
    shown: &Shown,
    (client, caller): (&Arc<Client>, &Caller),
    request: &Request<Incoming>,
    stop: &Stop,
) -> Answer {
    let path = request.uri().path();
    let file = shown.files.iter().find(|file| file.path == path);
    let about = if file.is_some() { Asked::Open } else { Asked::Guarded };
    if let Err(refusal) = caller.identify(request.uri(), request.headers(), about) {
        let mut answer = plain(refusal.status(), format!("{}\n", refusal.message()));
        refusal.describe(answer.headers_mut());
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
        Some(file) => guarded(content(file.content_type, Full::from(file.text).boxed_unsync())),
        None if path == EVENTS => guarded(match client.take(Pool::Memory, 1) {
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

/// They end when serving does, so that a page soon finds the next supervisor; and for a page that
/// is too far behind, so that it begins anew. Until then a page has its place.
fn events(Events { kept, news }: Events, place: Taken, stop: Stop) -> Answer {
    let news = stream::unfold(news, |mut news| async move { Some((news.recv().await.ok()?, news)) });
    let all = stream::iter(kept).chain(news).take_until(stop.begun());
    let body = StreamBody::new(all.map(move |event| {
        let _held = &place;
        Ok(Frame::data(event))
    }));
    content("text/event-stream", body.boxed_unsync())
}

fn plain(status: StatusCode, text: String) -> Answer {
    let mut response = content("text/plain; charset=utf-8", Full::from(text).boxed_unsync());
    *response.status_mut() = status;
    response
}

fn content(kind: &'static str, body: Body) -> Answer {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn guarded(mut answer: Answer) -> Answer {
    let headers = answer.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    for (name, value) in GUARDS {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    answer
}
