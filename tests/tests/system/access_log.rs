//! Tests of the access log. The log must have one line for each answered request, a rotation must
//! lose no line, and no request may wait for the log.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed helper fails the test")]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use serde_json::{Value, json};
use shadowslice_tests::home::{DEFAULT_TIMEOUT, Home};
use shadowslice_tests::metrics::{self, Metrics};
use shadowslice_tests::server::ServerUnderTest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::Code;

use crate::fixtures::{echo, echo_case, profile};

const CONFIG: &str =
    "listen: {http: [\"unix:http.sock\"], grpc: [\"unix:grpc.sock\"], metrics: [\"unix:metrics.sock\"]}
gpus: [{device: emulated, sms: 132}]
controller: {policy: static}
access_log: access.log
";

/// Starts a server with two models: a fast one, and a slow one whose queue holds one request.
async fn logging(prepare: impl FnOnce(&Home)) -> ServerUnderTest {
    let model = echo("echo", "profile: profile.yaml, share: {initial: 50%}");
    let full = echo("full", "profile: slow.yaml, share: {initial: 50%}, queue: {max_requests: 1}");
    let ours = Home::with_config(&format!("{CONFIG}models:\n  - {model}\n  - {full}\n")).unwrap();
    ours.write("profile.yaml", profile(2.0)).unwrap();
    ours.write("slow.yaml", profile(50.0)).unwrap();
    prepare(&ours);
    ServerUnderTest::start_ready(ours).await.unwrap()
}

/// Sends these bytes over an HTTP connection, and reads until the connection closes.
async fn http(server: &ServerUnderTest, request: impl AsRef<[u8]>) -> io::Result<String> {
    let mut stream = UnixStream::connect(server.home().run_dir().join("http.sock")).await?;
    let (mut from, mut to) = stream.split();
    let mut answer = String::new();
    let (sent, read) = tokio::join!(to.write_all(request.as_ref()), from.read_to_string(&mut answer));
    sent.and(read.map(|_| answer))
}

