//! The metrics' listeners: one text at one path, over HTTP.

use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, StatusCode};
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;

use super::BindError;
use super::accept::{self, Stream};
use super::http::{self, Answer};
use super::kept::Kept;
use super::listen::{self, Bound, Spoken};
use super::peers::{Asked, Caller};
use super::pools::{Client, Pools};
use super::stop::{Course, Stop};
use shadowslice_config::Listener;
use shadowslice_datapath::peer::Refusals;
use shadowslice_datapath::sockets::{Inherited, Passable};

/// The most connections at a time; a scraper needs one. For more, idle ones make room.
const CONNECTIONS: usize = 64;

const DRAIN: Duration = Duration::from_secs(1);

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

/// Called on a thread that serves clients: must not wait.
pub type Render = Arc<dyn Fn() -> String + Send + Sync>;

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

    /// What another supervisor may listen on next.
    pub fn passable(&self) -> Vec<Passable> {
        self.0.iter().map(Bound::passable).collect()
    }

    /// Serves for as long as `stop` says so (and its sender is there), and at most 1 s longer. The
    /// Unix sockets are removed unless they were passed on.
    pub async fn run(self, render: Render, stop: watch::Receiver<Course>) {
        let bound = self.0.into_iter().map(|bound| (accept::Service::Metrics(render.clone()), bound));
        // They share nothing with clients.
        let pools = Arc::new(Pools::new(0, 0, 0));
        accept::run(bound, CONNECTIONS, pools, Stop::new(stop, DRAIN)).await;
    }
}

pub(super) async fn serve(io: Stream, render: Render, (client, caller): (&Client, Caller), stop: Stop) {
    let written = |pieces| Full::new(Kept::new(pieces, None));
    let service =
        service_fn(|request| ready(Ok::<_, Infallible>(answer(&render, &caller, &request).map(written))));
    // It only fails when the peer is gone.
    let _ = http::speak(io, service, client, stop).await.shutdown().await;
}

fn answer(render: &Render, caller: &Caller, request: &Request<Incoming>) -> Answer {
    if let Err(refusal) = caller.identify(request.uri(), request.headers(), Asked::More) {
        let mut answer = plain(refusal.status(), format!("{}\n", refusal.message()));
        refusal.describe(answer.headers_mut());
        return answer;
    }
    if request.uri().path() != "/metrics" {
        return plain(
            StatusCode::NOT_FOUND,
            "there is nothing here; the metrics are at /metrics\n".to_owned(),
        );
    }
    if request.method() != Method::GET {
        let mut refusal = plain(StatusCode::METHOD_NOT_ALLOWED, "use GET\n".to_owned());
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
        return refusal;
    }
    let mut metrics = plain(StatusCode::OK, render());
    metrics.headers_mut().insert(CONTENT_TYPE, TEXT);
    metrics
}

fn plain(status: StatusCode, text: String) -> Answer {
    let mut response = http::empty(status);
    *response.body_mut() = text.into();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}
