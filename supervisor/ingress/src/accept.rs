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
use super::peers::{self, Caller};
use super::pools::{Owner, Pools};
use super::stop::Stop;
use super::{Frontend, grpc, http};
use shadowslice_datapath::peer::Peer;

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
            let (stream, caller) = match accept(&bound, &service).await {
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
            let entered = connections.enter(pools.client(Owner::of(&caller.peer))).await;
            tokio::spawn(serve(service.clone(), stream, caller, entered, stop.clone()));
        }
    };
    tokio::select! {
        () = &mut begun => {}
        () = accepting => {}
    }
}

async fn accept(bound: &Bound, service: &Service) -> io::Result<(Stream, Caller)> {
    match bound {
        Bound::Unix { listener, file, guard } => {
            let (stream, caller) = peers::accept(listener, guard, &file.path().to_string_lossy()).await?;
            let stream = Paced::new(stream);
            let repaired = matches!(service, Service::Grpc(_));
            Ok((if repaired { Box::pin(AuthorityRepair::new(stream)) } else { Box::pin(stream) }, caller))
        }
        Bound::Tcp { listener, site } => {
            let (stream, address) = listener.accept().await?;
            // It only fails when the peer is gone, as the next read will tell.
            let _ = stream.set_nodelay(true);
            let caller = Caller { peer: Arc::new(Peer::Tcp(address)), site: *site };
            Ok((Box::pin(Paced::new(stream)), caller))
        }
    }
}

async fn serve(service: Service, stream: Stream, caller: Caller, entered: Entered, stop: Stop) {
    let overdue = stop.clone().overdue();
    let client = &entered.client;
    let serving = async {
        match service {
            Service::Http(front) => http::serve(stream, front, (client, caller), stop).await,
            Service::Grpc(front) => grpc::serve(stream, front, (client, caller), stop).await,
            Service::Metrics(render) => metrics::serve(stream, render, (client, caller.site), stop).await,
        }
    };
    tokio::select! {
        () = serving => {}
        () = outstays(client) => tracing::debug!("cut an idle connection to make room"),
        () = overdue => tracing::warn!("cut a connection that did not end"),
    }
}
