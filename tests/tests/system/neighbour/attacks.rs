//! Attacks by clients. An attack runs until it is dropped.

use std::collections::VecDeque;
use std::future::pending;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use shadowslice_tests::server::ServerUnderTest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::{JoinSet, yield_now};
use tokio::time::interval;

use super::setting::{CONNECTIONS, OTHER};
use crate::hostile::{
    AnyResult, MIB, absent, bomb, called, connect, endless_call, exchange, has_answer, large, post,
};

/// The attacked server, and the number of completed rounds of the attack.
pub(super) struct Target {
    pub(super) server: Arc<ServerUnderTest>,
    pub(super) rounds: Arc<AtomicU64>,
}

impl Target {
    pub(super) fn done(&self) {
        self.rounds.fetch_add(1, Relaxed);
    }

    /// Connects to a socket. Polls the socket, because a full listener does not notify clients when
    /// it has space again.
    async fn connect(&self, socket: &str) -> AnyResult<UnixStream> {
        loop {
            match connect(&self.server, socket).await {
                Err(full) if full.kind() == ErrorKind::WouldBlock => yield_now().await,
                connected => return Ok(connected?),
            }
        }
    }
}

/// Sends a request repeatedly, over several new connections at the same time.
async fn send_repeatedly(
    target: &Target,
    socket: &str,
    request: Vec<u8>,
    connections: usize,
) -> AnyResult<()> {
    let request = Arc::new(request);
    loop {
        let mut asking = JoinSet::new();
        for _ in 0..connections {
            let (mut stream, request) = (target.connect(socket).await?, Arc::clone(&request));
            asking.spawn(async move { exchange(&mut stream, &request).await });
        }
        // Other tests check the answers to these requests, so this attack ignores them.
        asking.join_all().await;
        target.done();
    }
}

pub(super) async fn bombs(target: &Target) -> AnyResult<()> {
    send_repeatedly(target, "http.sock", bomb()?, 24).await
}

pub(super) async fn bodies_for_no_model(target: &Target) -> AnyResult<()> {
    send_repeatedly(target, "http.sock", absent(), 40).await
}

/// Sends 60 MiB of JSON.
pub(super) async fn strings(target: &Target) -> AnyResult<()> {
    const STRINGS: usize = 15 * MIB;
    let head = format!(r#"{{"inputs":[{{"name":"x","datatype":"BYTES","shape":[1,{STRINGS}],"data":["a""#);
    let json = [head.as_str(), &r#","a""#.repeat(STRINGS - 1), "]}]}"].concat();
    let request = post(OTHER, "", json.len()) + &json;
    send_repeatedly(target, "http.sock", request.into_bytes(), 4).await
}

/// Sends a gRPC message repeatedly, in several calls at the same time.
async fn messages(target: &Target, message: Vec<u8>, calls: usize) -> AnyResult<()> {
    let (message, client) = (Bytes::from(message), target.server.client());
    loop {
        let mut asking = JoinSet::new();
        for _ in 0..calls {
            let (message, client) = (message.clone(), client.clone());
            asking.spawn(async move { client.infer_bytes(message).await });
        }
        if let Some(Ok(())) = asking.join_all().await.into_iter().find(Result::is_ok) {
            return Err("the server accepted an invalid message".into());
        }
        target.done();
    }
}

/// Encodes a field of a message.
fn field(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut length = content.len();
    let mut field = vec![tag << 3 | 2];
    while length > 0x7f {
        field.push(length as u8 | 0x80);
        length >>= 7;
    }
    field.push(length as u8);
    field.extend_from_slice(content);
    field
}

pub(super) async fn parameters(target: &Target) -> AnyResult<()> {
    messages(target, [field(1, OTHER.as_bytes()), field(4, b"").repeat(23_000_000)].concat(), 2).await
}

/// Sends many values in `bytes_contents`.
pub(super) async fn contents(target: &Target, values: usize, bytes: usize) -> AnyResult<()> {
    let values = field(8, &vec![b'a'; bytes]).repeat(values);
    let input = [field(1, b"x"), field(2, b"BYTES"), field(3, &[1, 1]), field(5, &values)].concat();
    messages(target, [field(1, OTHER.as_bytes()), field(5, &input)].concat(), 2).await
}

/// Sends protocol-buffer groups that are not closed and numbers that do not end.
pub(super) async fn malformed(target: &Target) -> AnyResult<()> {
    messages(target, [&[0xff; 64][..], &[0x0b, 0x2a, 0xff, 0x01]].concat().repeat(100), 64).await
}

pub(super) async fn calls_without_messages(target: &Target) -> AnyResult<()> {
    loop {
        let mut open = Vec::new();
        for _ in 0..30 {
            open.push(called(&target.server, 1000).await?);
        }
        target.done();
    }
}

/// Opens calls and keeps them open.
pub(super) async fn many_calls(target: &Target) -> AnyResult<()> {
    let mut open = Vec::new();
    for _ in 0..70 {
        open.push(called(&target.server, 1000).await?);
        target.done();
    }
    pending().await
}

/// Opens more connections than the server allows, and closes the oldest connections.
pub(super) async fn idle_connections(target: &Target) -> AnyResult<()> {
    let mut open = VecDeque::new();
    loop {
        open.push_back(target.connect("http.sock").await?);
        if open.len() > 2 * CONNECTIONS {
            open.pop_front();
        }
        target.done();
        // The loop yields, because other tasks run on the same thread.
        yield_now().await;
    }
}

pub(super) async fn slow_readers(target: &Target) -> AnyResult<()> {
    let request = large(7 * MIB);
    let mut pace = interval(Duration::from_millis(100));
    loop {
        let mut slow = Vec::new();
        for _ in 0..20 {
            let mut stream = target.connect("http.sock").await?;
            exchange(&mut stream, &request).await?;
            slow.push(stream);
        }
        for _ in 0..5 {
            pace.tick().await;
            slow.iter().for_each(|stream| drop(stream.try_read(&mut [0; 1024])));
        }
        target.done();
    }
}

pub(super) async fn endless(target: &Target) -> AnyResult<()> {
    let call = endless_call();
    let body = post(OTHER, "", 2000 * MIB).into_bytes();
    loop {
        let mut stream = target.connect("grpc.sock").await?;
        stream.write_all(&call).await?;
        let mut said = Vec::new();
        while !has_answer(&said) {
            if stream.read_buf(&mut said).await? == 0 {
                return Err("the server closed the connection".into());
            }
        }
        exchange(&mut target.connect("http.sock").await?, &body).await?;
        target.done();
    }
}

/// Sends requests that are logged at the level `trace`.
pub(super) async fn noise(target: &Target) -> AnyResult<()> {
    send_repeatedly(target, "http.sock", b"GET /v2/models/absent HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), 16)
        .await
}

/// Connects as a user that the socket's access list does not contain.
pub(super) async fn refused(target: &Target) -> AnyResult<()> {
    let stranger = Uid::from_raw(70_001);
    // The call changes only the user of this thread.
    set_thread_res_uid(stranger, stranger, stranger)?;
    loop {
        let mut connecting = JoinSet::new();
        for _ in 0..64 {
            let mut stream = target.connect("http.sock").await?;
            // The result is an error or the end of the stream, so it is ignored.
            connecting.spawn(async move { stream.read(&mut [0]).await });
        }
        connecting.join_all().await;
        target.done();
    }
}
