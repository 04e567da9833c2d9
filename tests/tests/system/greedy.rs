//! Clients that want more than their part: they get it, or a reason, and others are served.

use std::error::Error;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use flate2::Compression;
use flate2::read::GzEncoder;
use shadowslice_tests::client::Client;
use shadowslice_tests::home::Home;
use shadowslice_tests::load::Outcome;
use shadowslice_tests::server::Server;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, timeout};

use crate::scene::{ask, echo_case, profile};

type Tried<T> = Result<T, Box<dyn Error + Send + Sync>>;

const MIB: usize = 1 << 20;

/// Far less than what the server waits for of a client.
const SOON: Duration = Duration::from_secs(20);

/// A model whose input has any length; a batch takes `execution_ms`.
fn home(limits: &str, execution_ms: f64) -> Tried<Home> {
    let yaml = format!(
        "listen: {{http: [\"unix:http.sock\"], grpc: [\"unix:grpc.sock\"], metrics: [\"unix:metrics.sock\"]}}\n\
         gpus: [{{device: emulated, sms: 132}}]\ncontroller: {{policy: static}}\nlimits: {{{limits}}}\n\
         models:\n  - {{name: echo, engine: emulated, slo: 20s, profile: profile.yaml, batch: {{max: 1}},\n     \
         queue: {{memory: 64Mi, on_late: serve}},\n     \
         tensors: [{{input: x, output: y, datatype: FP32, shape: [-1]}}]}}\n"
    );
    let home = Home::with_config(&yaml)?;
    home.write("profile.yaml", profile(execution_ms))?;
    Ok(home)
}

async fn started(limits: &str) -> Tried<Server> {
    Ok(Server::ready(home(limits, 1.0)?).await?)
}

async fn connect(server: &Server, socket: &str) -> io::Result<UnixStream> {
    UnixStream::connect(server.home().run_dir().join(socket)).await
}

fn post(model: &str, headers: &str, length: usize) -> String {
    format!("POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{headers}\r\n")
}

/// A request for an answer of so many bytes.
fn large(bytes: usize) -> Vec<u8> {
    let json = format!(
        r#"{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,{}],"parameters":{{"binary_data_size":{bytes}}}}}],"parameters":{{"binary_data_output":true}}}}"#,
        bytes / 4
    );
    let headers = format!("inference-header-content-length: {}\r\n", json.len());
    let mut request = post("echo", &headers, json.len() + bytes).into_bytes();
    request.extend_from_slice(json.as_bytes());
    request.resize(request.len() + bytes, 0);
    request
}

/// Sends as much of a request as is taken, and reads the beginning of the answer.
async fn heard(stream: &mut UnixStream, request: &[u8]) -> Tried<String> {
    let (mut answer, mut said) = stream.split();
    let sending = async {
        // A server that refuses a request in its middle ends the connection.
        let _ = said.write_all(request).await;
        std::future::pending::<()>().await
    };
    let mut beginning = vec![0; 1024];
    let read = tokio::select! {
        read = timeout(SOON, answer.read(&mut beginning)) => read?.unwrap_or(0),
        () = sending => unreachable!("it is pending"),
    };
    Ok(String::from_utf8_lossy(&beginning[..read]).into_owned())
}

/// In MiB.
fn peak(server: &Server) -> u64 {
    server.process().peak_memory().map_or(u64::MAX, |bytes| bytes >> 20)
}

async fn assert_served(client: Client) {
    let answer = timeout(SOON, ask(client, "echo", &echo_case(1), 0.0)).await;
    assert_eq!(answer, Ok(Outcome::Right));
}

