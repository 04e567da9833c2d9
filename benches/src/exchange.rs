//! Echo requests, and clients that compare every byte of the answers.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::sleep;

use crate::grpc::GrpcEchoClient;
use crate::http::HttpEchoClient;

/// The number of different tensors that a connection sends alternately. With two tensors, a client
/// detects that a server repeats its previous answer.
pub(crate) const TURNS: usize = 2;

/// The time that a client waits before it tries again to connect, after the server's backlog was
/// full.
const CONNECT_BACKOFF: Duration = Duration::from_millis(1);

/// The reason why an exchange of a request and its answer failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    #[error("a connection failed")]
    Connection(#[source] std::io::Error),
    #[error("an HTTP/2 connection failed")]
    Http2(#[source] hyper::Error),
    #[error("the server closed a connection")]
    Closed,
    #[error("an answer is not HTTP/1.1")]
    NotHttp(#[source] httparse::Error),
    /// The server answered with an HTTP status other than 200, which counts as a refusal.
    #[error("the server answered {status}: {body}")]
    Refused { status: u16, body: String },
    #[error("the server refused a gRPC call")]
    Call(#[source] tonic::Status),
    #[error("wrong answer: {0}")]
    Wrong(String),
}

/// A connection to a server.
#[derive(Debug)]
pub(crate) enum ClientStream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl ClientStream {
    /// Connects to the socket at `path`. If the server's backlog is full, retries until the
    /// connection succeeds.
    pub(crate) async fn unix(path: &Path) -> Result<Self, ExchangeError> {
        loop {
            match UnixStream::connect(path).await {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(CONNECT_BACKOFF).await,
                connected => return connected.map(Self::Unix).map_err(ExchangeError::Connection),
            }
        }
    }

    /// Connects to `address`, and disables Nagle's algorithm.
    pub(crate) async fn tcp(address: SocketAddr) -> Result<Self, ExchangeError> {
        let connected = async {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok::<_, io::Error>(stream)
        };
        connected.await.map(Self::Tcp).map_err(ExchangeError::Connection)
    }
}

/// A client with its own connection.
pub(crate) enum EchoClient {
    Http(Box<HttpEchoClient>),
    Grpc(Box<GrpcEchoClient>),
}

impl EchoClient {
    /// Returns an HTTP client that sends tensors of `bytes` bytes. `connection` is the client's
    /// number, which determines the values of its tensors.
    pub(crate) fn http(stream: ClientStream, bytes: usize, connection: u16) -> Self {
        Self::Http(Box::new(HttpEchoClient::new(stream, bytes, connection)))
    }

    /// Returns a gRPC client that sends tensors of `bytes` bytes. `connection` is the client's
    /// number, which determines the values of its tensors.
    pub(crate) async fn grpc(
        stream: ClientStream,
        bytes: usize,
        connection: u16,
    ) -> Result<Self, ExchangeError> {
        Ok(Self::Grpc(Box::new(GrpcEchoClient::new(stream, bytes, connection).await?)))
    }

    /// Sends the request with the number `turn` and checks the answer.
    pub(crate) async fn exchange(&mut self, turn: usize) -> Result<(), ExchangeError> {
        match self {
            Self::Http(client) => client.exchange(turn % TURNS).await,
            Self::Grpc(client) => client.exchange(turn % TURNS).await,
        }
    }
}

/// Returns the name of the model that accepts a tensor of `bytes` bytes.
pub(crate) fn model(bytes: usize) -> String {
    format!("echo-{bytes}")
}

/// Returns the number of FP32 elements in a tensor of `bytes` bytes.
pub(crate) fn elements(bytes: usize) -> i64 {
    i64::try_from(bytes / 4).expect("tensors are small")
}

/// Returns the tensors that this connection sends alternately. No two tensors of the same size are
/// equal, even on different connections.
pub(crate) fn tensors(bytes: usize, connection: u16) -> [Bytes; TURNS] {
    std::array::from_fn(|turn| {
        let first = u32::from(connection) * TURNS as u32 + turn as u32;
        let element = |at: u32| (first + at) as f32;
        (0..).take(bytes / 4).flat_map(|at| element(at).to_le_bytes()).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_tensors_are_equal() {
        let all: HashSet<Bytes> = (0..128).flat_map(|connection| tensors(64, connection)).collect();
        assert_eq!(all.len(), 128 * TURNS);
        assert!(all.iter().all(|tensor| tensor.len() == 64));
    }
}
