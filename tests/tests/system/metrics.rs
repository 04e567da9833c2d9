//! Tests of the metrics as a scraper reads them.

use std::time::Instant;

use nix::sys::signal::Signal;
use shadowslice_tests::cases::{ClientTensor, RequestCase};
use shadowslice_tests::home::{HarnessError, Home, left_behind};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::metrics::{Metrics, MetricsResponse, ask as http};
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::time::{Duration, interval};

use crate::fixtures::{ask, ask_all, echo, echo_case, profile};

/// Starts a server with one model, `echo`, and metrics on two sockets.
async fn scraped(execution_ms: f64, more: &str) -> Result<ServerUnderTest, HarnessError> {
    let home = Home::with_config(&format!(
        "listen:\n  http: [\"unix:http.sock\"]\n  grpc: [\"unix:grpc.sock\"]\n  metrics: [\"unix:metrics.sock\", \"unix:more.sock\"]\n\
         gpus: [{{device: emulated, sms: 132}}]\ncontroller: {{policy: static}}\nmodels:\n  - {}\n",
        echo("echo", &format!("profile: profile.yaml, {more}"))
    ))?;
    home.write("profile.yaml", profile(execution_ms))?;
    ServerUnderTest::start_ready(home).await
}

pub(crate) async fn scrape(server: &ServerUnderTest, socket: &str) -> Result<Metrics, String> {
    let answer = http(&server.home().run_dir().join(socket), "GET", "/metrics").await;
    let MetricsResponse { head, body } = answer.map_err(|error| error.to_string())?;
    let kind = "content-type: text/plain; version=0.0.4; charset=utf-8\r\n";
    if !head.starts_with("http/1.1 200 ") || !head.contains(kind) {
        return Err(head);
    }
    Metrics::parse(&body)
}

/// Waits until this number of answers has been counted. The supervisor counts an answer shortly
/// after the client has received it.
pub(crate) async fn counted(server: &ServerUnderTest, answers: u64) -> Result<(), HarnessError> {
    let all = |model: &ModelStatusJson| model.requests.succeeded == answers;
    server.wait_status("echo", "the ends of all requests", all).await.map(drop)
}

#[tokio::test]
async fn a_request_and_a_resize_move_the_counters() {
    let server = scraped(5.0, "share: {initial: 50%}").await.unwrap();
    let before = scrape(&server, "metrics.sock").await.unwrap();
    let value_of = |metrics: &Metrics, name, more| metrics.of("echo", name, more);
    for (name, more, value) in [
        ("model_ready", "", Some(1.0)),
        ("share_ratio", "", Some(0.5)),
        ("share_sms", "", Some(66.0)),
        ("workers", "", Some(1.0)),
        ("slo_latency_seconds", "", Some(0.2)),
        ("requests_total", ",outcome=\"succeeded\"", Some(0.0)),
        ("request_latency_seconds_count", "", Some(0.0)),
        ("handovers_total", ",outcome=\"completed\"", Some(0.0)),
        ("handover_effect_seconds_count", ",cause=\"hand\"", Some(0.0)),
    ] {
        assert_eq!(value_of(&before, name, more), value, "{name}{more}");
    }
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.resize("echo", 20).await.unwrap();
    assert_eq!(ask(server.client(), "echo", &echo_case(2), 0.0).await, RequestOutcome::Right);
    // The supervisor records the effect shortly after the client has received the answer.
    let effect =
        |model: &ModelStatusJson| model.handovers.last.as_ref().is_some_and(|last| last.effect_ms.is_some());
    server.wait_status("echo", "the hand-over's effect", effect).await.unwrap();
    counted(&server, 2).await.unwrap();
    for socket in ["metrics.sock", "more.sock"] {
        let after = scrape(&server, socket).await.unwrap();
        for (name, more, value) in [
            ("share_ratio", "", 0.2),
            ("share_sms", "", 26.0),
            ("requests_accepted_total", "", 2.0),
            ("requests_total", ",outcome=\"succeeded\"", 2.0),
            ("requests_total", ",outcome=\"failed\"", 0.0),
            ("batches_total", "", 2.0),
            ("request_latency_seconds_count", "", 2.0),
            ("request_latency_seconds_bucket", ",le=\"+Inf\"", 2.0),
            ("request_latency_seconds_bucket", ",le=\"0.002\"", 0.0),
            ("handovers_total", ",outcome=\"completed\"", 1.0),
            ("handovers_total", ",outcome=\"aborted\"", 0.0),
        ] {
            assert_eq!(value_of(&after, name, more), Some(value), "{name}{more}");
        }
        let sum = value_of(&after, "request_latency_seconds_sum", "").unwrap();
        assert!(sum >= 0.010, "two requests of 5 ms and more took {sum} s");
        let effect = value_of(&after, "handover_effect_seconds_sum", ",cause=\"hand\"");
        assert!(effect.is_some_and(|effect| effect > 0.0));
    }
    server.stop().await.unwrap();
}