#[tokio::test]
async fn compressed_bodies_become_no_more_than_the_memory_allows() {
    let server = started("memory: 256Mi").await.unwrap();
    let mut bomb = Vec::new();
    GzEncoder::new(std::io::repeat(0).take(64 * MIB as u64), Compression::fast())
        .read_to_end(&mut bomb)
        .unwrap();
    let mut request = post("echo", "content-encoding: gzip\r\n", bomb.len()).into_bytes();
    request.extend_from_slice(&bomb);
    let mut asking = JoinSet::new();
    for _ in 0..24 {
        let (mut stream, request) = (connect(&server, "http.sock").await.unwrap(), request.clone());
        asking.spawn(async move { heard(&mut stream, &request).await });
    }
    for answer in asking.join_all().await.into_iter().map(Result::unwrap) {
        let why = ["limits.memory", "too many compressed requests"].iter().any(|why| answer.contains(why));
        let refused = answer.starts_with("HTTP/1.1 503") && why;
        assert!(refused || answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    // The allocator keeps what was given back for some seconds, on each thread.
    assert!(peak(&server) < 900, "{} MiB", peak(&server));
    assert_served(server.client()).await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_body_for_no_model_is_not_read() {
    let server = started("").await.unwrap();
    let head = post("absent", "", 60 * MIB);
    let mut asking = JoinSet::new();
    for _ in 0..40 {
        let mut stream = connect(&server, "http.sock").await.unwrap();
        let request = [head.as_bytes(), &vec![0; 8 * MIB]].concat();
        asking.spawn(async move { heard(&mut stream, &request).await });
    }
    for answer in asking.join_all().await.into_iter().map(Result::unwrap) {
        assert!(answer.starts_with("HTTP/1.1 404") && answer.contains("connection: close"), "{answer}");
    }
    assert!(peak(&server) < 100, "{} MiB", peak(&server));
    server.stop().await.unwrap();
}

/// The heads of so many calls of ModelInfer, and a ping behind them.
fn heads(calls: u32) -> Vec<u8> {
    // All are short.
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        [&[0, 0, payload.len() as u8, kind, flags], &stream.to_be_bytes()[..], payload].concat()
    };
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    let named = |name: &str, value: &str| [vec![0], text(name), text(value)].concat();
    let head = [
        &[0x83, 0x86, 0x04][..],
        &text("/inference.GRPCInferenceService/ModelInfer"),
        &[0x01, 0x01, b'x'],
        &named("te", "trailers"),
        &named("content-type", "application/grpc"),
    ]
    .concat();
    let mut sent = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(4, 0, 0, &[])].concat();
    (0..calls).for_each(|call| sent.extend(frame(1, 4, 2 * call + 1, &head)));
    sent.extend(frame(6, 0, 0, b"all read"));
    sent
}

#[tokio::test]
async fn calls_without_a_body_take_no_more_than_the_memory_allows_and_no_place() {
    let server =
        started("request_bytes: 8Mi, response_bytes: 8Mi, memory: 32Mi, in_flight: 512").await.unwrap();
    let mut greedy = Vec::new();
    for _ in 0..16 {
        let mut stream = connect(&server, "grpc.sock").await.unwrap();
        stream.write_all(&heads(1000)).await.unwrap();
        let mut got = Vec::new();
        while !got.windows(8).any(|window| window == b"all read") {
            assert!(timeout(SOON, stream.read_buf(&mut got)).await.unwrap().unwrap() > 0);
        }
        greedy.push(stream);
    }
    assert!(peak(&server) < 110, "{} MiB", peak(&server));
    assert_served(server.client()).await;
    drop(greedy);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn answers_that_nobody_takes_are_counted_and_their_readers_cut() {
    let server = started("request_bytes: 8Mi, response_bytes: 8Mi, memory: 48Mi").await.unwrap();
    let request = large(7 * MIB);
    let mut slow = Vec::new();
    let mut refused = 0;
    for _ in 0..20 {
        let mut stream = connect(&server, "http.sock").await.unwrap();
        let answer = heard(&mut stream, &request).await.unwrap();
        if answer.starts_with("HTTP/1.1 200") {
            slow.push(stream);
        } else {
            assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("limits.memory"), "{answer}");
            refused += 1;
        }
    }
    assert!(refused > 0 && slow.len() > 2, "{} are served", slow.len());
    assert_served(server.client()).await;
    // A KiB a second keeps the connection moving, and is too slow.
    let begun = Instant::now();
    let mut pace = interval(Duration::from_secs(1));
    let mut room = [0; 1024];
    let mut answer = String::new();
    while begun.elapsed() < Duration::from_secs(45) && !answer.starts_with("HTTP/1.1 200") {
        answer = heard(&mut connect(&server, "http.sock").await.unwrap(), &request).await.unwrap();
        pace.tick().await;
        for stream in &mut slow {
            let _ = stream.try_read(&mut room);
        }
    }
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(begun.elapsed() > Duration::from_secs(10), "there was room before");
    assert!(peak(&server) < 250, "{} MiB", peak(&server));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_connection_with_many_requests_leaves_places_to_others() {
    let server = Server::ready(home("in_flight: 16", 200.0).unwrap()).await.unwrap();
    let (greedy, other) = (server.client(), server.client());
    // Both are connected.
    assert_served(greedy.clone()).await;
    assert_served(other.clone()).await;
    let mut asking = JoinSet::new();
    for n in 0..60 {
        let client = greedy.clone();
        asking.spawn(async move { ask(client, "echo", &echo_case(n), 0.0).await });
    }
    let refused = asking.join_next().await.unwrap().unwrap();
    assert!(matches!(&refused, Outcome::Failed(why) if why.contains("limits.in_flight")), "{refused:?}");
    assert_served(other).await;
    let right = asking.join_all().await.into_iter().filter(|outcome| *outcome == Outcome::Right).count();
    assert!((7..=16).contains(&right), "{right}");
    server.stop().await.unwrap();
}

/// The beginning of what a new connection is answered.
async fn got(server: &Server, socket: &str, path: &str) -> Tried<String> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
    heard(&mut connect(server, socket).await?, request.as_bytes()).await
}

#[tokio::test]
async fn idle_connections_make_room_for_health_metrics_and_requests() {
    let server = started("connections: 20").await.unwrap();
    let mut idle = Vec::new();
    for socket in ["http.sock"; 21].into_iter().chain(["metrics.sock"; 66]).chain(["grpc.sock"; 21]) {
        idle.push(connect(&server, socket).await.unwrap());
    }
    for (socket, path) in
        [("http.sock", "/v2/health/live"), ("http.sock", "/v2/models/echo"), ("metrics.sock", "/metrics")]
    {
        let answer = got(&server, socket, path).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }
    assert_served(server.client()).await;
    let ended = timeout(SOON, idle[0].read(&mut [0])).await.unwrap();
    assert!(matches!(ended, Ok(0) | Err(_)), "it was idle for longest");
    server.stop().await.unwrap();
}

/// Runs the server with so many MiB of address space.
fn confine(home: &mut Home, mib: usize) -> Tried<()> {
    let own = std::env::current_exe()?;
    let binary = own.ancestors().nth(2).unwrap_or(Path::new(".")).join("shadowslice");
    let binary = std::env::var_os("SHADOWSLICE_BIN").map_or(binary, Into::into);
    let script = format!("#!/bin/sh\nulimit -v {}\nexec {} \"$@\"\n", mib * 1024, binary.display());
    let path = home.write("confined", script)?;
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    home.set_binary(path);
    Ok(())
}

/// Whether the head of an answer is among these frames.
fn has_answer(mut frames: &[u8]) -> bool {
    while let [a, b, c, kind, ..] = *frames {
        if kind == 1 {
            return true;
        }
        frames = frames.get(9 + u32::from_be_bytes([0, a, b, c]) as usize..).unwrap_or_default();
    }
    false
}

#[tokio::test]
async fn a_request_for_which_the_system_has_no_memory_fails_alone() {
    let mut home = home("request_bytes: 2Gi, memory: 64Gi", 1.0).unwrap();
    let queue = std::fs::read_to_string(home.path().join("config.yaml")).unwrap();
    home.write("config.yaml", queue.replace("queue: {memory: 64Mi", "queue: {memory: 2Gi")).unwrap();
    confine(&mut home, 4096).unwrap();
    let server = Server::ready(home).await.unwrap();
    // A message of 1.9 GiB, as its first bytes say.
    let mut call = heads(1);
    call.truncate(call.len() - 17);
    call.extend_from_slice(b"\0\0\x05\0\0\0\0\0\x01\0\x7a\0\0\0");
    let mut stream = connect(&server, "grpc.sock").await.unwrap();
    stream.write_all(&call).await.unwrap();
    let mut said = Vec::new();
    while !has_answer(&said) {
        assert!(timeout(SOON, stream.read_buf(&mut said)).await.unwrap().unwrap() > 0, "{said:?}");
    }
    let answer =
        heard(&mut connect(&server, "http.sock").await.unwrap(), post("echo", "", 2000 * MIB).as_bytes())
            .await
            .unwrap();
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("the system has no"), "{answer}");
    assert_served(server.client()).await;
    drop(stream);
    server.stop().await.unwrap();
}