fn inference(model: &str, id: &str, headers: &str) -> String {
    let values = ["1"; 16].join(",");
    let body = format!(
        r#"{{{id}"inputs": [{{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [{values}]}}]}}"#
    );
    format!(
        "POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn lines(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|why| panic!("{why}: {line}")))
        .collect()
}

/// Waits for a line that meets the condition `wanted`, and returns that line.
async fn line(file: &Path, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let until = Instant::now() + DEFAULT_TIMEOUT;
    loop {
        let lines = lines(file);
        if let Some(line) = lines.iter().find(|line| wanted(line)) {
            return line.clone();
        }
        assert!(Instant::now() < until, "no line for {what} in {lines:#?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn has(line: &Value, fields: &[(&str, Value)]) {
    for (field, value) in fields {
        assert_eq!(&line[*field], value, "{field} of {line:#}");
    }
}

fn file(server: &ServerUnderTest) -> PathBuf {
    server.home().path().join("access.log")
}

#[tokio::test]
async fn each_request_over_http_is_a_line() {
    let server = logging(|_| {}).await;
    let file = file(&server);
    let request = inference("echo", r#""id": "own","#, "x-request-id: proxy\r\n");
    let answer = http(&server, &request).await.unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    let own = line(&file, "the id", |line| line["request_id"] == "own").await;
    has(
        &own,
        &[
            ("protocol", "http".into()),
            ("method", "POST".into()),
            ("path", "/v2/models/echo/infer".into()),
            ("model", "echo".into()),
            ("code", 200.into()),
            ("reason", Value::Null),
            ("error", Value::Null),
            ("bytes_in", request.split_once("\r\n\r\n").unwrap().1.len().into()),
            ("bytes_out", body.len().into()),
            ("uid", nix::unistd::geteuid().as_raw().into()),
            ("pid", std::process::id().into()),
            ("address", Value::Null),
            ("client", Value::Null),
        ],
    );
    let latency = own["latency_ms"].as_f64().unwrap();
    assert!((2.0..60_000.0).contains(&latency), "{latency}");
    assert!(own["time"].as_str().unwrap().ends_with('Z'), "{own}");
    http(&server, inference("nobody", "", "x-request-id: proxy\r\n")).await.unwrap();
    let unknown = line(&file, "an unknown model", |line| line["request_id"] == "proxy").await;
    let why = "Request for unknown model: 'nobody' is not found";
    has(&unknown, &[("code", 404.into()), ("model", Value::Null), ("error", why.into())]);
    http(&server, b"HEAD /v2 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let head = line(&file, "HEAD", |line| line["method"] == "HEAD").await;
    has(&head, &[("code", 200.into()), ("reason", Value::Null), ("bytes_out", 0.into())]);
}

#[tokio::test]
async fn the_lines_of_refused_and_cancelled_requests_have_the_reason() {
    let server = logging(|_| {}).await;
    let file = file(&server);
    // One request executes and one waits, so the queue is full for all other requests.
    let asking = (0..6).map(|_| http(&server, inference("full", "", "")));
    let asking: Vec<io::Result<String>> = join_all(asking).await;
    assert!(asking.iter().flatten().any(|answer| answer.starts_with("HTTP/1.1 503")), "{asking:?}");
    let full = line(&file, "a full queue", |line| line["code"] == 503).await;
    has(&full, &[("model", "full".into()), ("reason", "queue_full".into())]);
    let mut leaver = UnixStream::connect(server.home().run_dir().join("http.sock")).await.unwrap();
    leaver.write_all(inference("full", "", "x-request-id: left\r\n").as_bytes()).await.unwrap();
    drop(leaver);
    let left = line(&file, "a client that left", |line| line["request_id"] == "left").await;
    has(&left, &[("code", 499.into()), ("reason", "client_left".into())]);
}

#[tokio::test]
async fn calls_over_grpc_and_the_requests_of_a_stream_are_lines() {
    let server = logging(|_| {}).await;
    let (file, inputs) = (file(&server), echo_case(1).inputs);
    let mut client = server.client();
    client.infer_with("echo", &inputs, &[("x-request-id", "one")]).await.unwrap();
    let one = line(&file, "a call", |line| line["request_id"] == "one").await;
    let path = json!("/inference.GRPCInferenceService/ModelInfer");
    has(&one, &[("protocol", "grpc".into()), ("path", path), ("model", "echo".into()), ("code", 0.into())]);
    has(&one, &[("reason", Value::Null), ("error", Value::Null)]);
    let bytes = |line: &Value, field: &str| line[field].as_u64().unwrap();
    assert!(bytes(&one, "bytes_in") > 64 && bytes(&one, "bytes_out") > 64, "{one}");
    let refused = client.infer_with("nobody", &inputs, &[("x-request-id", "two")]).await.unwrap_err();
    let two = line(&file, "a refused call", |line| line["request_id"] == "two").await;
    has(&two, &[("code", (Code::NotFound as i32).into()), ("error", refused.message().into())]);
    let errors = client.infer_in_stream(&[("echo", &inputs), ("nobody", &inputs)]).await.unwrap();
    assert!(errors[0].is_empty() && errors[1].contains("unknown model"), "{errors:?}");
    let first = line(&file, "a stream's first request", |line| line["request_id"] == "0").await;
    has(&first, &[("model", "echo".into()), ("code", 0.into()), ("reason", Value::Null)]);
    assert!(bytes(&first, "bytes_in") > 64 && bytes(&first, "bytes_out") > 64, "{first}");
    let second = line(&file, "its second request", |line| line["error"] == errors[1].as_str()).await;
    has(&second, &[("code", (Code::NotFound as i32).into()), ("reason", Value::Null)]);
    let is_call = |line: &Value| {
        line["path"] == "/inference.GRPCInferenceService/ModelStreamInfer"
            && line["model"].is_null()
            && line["error"].is_null()
    };
    has(&line(&file, "the call", is_call).await, &[("code", 0.into()), ("reason", Value::Null)]);
}

#[tokio::test]
async fn a_rotation_loses_no_line() {
    let mut server = logging(|_| {}).await;
    let (file, folder) = (file(&server), server.home().path().to_owned());
    let ask = async |id: &str| {
        let request = inference("echo", "", &format!("x-request-id: {id}\r\n"));
        assert!(http(&server, request).await.unwrap().starts_with("HTTP/1.1 200"));
    };
    ask("before").await;
    line(&file, "the first request", |line| line["request_id"] == "before").await;
    // After SIGHUP, the supervisor writes the next line to the new file.
    fs::rename(&file, folder.join("1")).unwrap();
    server.signal(Signal::SIGHUP).unwrap();
    server.wait_line(&["configuration reloaded"]).await.unwrap();
    ask("signalled").await;
    line(&file, "the second request", |line| line["request_id"] == "signalled").await;
    // Without a signal, the supervisor detects the new file after a short time.
    fs::rename(&file, folder.join("2")).unwrap();
    let until = Instant::now() + DEFAULT_TIMEOUT;
    let mut requests = 0;
    while !file.try_exists().unwrap() {
        assert!(Instant::now() < until, "the file was not reopened");
        ask(&requests.to_string()).await;
        requests += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The supervisor writes all queued lines before it exits.
    server.signal(Signal::SIGTERM).unwrap();
    server.wait_gone(server.process()).await.unwrap();
    let all = ["1", "2", "access.log"].map(|name| lines(&folder.join(name))).concat();
    let ids = all.iter().filter(|line| line["model"] == "echo");
    let ids: Vec<_> = ids.filter_map(|line| line["request_id"].as_str()).collect();
    let numbers: Vec<_> = (0..requests).map(|number| number.to_string()).collect();
    let expected = ["before", "signalled"].into_iter().chain(numbers.iter().map(String::as_str));
    assert_eq!(ids, expected.collect::<Vec<_>>());
}

/// The number of lines, which exceeds the total capacity of the queue, the writer and a pipe.
const MANY: usize = 12_000;

#[tokio::test]
async fn requests_do_not_wait_for_a_reader_that_stopped() {
    let mut server = logging(|home| {
        nix::unistd::mkfifo(&home.path().join("access.log"), Mode::S_IRWXU).unwrap();
        let reader = fs::OpenOptions::new().read(true).write(true).open(home.path().join("access.log"));
        // The pipe stays open during the test, and no process reads from it.
        std::mem::forget(reader.unwrap());
    })
    .await;
    let live = "GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n".repeat(MANY);
    let last = "GET /v2/health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let answers = timeout(DEFAULT_TIMEOUT, http(&server, live + last)).await.unwrap().unwrap();
    assert_eq!(answers.matches("HTTP/1.1 200").count(), MANY + 1);
    let socket = server.home().run_dir().join("metrics.sock");
    let metrics = metrics::ask(&socket, "GET", "/metrics").await.unwrap();
    let metrics = Metrics::parse(&metrics.body).unwrap();
    let dropped = metrics.named("shadowslice_access_log_lines_dropped_total{reason=\"queue_full\"}").unwrap();
    assert!(dropped > 100.0, "{dropped}");
    server.signal(Signal::SIGTERM).unwrap();
    server.wait_gone(server.process()).await.unwrap();
}

#[tokio::test]
async fn a_file_that_cannot_be_opened_fails_the_start_and_the_check() {
    let yaml = format!("{CONFIG}models:\n  - {}\n", echo("echo", "priority: 1"));
    let home = Home::with_config(&yaml.replace("access.log", "absent/access.log")).unwrap();
    let checked = home.run(&["check", "config.yaml"]).await.unwrap();
    let said = String::from_utf8(checked.stderr).unwrap();
    assert!(said.contains("access_log: on this host the folder"), "{said}");
    let served = home.run(&["serve", "config.yaml"]).await.unwrap();
    assert!(!served.status.success());
    let said = String::from_utf8(served.stderr).unwrap();
    assert!(said.contains("cannot open the access log") && said.contains("No such file"), "{said}");
}