/// Makes a request that has this number of rows.
fn rows(rows: u16) -> RequestCase {
    let tensor = |name| {
        ClientTensor::fp32(name, &[i64::from(rows), 16], &vec![f32::from(rows); 16 * usize::from(rows)])
    };
    RequestCase { inputs: vec![tensor("x")], outputs: vec![tensor("y")], truth: None }
}

#[tokio::test]
async fn sums_and_counts_match_the_requests_that_were_sent() {
    let server = scraped(5.0, "slo: 60s, share: {initial: 50%}, batch: {max: 16}, queue: {on_late: serve}")
        .await
        .unwrap();
    let sent: Vec<u16> = (0..40).map(|n| 1 + n % 5).collect();
    let all = f64::from(sent.iter().sum::<u16>());
    let outcomes = ask_all(&server.client(), "echo", sent.iter().copied().map(rows).collect(), 0.0).await;
    assert_eq!(outcomes, vec![RequestOutcome::Right; 40]);
    counted(&server, 40).await.unwrap();
    let metrics = scrape(&server, "metrics.sock").await.unwrap();
    let ours = |name: &str, more| metrics.of("echo", name, more).unwrap_or_else(|| panic!("no {name}{more}"));
    let batches = ours("batches_total", "");
    assert!((1.0..=40.0).contains(&batches), "{batches} batches");
    for name in ["batch_rows_count", "batch_execution_seconds_count"] {
        assert_eq!(ours(name, ""), batches, "{name}");
    }
    assert_eq!(ours("batch_rows_sum", ""), all);
    for name in ["queue_wait_seconds_count", "request_latency_seconds_count"] {
        assert_eq!(ours(name, ""), 40.0, "{name}");
    }
    let (latency, wait) = (ours("request_latency_seconds_sum", ""), ours("queue_wait_seconds_sum", ""));
    let execution = ours("batch_execution_seconds_sum", "");
    assert!(wait > 0.0 && wait < latency, "{wait} of {latency} s");
    assert!(execution >= 0.0049 * batches && execution <= latency, "{execution} of {latency} s");
    assert!(ours("slo_slack_ratio", "") < 1.0);

    let theirs = |name: &str, more: &str| {
        let series = format!("nv_inference_{name}{{model=\"echo\",version=\"1\"{more}}}");
        metrics.named(&series).unwrap_or_else(|| panic!("no {series}"))
    };
    for (name, value) in
        [("request_success", 40.0), ("count", all), ("exec_count", batches), ("pending_request_count", 0.0)]
    {
        assert_eq!(theirs(name, ""), value, "{name}");
    }
    for reason in ["REJECTED", "CANCELED", "BACKEND", "OTHER"] {
        assert_eq!(theirs("request_failure", &format!(",reason=\"{reason}\"")), 0.0, "{reason}");
    }
    let us = |part| theirs(&format!("{part}_duration_us"), "");
    let parts = us("queue") + us("compute_input") + us("compute_infer") + us("compute_output");
    let whole = us("request");
    // The sums in Triton's statistics exclude the times of receiving and writing.
    let (receiving, writing) =
        (ours("request_receive_seconds_sum", ""), ours("answer_write_seconds_sum", ""));
    let here = latency - receiving - writing;
    assert!((whole - here * 1e6).abs() < 2.0, "{whole} us, {latency} s less {receiving} and {writing}");
    assert!((parts - whole).abs() < 5.0, "{parts} of {whole} us");
    assert!(us("compute_infer") >= 40.0 * 4_900.0, "each request counts the whole of its batch");
    assert!(us("compute_input") > 0.0 && us("compute_output") > 0.0);
    let memory = |part| metrics.named(&format!("nv_cpu_memory_{part}_bytes")).unwrap();
    let (used, total) = (memory("used"), memory("total"));
    assert!(used > 0.0 && used < total, "{used} of {total} bytes");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn refused_requests_are_failures_in_triton_metrics() {
    let server = scraped(500.0, "batch: {max: 1}, queue: {max_requests: 1, on_late: serve}").await.unwrap();
    let outcomes = ask_all(&server.client(), "echo", (0..8).map(echo_case).collect(), 0.0).await;
    let right = outcomes.iter().filter(|outcome| **outcome == RequestOutcome::Right).count();
    assert!((1..8).contains(&right), "{outcomes:?}");
    let metrics = scrape(&server, "metrics.sock").await.unwrap();
    let refused = (8 - right) as f64;
    assert_eq!(metrics.of("echo", "requests_refused_total", ",reason=\"queue_full\""), Some(refused));
    let failure = "nv_inference_request_failure{model=\"echo\",version=\"1\",reason=\"REJECTED\"}";
    assert_eq!(metrics.named(failure), Some(refused));
    assert_eq!(metrics.named("nv_inference_count{model=\"echo\",version=\"1\"}"), Some(right as f64));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_emulated_gpu_has_no_memory_metrics() {
    let server = scraped(5.0, "share: {initial: 50%}").await.unwrap();
    let status = server.status().await.unwrap();
    let gpus: Vec<_> = status.gpus.iter().map(|gpu| (gpu.index, gpu.device.as_str(), &gpu.nvml)).collect();
    assert_eq!(gpus, [(0, "emulated", &None)]);
    assert_eq!(status.models[0].workers[0].memory_mib, None);
    let answer = http(&server.home().run_dir().join("metrics.sock"), "GET", "/metrics").await.unwrap();
    let is_gpu_metric = |line: &&str| {
        let starts = ["shadowslice_gpu_", "nv_gpu_", "nv_energy_"].iter().any(|name| line.starts_with(name));
        let needs_nvml = starts && !line.starts_with("shadowslice_gpu_sm_seconds_total{");
        needs_nvml || line.contains("gpu_memory_bytes{")
    };
    assert_eq!(answer.body.lines().find(is_gpu_metric), None);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_killed_worker_is_counted() {
    let server = scraped(5.0, "share: {initial: 50%}").await.unwrap();
    let pid = server.model("echo").await.unwrap().workers[0].pid;
    let worker = server.children().into_iter().find(|child| child.pid == pid).unwrap();
    worker.signal(Signal::SIGKILL).unwrap();
    server
        .wait_status("echo", "another worker", |model| {
            model.state == "ready" && model.workers.iter().all(|worker| worker.pid != pid)
        })
        .await
        .unwrap();
    let after = scrape(&server, "metrics.sock").await.unwrap();
    assert_eq!(after.of("echo", "worker_deaths_total", ""), Some(1.0));
    assert_eq!(after.of("echo", "worker_restarts_total", ""), Some(1.0));
    assert_eq!(after.of("echo", "model_ready", ""), Some(1.0));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_metrics_listener_serves_only_metrics() {
    let server = scraped(5.0, "share: {initial: 50%}").await.unwrap();
    let socket = server.home().run_dir().join("metrics.sock");
    for (method, path, status) in [
        ("GET", "/index.html", 404),
        ("POST", "/", 405),
        ("GET", "/v2/health/live", 404),
        ("POST", "/v2/models/echo/infer", 404),
        ("POST", "/metrics", 405),
        ("PUT", "/metrics", 405),
    ] {
        let answer = http(&socket, method, path).await.unwrap();
        assert!(answer.head.starts_with(&format!("http/1.1 {status} ")), "{method} {path}: {}", answer.head);
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn metrics_are_served_while_the_last_requests_are_answered() {
    let mut server = scraped(2000.0, "batch: {max: 1}, queue: {on_late: serve}").await.unwrap();
    let children = server.children();
    let client = server.client();
    let asking =
        tokio::spawn(async move { ask_all(&client, "echo", (0..2).map(echo_case).collect(), 0.0).await });
    server.wait_status("echo", "2 requests accepted", |model| model.requests.accepted == 2).await.unwrap();
    server.signal(Signal::SIGTERM).unwrap();
    let grpc_socket = server.home().run_dir().join("grpc.sock");
    let mut tick = interval(Duration::from_millis(10));
    while grpc_socket.try_exists().unwrap() {
        tick.tick().await;
    }
    let draining = scrape(&server, "metrics.sock").await.unwrap();
    let of = |name| draining.of("echo", name, "").unwrap();
    assert!(of("queue_requests") + of("in_flight_requests") >= 1.0, "all requests were answered already");
    assert!(server.wait_exit().await.unwrap().success(), "{}", server.log());
    assert_eq!(asking.await.unwrap(), vec![RequestOutcome::Right; 2]);
    assert_eq!(left_behind(server.home(), &children), Vec::<String>::new());
}

/// Checks the metrics of five requests of 5 ms each. One request took longer than `seconds` to
/// arrive.
fn assert_latency_includes_receiving(metrics: &Metrics, seconds: f64) {
    let ours = |name: &str| metrics.of("echo", name, "");
    assert_eq!(
        (ours("request_receive_seconds_count"), ours("requests_within_slo_total")),
        (Some(5.0), Some(5.0))
    );
    assert!(ours("request_receive_seconds_sum").is_some_and(|sum| sum >= seconds));
    assert!(ours("request_latency_seconds_sum").is_some_and(|sum| sum >= 0.025 + seconds));
}

#[tokio::test]
async fn latency_begins_with_the_head_of_a_slow_http_request() {
    let server = scraped(5.0, "slo: 60s, share: {initial: 50%}").await.unwrap();
    let body =
        format!(r#"{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,16],"data":{:?}}}]}}"#, [1.5; 16]);
    let length = body.len();
    let head = format!(
        "POST /v2/models/echo/infer HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\n\
         content-length: {length}\r\n\r\n"
    );
    let mut slow = UnixStream::connect(server.home().run_dir().join("http.sock")).await.unwrap();
    slow.write_all(head.as_bytes()).await.unwrap();
    let mut interim = [0; 25];
    slow.read_exact(&mut interim).await.unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    let begun = Instant::now();
    for n in 0..4 {
        assert_eq!(ask(server.client(), "echo", &echo_case(n), 0.0).await, RequestOutcome::Right);
    }
    let between = begun.elapsed().as_secs_f64();
    slow.write_all(body.as_bytes()).await.unwrap();
    let mut answer = String::new();
    slow.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    counted(&server, 5).await.unwrap();
    assert_latency_includes_receiving(&scrape(&server, "metrics.sock").await.unwrap(), between);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn latency_begins_with_the_head_of_a_slow_grpc_request() {
    let server = scraped(5.0, "slo: 60s, share: {initial: 50%}").await.unwrap();
    let client = server.client();
    let (head_tx, head_rx) = oneshot::channel();
    let (body_tx, body_rx) = oneshot::channel();
    let slow = tokio::spawn({
        let client = client.clone();
        let delay = async move {
            head_tx.send(()).unwrap();
            body_rx.await.unwrap();
        };
        async move { client.infer_with_late_body("echo", &echo_case(4).inputs, delay).await }
    });
    head_rx.await.unwrap();
    // The other requests use the same connection. Their answers therefore show that the server has
    // read the headers of the first request.
    assert_eq!(ask(client.clone(), "echo", &echo_case(0), 0.0).await, RequestOutcome::Right);
    let begun = Instant::now();
    for n in 1..4 {
        assert_eq!(ask(client.clone(), "echo", &echo_case(n), 0.0).await, RequestOutcome::Right);
    }
    let between = begun.elapsed().as_secs_f64();
    body_tx.send(()).unwrap();
    assert_eq!(slow.await.unwrap().unwrap().len(), 1);
    counted(&server, 5).await.unwrap();
    assert_latency_includes_receiving(&scrape(&server, "metrics.sock").await.unwrap(), between);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_sm_time_of_all_models_is_what_their_batches_had_of_the_gpu() {
    let gpus = "gpus: [{device: emulated, sms: 132}]\ncontroller: {policy: static}\nready: all\n";
    let listen = "listen: {http: [\"unix:http.sock\"], grpc: [\"unix:grpc.sock\"], metrics: [\"unix:metrics.sock\"]}\n";
    let models = ["echo", "other", "idle"]
        .map(|name| echo(name, "profile: profile.yaml, share: {initial: 100%}, batch: {max: 1}, slo: 10s"));
    let models: String = models.iter().map(|model| format!("  - {model}\n")).collect();
    let home = Home::with_config(&format!("{listen}{gpus}models:\n{models}")).unwrap();
    home.write("profile.yaml", profile(20.0)).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let client = server.client();
    let cases = |count: u16| (0..count).map(echo_case).collect();
    let all_right =
        |outcomes: &[RequestOutcome]| outcomes.iter().all(|outcome| *outcome == RequestOutcome::Right);
    assert!(all_right(&ask_all(&client, "echo", cases(5), 0.0).await));
    counted(&server, 5).await.unwrap();
    let alone = scrape(&server, "metrics.sock").await.unwrap();
    let used = |metrics: &Metrics, model| metrics.of(model, "model_sm_seconds_total", "").unwrap();
    let executed = alone.of("echo", "batch_execution_seconds_sum", "").unwrap();
    assert!(used(&alone, "echo") >= 132.0 * executed, "alone, a batch has all SMs: {executed} s");
    assert_eq!((used(&alone, "other"), used(&alone, "idle")), (0.0, 0.0));
    let other = ask_all(&client, "other", cases(20), 0.0);
    let (one, other) = tokio::join!(ask_all(&client, "echo", cases(20), 0.0), other);
    assert!(all_right(&one) && all_right(&other));
    let after = scrape(&server, "metrics.sock").await.unwrap();
    let all: f64 = ["echo", "other", "idle"].iter().map(|model| used(&after, model)).sum();
    let gpu = after.named("shadowslice_gpu_sm_seconds_total{gpu=\"0\"}").unwrap();
    assert!(all > used(&alone, "echo") && all <= gpu, "{all} of {gpu}");
    assert_eq!(after.of("echo", "model_energy_joules_total", ""), None, "an emulated GPU uses no energy");
    server.stop().await.unwrap();
}
