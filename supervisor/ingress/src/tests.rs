//! Tests of a server without models on Unix sockets, as its clients use it.

mod grpc;
mod http;
mod late_streams;
mod metrics;

use std::path::PathBuf;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use shadowslice_config::AllowedClients;
use shadowslice_datapath::access::AccessLog;
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::heartbeat::Heartbeat;
use shadowslice_datapath::phase::Phase;
use tokio::sync::watch;

const LIMIT: u64 = 1000;
const PATIENCE: Duration = Duration::from_secs(20);

const LIMITS: LimitsConfig = LimitsConfig {
    request_bytes: LIMIT,
    response_bytes: LIMIT,
    memory: None,
    in_flight: 1,
    connections: 9,
    keep_alive: LimitsConfig::KEEP_ALIVE,
    shared_memory: AllowedClients::Nobody,
};

struct Server {
    dir: tempfile::TempDir,
    stop: watch::Sender<Phase>,
    running: JoinHandle<()>,
}

impl Server {
    async fn start(connections: usize) -> Self {
        Self::with_request_bytes(connections, LIMIT).await
    }

    /// Starts a server with a maximum size of requests.
    async fn with_request_bytes(connections: usize, request_bytes: u64) -> Self {
        Self::with_memory(connections, request_bytes, None).await
    }

    /// Starts a server with a maximum size of requests, and of their memory together.
    async fn with_memory(connections: usize, request_bytes: u64, memory: Option<u64>) -> Self {
        Self::with_limits(LimitsConfig { request_bytes, memory, connections, ..LIMITS }).await
    }

    async fn with_limits(limits: LimitsConfig) -> Self {
        Self::with_access_log(limits, None).await
    }

    /// Starts a server whose answers are logged.
    async fn with_access_log(limits: LimitsConfig, access: Option<Arc<AccessLog>>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener =
            |name| Listener::Unix { path: dir.path().join(name), mode: None, group: None, peers: None };
        let ingress = Ingress::bind(
            &[listener("http")],
            &[listener("grpc")],
            &limits,
            TenantMembership::single(),
            &mut Inherited::default(),
            &Arc::default(),
        )
        .await
        .unwrap();
        let (stop, stopped) = watch::channel(Phase::Serving);
        let running = tokio::spawn(ingress.run(
            Arc::new(Router::new(Heartbeat::new(Clock::start()))),
            Arc::new(Repository::new(
                Vec::new,
                Guard::nobody(),
                tokio::sync::mpsc::channel(1).0,
                watch::channel(Phase::Serving).1,
            )),
            (None, access),
            stopped,
        ));
        Self { dir, stop, running }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    async fn connect(&self, name: &str) -> UnixStream {
        UnixStream::connect(self.path(name)).await.unwrap()
    }

    async fn stop(self) {
        self.stop.send_replace(Phase::Stopping);
        timeout(PATIENCE, self.running).await.unwrap().unwrap();
        assert_eq!(self.dir.path().read_dir().unwrap().count(), 0, "the sockets are gone");
    }
}

/// Reads to the end of the stream.
async fn rest(stream: &mut UnixStream) -> String {
    let mut rest = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut rest)).await.unwrap().unwrap();
    String::from_utf8(rest).unwrap()
}

#[tokio::test]
async fn stopping_closes_idle_connections_and_removes_the_sockets() {
    let server = Server::start(9).await;
    let mut connections = Vec::new();
    for name in ["http", "grpc"] {
        connections.push(server.connect(name).await);
    }
    let mut used = server.connect("http").await;
    assert!(
        http::ask(&mut used, "GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .starts_with("HTTP/1.1 200")
    );
    server.stop().await;
    for mut connection in connections {
        // The gRPC connection has received the server's settings. An end or a reset follows.
        while connection.read(&mut [0; 99]).await.is_ok_and(|read| read > 0) {}
    }
    assert_eq!(rest(&mut used).await, "");
}

#[tokio::test]
async fn a_request_in_flight_is_answered_after_the_stop() {
    let server = Server::start(9).await;
    let mut stream = server.connect("http").await;
    let head =
        "POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n";
    // "100 Continue" shows that the server has begun the request.
    assert!(http::ask(&mut stream, head).await.starts_with("HTTP/1.1 100"));
    server.stop.send_replace(Phase::Stopping);
    stream.write_all(b"{}  ").await.unwrap();
    assert!(rest(&mut stream).await.starts_with("HTTP/1.1 404"));
    server.stop().await;
}

const LIVE: &str = "GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n";

/// Sends a request that lasts until its body arrives.
async fn busy_connection(server: &Server) -> UnixStream {
    let mut stream = server.connect("http").await;
    let head =
        "POST /v2/repository/index HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n";
    assert!(http::ask(&mut stream, head).await.starts_with("HTTP/1.1 100"));
    stream
}

#[tokio::test]
async fn over_the_limit_the_connection_that_is_idle_longest_makes_room() {
    let server = Server::start(3).await;
    let mut busy = busy_connection(&server).await;
    let (mut first, mut second) = (server.connect("http").await, server.connect("http").await);
    assert!(http::ask(&mut second, LIVE).await.starts_with("HTTP/1.1 200"));
    // The server records the order with a resolution of a millisecond.
    let heard = std::time::Instant::now();
    while heard.elapsed() < Duration::from_millis(2) {
        tokio::task::yield_now().await;
    }
    assert!(http::ask(&mut first, LIVE).await.starts_with("HTTP/1.1 200"));
    let mut third = server.connect("http").await;
    assert!(http::ask(&mut third, "GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n").await.starts_with("HTTP/1.1 200"));
    assert_eq!(rest(&mut second).await, "", "it has been idle for longest");
    for stream in [&mut first, &mut third] {
        assert!(http::ask(stream, LIVE).await.starts_with("HTTP/1.1 200"));
    }
    assert!(http::ask(&mut busy, "{}").await.starts_with("HTTP/1.1 200"));
    server.stop().await;
}

#[tokio::test]
async fn a_surplus_connection_may_ask_for_health_and_for_all_else_when_another_ends() {
    let server = Server::start(1).await;
    let mut busy = busy_connection(&server).await;
    let mut beyond = server.connect("http").await;
    assert!(http::ask(&mut beyond, LIVE).await.starts_with("HTTP/1.1 200"));
    let index = "POST /v2/repository/index HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}";
    let refused = http::ask(&mut beyond, index).await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("limits.connections"), "{refused}");
    let mut beyond = server.connect("http").await;
    beyond.write_all(index.as_bytes()).await.unwrap();
    assert!(http::ask(&mut busy, "{}").await.starts_with("HTTP/1.1 200"));
    drop(busy);
    assert!(http::ask(&mut beyond, "").await.starts_with("HTTP/1.1 200"));
    server.stop().await;
}

#[tokio::test]
async fn after_a_fault_no_address_is_bound() {
    let dir = tempfile::tempdir().unwrap();
    let listener =
        |name| Listener::Unix { path: dir.path().join(name), mode: None, group: None, peers: None };
    let fault = Ingress::bind(
        &[listener("http")],
        &[listener("no/grpc")],
        &LIMITS,
        TenantMembership::single(),
        &mut Inherited::default(),
        &Arc::default(),
    )
    .await;
    assert!(fault.unwrap_err().to_string().contains("no/grpc"));
    assert_eq!(dir.path().read_dir().unwrap().count(), 0);
}
