//! Tests of a rolling restart of two hosts. A proxy in front of them sends requests only to ready
//! hosts.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::{DEFAULT_TIMEOUT, HarnessError, Home};
use shadowslice_tests::metrics::ask as http;
use shadowslice_tests::server::ServerUnderTest;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{interval, timeout};

use crate::fixtures::{EMULATED, echo, profile};

/// The interval at which the proxy polls the readiness of the hosts.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The time for which a stopping host continues to serve. This time contains many poll intervals,
/// because the machine may be busy.
const LAME_DUCK: &str = "2s";

type Connection = BufReader<UnixStream>;

/// Reads the head and the body of a request or an answer. Returns `None` if the peer has closed the
/// connection first.
async fn read(from: &mut Connection) -> io::Result<Option<(String, Vec<u8>)>> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if from.read_line(&mut head).await? == 0 {
            return if head.is_empty() { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length = length.and_then(|length| length.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    let mut body = vec![0; length];
    from.read_exact(&mut body).await?;
    Ok(Some((head, body)))
}

async fn write(to: &mut Connection, first: &str, body: &[u8]) -> io::Result<()> {
    let head = format!("{first}\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    to.write_all(&[head.as_bytes(), body].concat()).await
}

/// A host behind the proxy.
struct Backend {
    socket: PathBuf,
    ready_tx: watch::Sender<bool>,
    /// The number of starts so far. Connections from an earlier start are dead.
    starts: AtomicU64,
    answered: AtomicU64,
}

impl Backend {
    fn new(socket: PathBuf) -> Arc<Self> {
        let (starts, answered) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { socket, ready_tx: watch::Sender::new(false), starts, answered })
    }

    async fn poll(&self) {
        let mut tick = interval(POLL_INTERVAL);
        loop {
            tick.tick().await;
            let said = http(&self.socket, "GET", "/v2/health/ready").await;
            let ready = said.is_ok_and(|answer| answer.head.starts_with("http/1.1 200 "));
            if self.ready_tx.send_replace(ready) != ready && ready {
                self.starts.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Waits until the readiness has this value. Returns false on a timeout.
    async fn is_soon(&self, ready: bool) -> bool {
        let mut ready_rx = self.ready_tx.subscribe();
        timeout(DEFAULT_TIMEOUT, ready_rx.wait_for(|now| *now == ready)).await.is_ok()
    }
}

/// Forwards the requests of one client to the ready hosts in rotation. Keeps a connection to each
/// host until the host closes it. Does not retry requests.
async fn forward(client: UnixStream, backends: [Arc<Backend>; 2]) -> io::Result<()> {
    let mut client = BufReader::new(client);
    let mut kept: [Option<(u64, Connection)>; 2] = [None, None];
    let mut turn = 0;
    while let Some((head, body)) = read(&mut client).await? {
        turn += 1;
        let ready = |index: &usize| *backends[*index].ready_tx.borrow();
        let Some(index) = [turn % 2, (turn + 1) % 2].into_iter().find(ready) else {
            write(&mut client, "HTTP/1.1 502 no host is ready", b"").await?;
            continue;
        };
        let backend = &backends[index];
        let first = head.lines().next().unwrap_or_default();
        match ask(backend, kept[index].take(), first, &body).await {
            Ok((answer, connection)) => {
                kept[index] = connection;
                backend.answered.fetch_add(1, Ordering::Relaxed);
                write(&mut client, "HTTP/1.1 200 OK", &answer).await?;
            }
            Err(error) => write(&mut client, &format!("HTTP/1.1 502 {error}"), b"").await?,
        }
    }
    Ok(())
}

/// Sends a request to a host. Returns the answer, and the connection if it stays open.
async fn ask(
    backend: &Backend,
    kept: Option<(u64, Connection)>,
    first: &str,
    body: &[u8],
) -> io::Result<(Vec<u8>, Option<(u64, Connection)>)> {
    let start = backend.starts.load(Ordering::Relaxed);
    let mut connection = match kept.filter(|kept| kept.0 == start) {
        Some((_, connection)) => connection,
        None => BufReader::new(UnixStream::connect(&backend.socket).await?),
    };
    write(&mut connection, first, body).await?;
    let (head, answer) = read(&mut connection).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    if !head.starts_with("HTTP/1.1 200 ") {
        return Err(io::Error::other(format!("{head}{}", String::from_utf8_lossy(&answer))));
    }
    let lives = !head.contains("\r\nconnection: close\r\n");
    Ok((answer, lives.then_some((start, connection))))
}

async fn proxy(listener: UnixListener, backends: [Arc<Backend>; 2]) {
    let mut carried = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        carried.spawn(forward(client, backends.clone()));
    }
}

/// Sends requests one by one until `stop` is set. Uses one connection, or a new connection for each
/// request. Returns the number of answers, and the failures.
async fn client(socket: PathBuf, keeps: bool, stop: Arc<AtomicBool>) -> (u64, Vec<String>) {
    let body = br#"{"inputs":[{"name":"x","datatype":"FP32","shape":[1,16],"data":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]}]}"#;
    let (mut right, mut wrong, mut kept) = (0, Vec::new(), None);
    while !stop.load(Ordering::Relaxed) {
        let exchange = async {
            let mut connection = match kept.take() {
                Some(connection) => connection,
                None => BufReader::new(UnixStream::connect(&socket).await?),
            };
            write(&mut connection, "POST /v2/models/m/infer HTTP/1.1", body).await?;
            let answer = read(&mut connection).await?;
            io::Result::Ok((connection, answer))
        };
        match exchange.await {
            Ok((connection, Some((head, _)))) if head.starts_with("HTTP/1.1 200 ") => {
                right += 1;
                kept = keeps.then_some(connection);
            }
            other => wrong.push(format!("{other:?}")),
        }
    }
    (right, wrong)
}

fn start(run_dir: &Path) -> Result<ServerUnderTest, HarnessError> {
    let keys = "profile: profile.yaml, slo: 10s, share: {initial: 50%}, queue: {on_late: serve}";
    let home = Home::with_config(&format!(
        "run_dir: {}\n{EMULATED}timeouts: {{lame_duck: {LAME_DUCK}}}\nmodels:\n  - {}\n",
        run_dir.display(),
        echo("m", keys)
    ))?;
    home.write("profile.yaml", profile(2.0))?;
    ServerUnderTest::start(home, None)
}

/// Waits until the host has answered more requests of the clients. Returns false on a timeout.
async fn answers(backend: &Backend) -> bool {
    let before = backend.answered.load(Ordering::Relaxed);
    let mut tick = interval(POLL_INTERVAL);
    let more = async {
        while backend.answered.load(Ordering::Relaxed) < before + 50 {
            tick.tick().await;
        }
    };
    timeout(DEFAULT_TIMEOUT, more).await.is_ok()
}

#[tokio::test]
async fn a_rolling_restart_loses_nothing() {
    let folder = tempfile::Builder::new().prefix("ss-").tempdir_in("/tmp").unwrap();
    let run_dirs = ["a", "b"].map(|name| folder.path().join(name));
    let mut hosts = run_dirs.each_ref().map(|run_dir| start(run_dir).unwrap());
    let backends = run_dirs.each_ref().map(|run_dir| Backend::new(run_dir.join("http.sock")));
    let mut helpers = JoinSet::new();
    for backend in &backends {
        let backend = Arc::clone(backend);
        helpers.spawn(async move { backend.poll().await });
    }
    for backend in &backends {
        assert!(backend.is_soon(true).await);
    }
    let front = folder.path().join("proxy.sock");
    helpers.spawn(proxy(UnixListener::bind(&front).unwrap(), backends.clone()));
    let (stop, mut clients) = (Arc::new(AtomicBool::new(false)), JoinSet::new());
    for number in 0..8 {
        clients.spawn(client(front.clone(), number % 2 == 0, Arc::clone(&stop)));
    }
    for (index, backend) in backends.iter().enumerate() {
        assert!(answers(backend).await);
        hosts[index].signal(Signal::SIGTERM).unwrap();
        assert!(hosts[index].wait_exit().await.unwrap().success(), "{}", hosts[index].log());
        assert!(backend.is_soon(false).await);
        hosts[index] = start(&run_dirs[index]).unwrap();
        assert!(backend.is_soon(true).await && answers(backend).await);
    }
    stop.store(true, Ordering::Relaxed);
    let ended = clients.join_all().await;
    let lost: Vec<_> = ended.iter().flat_map(|(_, wrong)| wrong).collect();
    assert!(lost.is_empty(), "{} requests were lost: {:?}", lost.len(), &lost[..lost.len().min(5)]);
    for host in hosts {
        host.stop().await.unwrap();
    }
}
