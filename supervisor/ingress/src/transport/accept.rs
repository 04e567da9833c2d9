//! Accepting connections.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::Frontend;
use crate::admission::budgets::{Client, Owner, Pools};
use crate::admission::caller::{self, Caller};
use crate::admission::connections::{Connections, Entered, outstays};
use crate::admission::min_rate::Paced;
use crate::admission::stop::Stop;
use crate::api::grpc;
use crate::api::http;
use crate::api::metrics::{self, Shown};
use crate::transport::authority::AuthorityRepair;
use crate::transport::listen::Bound;
use crate::transport::on_wake::OnWake;
use crate::transport::read_filter::Inward;
use crate::transport::tls::Encryption;
use shadowslice_datapath::peer::Peer;

/// A failure such as too many open files does not pass at once.
const REST: Duration = Duration::from_millis(100);

#[derive(Clone)]
pub(crate) enum Service {
    Http(Arc<Frontend>),
    Grpc(Arc<Frontend>),
    Metrics(Shown),
}

pub(crate) type Stream = Pin<Box<dyn Connection>>;

pub(crate) trait Connection: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Connection for S {}

/// Returns when the last connection after `stop` has ended.
pub(crate) async fn run(
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
            let accepted = match accept(&bound, &service).await {
                Ok(accepted) => accepted,
                Err(error) => {
                    if !failing {
                        tracing::warn!(
                            address = bound.address(),
                            %error,
                            "a listener cannot accept connections; trying again, while clients wait; if too many files are open, raise the limit on open files"
                        );
                    }
                    failing = true;
                    sleep(REST).await;
                    continue;
                }
            };
            failing = false;
            let owner = Owner::of(&accepted.caller().peer);
            let entered = connections.enter(pools.client(owner)).await;
            tokio::spawn(serve(service.clone(), accepted, entered, stop.clone()));
        }
    };
    tokio::select! {
        () = &mut begun => {}
        () = accepting => {}
    }
}

/// A connection that still has to say who it is, if it is to be encrypted.
enum Accepted {
    Open(Stream, Caller),
    Encrypted(TcpStream, Encryption, Caller),
}

impl Accepted {
    fn caller(&self) -> &Caller {
        match self {
            Self::Open(_, caller) | Self::Encrypted(_, _, caller) => caller,
        }
    }

    async fn open(self) -> io::Result<(Stream, Caller)> {
        match self {
            Self::Open(stream, caller) => Ok((stream, caller)),
            Self::Encrypted(stream, encryption, mut caller) => {
                let (stream, known) = encryption.accept(stream).await?;
                if let Peer::Tcp { names, .. } = Arc::make_mut(&mut caller.peer) {
                    *names = known;
                }
                Ok((Box::pin(Paced::new(stream)), caller))
            }
        }
    }
}

async fn accept(bound: &Bound, service: &Service) -> io::Result<Accepted> {
    match bound {
        Bound::Unix { listener, file, guard } => {
            let (stream, caller) = caller::accept(listener, guard, &file.path().to_string_lossy()).await?;
            let stream = Paced::new(stream);
            let stream: Stream = match service {
                Service::Grpc(_) => Box::pin(Inward::new(stream, AuthorityRepair::new())),
                _ => Box::pin(stream),
            };
            Ok(Accepted::Open(stream, caller))
        }
        Bound::Tcp { listener, site, encryption, tokens, .. } => {
            let (stream, address) = listener.accept().await?;
            // It only fails when the peer is gone, as the next read will tell.
            let _ = stream.set_nodelay(true);
            let peer = Arc::new(Peer::Tcp { address, names: Vec::new() });
            let caller = Caller { peer, site: *site, tokens: tokens.clone() };
            Ok(match encryption {
                None => Accepted::Open(Box::pin(Paced::new(stream)), caller),
                Some(encryption) => Accepted::Encrypted(stream, encryption.clone(), caller),
            })
        }
    }
}

async fn serve(service: Service, accepted: Accepted, entered: Entered, stop: Stop) {
    let client = &entered.client;
    let mut cut = std::pin::pin!(cut(client, stop.clone()));
    let serving = async {
        let (stream, caller) = match accepted.open().await {
            Ok(opened) => opened,
            Err(error) => return tracing::debug!(%error, "cannot set up an encrypted connection"),
        };
        match service {
            Service::Http(front) => http::serve(stream, front, (client, caller), stop).await,
            Service::Grpc(front) => grpc::serve(stream, front, (client, caller), stop).await,
            Service::Metrics(shown) => metrics::serve(stream, shown, (client, caller), stop).await,
        }
    };
    tokio::select! {
        () = serving => {}
        () = OnWake::new(cut.as_mut()) => {}
    }
}

/// Returns when a connection is to be cut.
async fn cut(client: &Client, stop: Stop) {
    tokio::select! {
        () = outstays(client) => tracing::debug!("cut an idle connection to make room"),
        () = stop.overdue() => tracing::warn!(
            "closed a client's connection that was still open when the time to stop had passed"
        ),
    }
}
