//! Requests, and clients that check each byte of their answers.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::sleep;

use crate::grpc::GrpcEchoClient;
use crate::http::HttpEchoClient;

/// The tensors that a connection sends in turn, so that no answer can pass for the next one's.
pub(crate) const TURNS: usize = 2;

/// How long a client waits before it tries again to connect where too many do.
const BACKLOG_FULL: Duration = Duration::from_millis(1);

/// Why a measurement cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// The connection cannot be made, or broke.
    #[error("a connection failed")]
    Connection(#[source] std::io::Error),
    /// The same of an HTTP/2 connection.
    #[error("an HTTP/2 connection failed")]
    Http2(#[source] hyper::Error),
    /// The server closed the connection.
    #[error("the server closed a connection")]
    Closed,
    /// The answer is no HTTP.
    #[error("an answer is not HTTP/1.1")]
    NotHttp(#[source] httparse::Error),
    /// The server refused.
    #[error("the server answered {status}: {body}")]
    Refused {
        /// HTTP's status.
        status: u16,
        /// The answer's body.
        body: String,
    },
    /// The server refused a call.
    #[error("the server refused a call")]
    Call(#[source] tonic::Status),
    /// The answer is not the request's.
    #[error("an answer is wrong: {0}")]
    Wrong(String),
}

/// A connection.
#[derive(Debug)]
pub enum ClientStream {
    /// To a path.
    Unix(UnixStream),
    /// To an address.
    Tcp(TcpStream),
}

impl ClientStream {
    /// A connection to the socket at that path. If too many connections wait to be accepted, it
    /// tries until there is room.
    pub async fn unix(path: &Path) -> Result<Self, ExchangeError> {
        loop {
            match UnixStream::connect(path).await {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(BACKLOG_FULL).await,
                connected => return connected.map(Self::Unix).map_err(ExchangeError::Connection),
            }
        }
    }

    /// A connection to that address, which sends at once.
    pub async fn tcp(address: SocketAddr) -> Result<Self, ExchangeError> {
        let connected = async {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok::<_, io::Error>(stream)
        };
        connected.await.map(Self::Tcp).map_err(ExchangeError::Connection)
    }
}

/// A client with a connection of its own.
pub enum EchoClient {
    /// Speaks HTTP/1.1.
    Http(Box<HttpEchoClient>),
    /// Speaks gRPC.
    Grpc(Box<GrpcEchoClient>),
}

impl EchoClient {
    /// The client numbered `connection`, for tensors of so many bytes, over HTTP.
    pub fn http(stream: ClientStream, bytes: usize, connection: u16) -> Self {
        Self::Http(Box::new(HttpEchoClient::new(stream, bytes, connection)))
    }

    /// The same over gRPC.
    pub async fn grpc(stream: ClientStream, bytes: usize, connection: u16) -> Result<Self, ExchangeError> {
        Ok(Self::Grpc(Box::new(GrpcEchoClient::new(stream, bytes, connection).await?)))
    }

    /// Sends its request number `turn` and checks the answer.
    pub async fn ask(&mut self, turn: usize) -> Result<(), ExchangeError> {
        match self {
            Self::Http(client) => client.ask(turn % TURNS).await,
            Self::Grpc(client) => client.ask(turn % TURNS).await,
        }
    }
}

/// The model of the server's configuration that takes a tensor of this size.
pub fn model(bytes: usize) -> String {
    format!("echo-{bytes}")
}

/// FP32 elements in a tensor of this size.
pub fn elements(bytes: usize) -> i64 {
    i64::try_from(bytes / 4).expect("tensors are small")
}

/// The tensors that connection `connection` sends in its turns; no two tensors are equal.
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
