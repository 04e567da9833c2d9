//! Accepting connections.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::authority::AuthorityRepair;
use super::listen::Bound;
use super::stop::Stop;
use super::{Frontend, grpc, http};

/// How long accepting rests after a failure such as too many open files, which does not pass at once.
const REST: Duration = Duration::from_millis(100);

/// What is spoken at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Http,
    Grpc,
}

/// An accepted connection.
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// Serves at all the addresses until the end of the last connection after `stop`.
pub(super) async fn run(
    bound: Vec<(Protocol, Bound)>,
    front: &Arc<Frontend>,
    connections: usize,
    stop: Stop,
) {
    // As many as can be waited for at once, below.
    let most = u32::try_from(connections.min(Semaphore::MAX_PERMITS)).unwrap_or(u32::MAX);
    let room = Arc::new(Semaphore::new(most as usize));
    let mut listeners = JoinSet::new();
    for (protocol, bound) in bound {
        listeners.spawn(listen(protocol, bound, front.clone(), room.clone(), stop.clone()));
    }
    listeners.join_all().await;
    // All the room is back when the last connection has ended; the semaphore is never closed.
    let _ = room.acquire_many(most).await;
}

/// Accepts until `stop`. At the bound, one more connection per listener is accepted and waits.
async fn listen(protocol: Protocol, bound: Bound, front: Arc<Frontend>, room: Arc<Semaphore>, stop: Stop) {
    let mut begun = std::pin::pin!(stop.clone().begun());
    let accepting = async {
        let mut failing = false;
        loop {
            let stream = match accept(&bound).await {
                Ok(stream) => stream,
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
            let Ok(permit) = room.clone().acquire_owned().await else { return };
            let (front, stop) = (front.clone(), stop.clone());
            tokio::spawn(async move {
                serve(protocol, stream, front, stop).await;
                drop(permit);
            });
        }
    };
    tokio::select! {
        () = &mut begun => {}
        () = accepting => {}
    }
}

async fn accept(bound: &Bound) -> io::Result<Stream> {
    match bound {
        Bound::Unix { listener, .. } => Ok(Stream::Unix(listener.accept().await?.0)),
        Bound::Tcp { listener } => {
            let (stream, _) = listener.accept().await?;
            // It only fails when the peer is gone, as the next read will tell.
            let _ = stream.set_nodelay(true);
            Ok(Stream::Tcp(stream))
        }
    }
}

/// Serves one connection; cuts it when it is overdue.
async fn serve(protocol: Protocol, stream: Stream, front: Arc<Frontend>, stop: Stop) {
    let serving = async {
        match (protocol, stream) {
            (Protocol::Http, Stream::Unix(stream)) => http::serve(stream, front, stop.clone()).await,
            (Protocol::Http, Stream::Tcp(stream)) => http::serve(stream, front, stop.clone()).await,
            (Protocol::Grpc, Stream::Unix(stream)) => {
                grpc::serve(AuthorityRepair::new(stream), front, stop.clone()).await;
            }
            (Protocol::Grpc, Stream::Tcp(stream)) => grpc::serve(stream, front, stop.clone()).await,
        }
    };
    tokio::select! {
        () = serving => {}
        () = stop.clone().overdue() => tracing::warn!("cut a connection that did not end"),
    }
}
