//! The acceptance of connections.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_datapath::peer::Peer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::listen::BoundListener;
use super::on_wake::on_wake;
use super::tls::Encryption;
use super::write_rate::MinRateStream;
use crate::admission::{
    Budgets, Caller, Client, ConnectionSlot, Connections, Owner, Stop, accept_permitted, overstays,
};

/// The time before another attempt to accept. A failure such as too many open files does not end at
/// once.
const RETRY_BACKOFF: Duration = Duration::from_millis(100);

/// A service that answers the requests on connections.
pub(crate) trait Service: Clone + Send + Sync + 'static {
    /// Serves a connection to its end.
    fn serve(self, connection: Connection, stop: Stop) -> impl Future<Output = ()> + Send;
}

/// An open connection, which is encrypted or not.
pub(crate) struct Connection {
    pub(crate) stream: Stream,
    pub(crate) client: Arc<Client>,
    pub(crate) caller: Caller,
}

pub(crate) type Stream = Pin<Box<dyn Duplex>>;

pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Duplex for S {}

/// Accepts and serves connections. Returns when the last connection after `stop` has ended.
pub(crate) async fn run<S: Service>(
    bound: impl Iterator<Item = (S, BoundListener)>,
    max_connections: usize,
    budgets: Arc<Budgets>,
    stop: Stop,
) {
    let connections = Connections::new(max_connections);
    let mut listeners = JoinSet::new();
    for (service, bound) in bound {
        listeners.spawn(listen(service, bound, connections.clone(), budgets.clone(), stop.clone()));
    }
    listeners.join_all().await;
    connections.ended().await;
}

/// Accepts the connections of a listener. If even the surplus of connections is used up, accepts
/// one more connection, which waits.
async fn listen<S: Service>(
    service: S,
    bound: BoundListener,
    connections: Arc<Connections>,
    budgets: Arc<Budgets>,
    stop: Stop,
) {
    let mut begun = std::pin::pin!(stop.clone().begun());
    let accepting = async {
        let mut is_failing = false;
        loop {
            let accepted = match accept(&bound).await {
                Ok(accepted) => accepted,
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(
                            address = bound.address(),
                            %error,
                            "a listener cannot accept connections; trying again, while clients wait; if too many files are open, raise the limit on open files"
                        );
                    }
                    sleep(RETRY_BACKOFF).await;
                    continue;
                }
            };
            is_failing = false;
            let owner = Owner::of(&accepted.caller().peer);
            let slot = connections.open(Client::new(&budgets, owner)).await;
            tokio::spawn(serve(service.clone(), accepted, slot, stop.clone()));
        }
    };
    tokio::select! {
        () = &mut begun => {}
        () = accepting => {}
    }
}

/// A connection that has been accepted. The peer of an encrypted one is not identified yet.
enum Accepted {
    Plain(Stream, Caller),
    Encrypted(TcpStream, Encryption, Caller),
}

impl Accepted {
    fn caller(&self) -> &Caller {
        match self {
            Self::Plain(_, caller) | Self::Encrypted(_, _, caller) => caller,
        }
    }

    async fn open(self) -> io::Result<(Stream, Caller)> {
        match self {
            Self::Plain(stream, caller) => Ok((stream, caller)),
            Self::Encrypted(stream, encryption, mut caller) => {
                let (stream, client_names) = encryption.accept(stream).await?;
                if let Peer::Tcp { names, .. } = Arc::make_mut(&mut caller.peer) {
                    *names = client_names;
                }
                Ok((Box::pin(MinRateStream::new(stream)), caller))
            }
        }
    }
}

async fn accept(bound: &BoundListener) -> io::Result<Accepted> {
    match bound {
        BoundListener::Unix { listener, file, guard } => {
            let (stream, caller) = accept_permitted(listener, guard, &file.path().to_string_lossy()).await?;
            Ok(Accepted::Plain(Box::pin(MinRateStream::new(stream)), caller))
        }
        BoundListener::Tcp { listener, origin, encryption, tokens, .. } => {
            let (stream, address) = listener.accept().await?;
            // This fails only if the peer is gone, which the next read reports.
            let _ = stream.set_nodelay(true);
            let peer = Arc::new(Peer::Tcp { address, names: Vec::new() });
            let caller = Caller { peer, origin: *origin, tokens: tokens.clone() };
            Ok(match encryption {
                None => Accepted::Plain(Box::pin(MinRateStream::new(stream)), caller),
                Some(encryption) => Accepted::Encrypted(stream, encryption.clone(), caller),
            })
        }
    }
}

async fn serve<S: Service>(service: S, accepted: Accepted, slot: ConnectionSlot, stop: Stop) {
    let client = &slot.client;
    let must_close = on_wake(must_close(client, stop.clone()));
    let serving = async {
        match accepted.open().await {
            Ok((stream, caller)) => {
                service.serve(Connection { stream, client: Arc::clone(client), caller }, stop).await;
            }
            Err(error) => tracing::debug!(%error, "cannot set up an encrypted connection"),
        }
    };
    tokio::select! {
        () = serving => {}
        () = must_close => {}
    }
}

/// Waits until a connection must be closed.
async fn must_close(client: &Client, stop: Stop) {
    tokio::select! {
        () = overstays(client) => tracing::debug!("cut an idle connection to make room"),
        () = stop.overdue() => tracing::warn!(
            "closed a client's connection that was still open when the time to stop had passed"
        ),
    }
}
