//! Accepting connections.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_io_timeout::TimeoutStream;

use super::authority::AuthorityRepair;
use super::listen::Bound;
use super::metrics::{self, Render};
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

/// How long a peer may read nothing of an answer.
pub(super) const UNREAD: Duration = Duration::from_secs(30);

pub(super) type Stream = Pin<Box<dyn Connection>>;

pub(super) trait Connection: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Connection for S {}

/// Returns when the last connection after `stop` has ended.
pub(super) async fn run(bound: impl Iterator<Item = (Service, Bound)>, connections: usize, stop: Stop) {
    // As many as can be waited for at once, below.
    let most = u32::try_from(connections.min(Semaphore::MAX_PERMITS)).unwrap_or(u32::MAX);
    let room = Arc::new(Semaphore::new(most as usize));
    let mut listeners = JoinSet::new();
    for (service, bound) in bound {
        listeners.spawn(listen(service, bound, room.clone(), stop.clone()));
    }
    listeners.join_all().await;
    // All the room is back when the last connection has ended; the semaphore is never closed.
    let _ = room.acquire_many(most).await;
}

/// At the bound, one more connection per listener is accepted and waits.
async fn listen(service: Service, bound: Bound, room: Arc<Semaphore>, stop: Stop) {
    let mut begun = std::pin::pin!(stop.clone().begun());
    let accepting = async {
        let mut failing = false;
        loop {
            let stream = match accept(&bound, &service).await {
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
            let (service, stop) = (service.clone(), stop.clone());
            tokio::spawn(async move {
                serve(service, stream, stop).await;
                drop(permit);
            });
        }
    };
    tokio::select! {
        () = &mut begun => {}
        () = accepting => {}
    }
}

async fn accept(bound: &Bound, service: &Service) -> io::Result<Stream> {
    match bound {
        Bound::Unix { listener, .. } => {
            let stream = impatient(listener.accept().await?.0, UNREAD);
            Ok(if let Service::Grpc(_) = service { Box::pin(AuthorityRepair::new(stream)) } else { stream })
        }
        Bound::Tcp { listener } => {
            let (stream, _) = listener.accept().await?;
            // It only fails when the peer is gone, as the next read will tell.
            let _ = stream.set_nodelay(true);
            Ok(impatient(stream, UNREAD))
        }
    }
}

/// Answers that no client takes would stay in memory.
fn impatient(stream: impl Connection + 'static, unread: Duration) -> Stream {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(unread));
    Box::pin(stream)
}

async fn serve(service: Service, stream: Stream, stop: Stop) {
    let overdue = stop.clone().overdue();
    let serving = async {
        match service {
            Service::Http(front) => http::serve(stream, front, stop).await,
            Service::Grpc(front) => grpc::serve(stream, front, stop).await,
            Service::Metrics(render) => metrics::serve(stream, render, stop).await,
        }
    };
    tokio::select! {
        () = serving => {}
        () = overdue => tracing::warn!("cut a connection that did not end"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn a_client_that_reads_nothing_is_given_up() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut ours = impatient(ours, Duration::from_millis(20));
        let failed = ours.write_all(&vec![0; 16 << 20]).await.unwrap_err();
        assert_eq!(failed.kind(), io::ErrorKind::TimedOut);
    }
}
