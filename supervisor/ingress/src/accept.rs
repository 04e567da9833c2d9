//! Accepting connections.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::authority::AuthorityRepair;
use super::connections::{Connections, Entered, outstays};
use super::listen::Bound;
use super::metrics::{self, Render};
use super::pace::Paced;
use super::pools::{Peer, Pools};
use super::stop::Stop;
use super::{Frontend, grpc, http};

/// A failure such as too many open files does not pass at once.
const REST: Duration = Duration::from_millis(100);

#[derive(Clone)]
pub(super) enum Service {
    Http(Arc<Frontend>),
    Grpc(Arc<Frontend>),
    Metrics(Render),
}

pub(super) type Stream = Pin<Box<dyn Connection>>;

pub(super) trait Connection: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Connection for S {}

/// Returns when the last connection after `stop` has ended.
pub(super) async fn run(
    bound: impl Iterator<Item = (Service, Bound)>,
    connections: usize,
    pools: Arc<Pools>,
    stop: Stop,
) {
    let connections = Connections::new(connections);
    let mut listeners = JoinSet::new();
    for (service, bound) in bound {
        listeners.spawn(listen(service, bound, connections.clone(), pools.clone(), stop.clone()));
    }
    listeners.join_all().await;
    connections.ended().await;
}

/// Where not even a reserve is left, one more connection per listener is accepted and waits.
async fn listen(
    service: Service,
    bound: Bound,
    connections: Arc<Connections>,
    pools: Arc<Pools>,
    stop: Stop,
) {
    let mut begun = std::pin::pin!(stop.clone().begun());
    let accepting = async {
        let mut failing = false;
        loop {
            let (stream, peer) = match accept(&bound, &service).await {
                Ok(accepted) => accepted,
                Err(error) => {
                    if !failing {
                        tracing::warn!(%error, "cannot accept connections, trying again");
                    }
                    failing = true;
                    sleep(REST).await;
                    continue;
                }
            };
            failing = false;
            let entered = connections.enter(pools.client(peer)).await;
            tokio::spawn(serve(service.clone(), stream, entered, stop.clone()));
        }
    };
    tokio::select! {
        () = &mut begun => {}
        () = accepting => {}
    }
}

async fn accept(bound: &Bound, service: &Service) -> io::Result<(Stream, Peer)> {
    match bound {
        Bound::Unix { listener, .. } => {
            let (stream, _) = listener.accept().await?;
            let peer = Peer::of_unix(&stream);
            let stream = Paced::new(stream);
            let repaired = matches!(service, Service::Grpc(_));
            Ok((if repaired { Box::pin(AuthorityRepair::new(stream)) } else { Box::pin(stream) }, peer))
        }
        Bound::Tcp { listener } => {
            let (stream, address) = listener.accept().await?;
            // It only fails when the peer is gone, as the next read will tell.
            let _ = stream.set_nodelay(true);
            Ok((Box::pin(Paced::new(stream)), Peer::of_tcp(address)))
        }
    }
}

async fn serve(service: Service, stream: Stream, entered: Entered, stop: Stop) {
    let overdue = stop.clone().overdue();
    let client = &entered.client;
    let serving = async {
        match service {
            Service::Http(front) => http::serve(stream, front, client, stop).await,
            Service::Grpc(front) => grpc::serve(stream, front, client, stop).await,
            Service::Metrics(render) => metrics::serve(stream, render, client, stop).await,
        }
    };
    tokio::select! {
        () = serving => {}
        () = outstays(client) => tracing::debug!("cut an idle connection to make room"),
        () = overdue => tracing::warn!("cut a connection that did not end"),
    }
}
