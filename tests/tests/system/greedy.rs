//! Tests with clients that use too many resources. The server must serve such clients or refuse
//! them with a reason, and it must serve other clients.

use std::time::Duration;

use shadowslice_tests::client::InferGrpcClient;
use shadowslice_tests::home::Home;
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::server::ServerUnderTest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, timeout};

use crate::fixtures::{ask, echo_case, profile};
use crate::hostile::{
    AnyResult, MIB, SOON, absent, bomb, called, confine, connect, endless_call, exchange, has_answer, large,
    post,
};

/// Makes the configuration of a model whose input may have any length. A batch takes
/// `execution_ms`.
fn home(limits: &str, execution_ms: f64) -> AnyResult<Home> {
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

async fn started(limits: &str) -> AnyResult<ServerUnderTest> {
    Ok(ServerUnderTest::start_ready(home(limits, 1.0)?).await?)
}

/// Returns the peak memory of the supervisor, in MiB.
fn peak(server: &ServerUnderTest) -> u64 {
    server.process().peak_memory().map_or(u64::MAX, |bytes| bytes >> 20)
}

async fn assert_served(client: InferGrpcClient) {
    let answer = timeout(SOON, ask(client, "echo", &echo_case(1), 0.0)).await;
    assert_eq!(answer, Ok(RequestOutcome::Right));
}

#[tokio::test]
async fn compressed_bodies_stay_within_the_memory_limit() {
    let server = started("memory: 256Mi").await.unwrap();
    let request = bomb().unwrap();
    let mut asking = JoinSet::new();
    for _ in 0..24 {
        let (mut stream, request) = (connect(&server, "http.sock").await.unwrap(), request.clone());
        asking.spawn(async move { exchange(&mut stream, &request).await });
    }
    for answer in asking.join_all().await.into_iter().map(Result::unwrap) {
        let why = ["limits.memory", "too many compressed requests"].iter().any(|why| answer.contains(why));
        let refused = answer.starts_with("HTTP/1.1 503") && why;
        assert!(refused || answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    // The limit has a margin, because each thread's allocator keeps freed memory for some seconds.
    assert!(peak(&server) < 900, "{} MiB", peak(&server));
    assert_served(server.client()).await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_body_for_an_unknown_model_is_not_read() {
    let server = started("").await.unwrap();
    let mut asking = JoinSet::new();
    for _ in 0..40 {
        let mut stream = connect(&server, "http.sock").await.unwrap();
        let request = absent();
        asking.spawn(async move { exchange(&mut stream, &request).await });
    }
    for answer in asking.join_all().await.into_iter().map(Result::unwrap) {
        assert!(answer.starts_with("HTTP/1.1 404") && answer.contains("connection: close"), "{answer}");
    }
    assert!(peak(&server) < 100, "{} MiB", peak(&server));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn calls_without_a_body_stay_within_the_memory_limit_and_do_not_count_as_in_flight() {
    let server =
        started("request_bytes: 8Mi, response_bytes: 8Mi, memory: 32Mi, in_flight: 512").await.unwrap();
    let mut greedy = Vec::new();
    for _ in 0..16 {
        greedy.push(called(&server, 1000).await.unwrap());
    }
    assert!(peak(&server) < 110, "{} MiB", peak(&server));
    assert_served(server.client()).await;
    drop(greedy);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn unread_answers_count_as_memory_and_slow_readers_are_disconnected() {
    let server = started("request_bytes: 8Mi, response_bytes: 8Mi, memory: 48Mi").await.unwrap();
    let request = large(7 * MIB);
    let mut slow = Vec::new();
    let mut refused = 0;
    for _ in 0..20 {
        let mut stream = connect(&server, "http.sock").await.unwrap();
        let answer = exchange(&mut stream, &request).await.unwrap();
        if answer.starts_with("HTTP/1.1 200") {
            slow.push(stream);
        } else {
            assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("limits.memory"), "{answer}");
            refused += 1;
        }
    }
    assert!(refused > 0 && slow.len() > 2, "{} requests were served", slow.len());
    assert_served(server.client()).await;
    // A client that reads 1 KiB per second makes progress, but is too slow.
    let begun = Instant::now();
    let mut pace = interval(Duration::from_secs(1));
    let mut room = [0; 1024];
    let mut answer = String::new();
    while begun.elapsed() < Duration::from_secs(45) && !answer.starts_with("HTTP/1.1 200") {
        answer = exchange(&mut connect(&server, "http.sock").await.unwrap(), &request).await.unwrap();
        pace.tick().await;
        for stream in &mut slow {
            // The server may have closed the connection, so the error is ignored.
            let _ = stream.try_read(&mut room);
        }
    }
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(begun.elapsed() > Duration::from_secs(10), "memory was free too early");
    assert!(peak(&server) < 250, "{} MiB", peak(&server));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_connection_with_many_requests_does_not_block_others() {
    let server = ServerUnderTest::start_ready(home("in_flight: 16", 200.0).unwrap()).await.unwrap();
    let (greedy, other) = (server.client(), server.client());
    // These requests open both connections before the load begins.
    assert_served(greedy.clone()).await;
    assert_served(other.clone()).await;
    let mut asking = JoinSet::new();
    for n in 0..60 {
        let client = greedy.clone();
        asking.spawn(async move { ask(client, "echo", &echo_case(n), 0.0).await });
    }
    let refused = asking.join_next().await.unwrap().unwrap();
    assert!(
        matches!(&refused, RequestOutcome::Failed(why) if why.contains("limits.in_flight")),
        "{refused:?}"
    );
    assert_served(other).await;
    let outcomes = asking.join_all().await;
    let right = outcomes.iter().filter(|outcome| **outcome == RequestOutcome::Right).count();
    assert!((7..=16).contains(&right), "{right}");
    // The server must have refused all of the sixty requests that it did not answer. The first
    // outcome, a refusal, is not in `outcomes`.
    let refused = outcomes.len() + 1 - right;
    let model = server.model("echo").await.unwrap();
    assert_eq!(model.requests.refused["host_full"], refused as u64, "{model:?}");
    assert!(model.slo.attainment.unwrap() < 0.5, "{model:?}");
    let socket = server.home().run_dir().join("metrics.sock");
    let metrics = shadowslice_tests::metrics::ask(&socket, "GET", "/metrics").await.unwrap().body;
    let counted = |line: &str| assert!(metrics.contains(line), "no {line} in {metrics}");
    counted(&format!("\nshadowslice_limit_refusals_total{{limit=\"in_flight\"}} {refused}\n"));
    counted(&format!("\nshadowslice_responses_total{{protocol=\"grpc\",code=\"14\"}} {refused}\n"));
    assert!(!metrics.contains("\nshadowslice_connections 0\n"), "{metrics}");
    server.wait_line(&["requests are refused because of a limit", "limits.in_flight"]).await.unwrap();
    server.stop().await.unwrap();
}

/// Sends a GET request over a new connection, and returns the beginning of the answer.
async fn got(server: &ServerUnderTest, socket: &str, path: &str) -> AnyResult<String> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
    exchange(&mut connect(server, socket).await?, request.as_bytes()).await
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
    assert!(matches!(ended, Ok(0) | Err(_)), "the connection that was idle for longest is closed");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_request_too_large_for_the_system_fails_alone() {
    let mut home = home("request_bytes: 2Gi, memory: 64Gi", 1.0).unwrap();
    let queue = std::fs::read_to_string(home.path().join("config.yaml")).unwrap();
    home.write("config.yaml", queue.replace("queue: {memory: 64Mi", "queue: {memory: 2Gi")).unwrap();
    confine(&mut home, 4096).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let mut stream = connect(&server, "grpc.sock").await.unwrap();
    stream.write_all(&endless_call()).await.unwrap();
    let mut said = Vec::new();
    while !has_answer(&said) {
        assert!(timeout(SOON, stream.read_buf(&mut said)).await.unwrap().unwrap() > 0, "{said:?}");
    }
    let answer =
        exchange(&mut connect(&server, "http.sock").await.unwrap(), post("echo", "", 2000 * MIB).as_bytes())
            .await
            .unwrap();
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("cannot allocate"), "{answer}");
    assert_served(server.client()).await;
    drop(stream);
    server.stop().await.unwrap();
}
