//! Metrics, as a scraper finds them.

use nix::sys::signal::Signal;
use shadowslice_tests::home::{Error, Home, left_behind};
use shadowslice_tests::load::Outcome;
use shadowslice_tests::metrics::{Answer, Metrics, ask as http};
use shadowslice_tests::server::Server;
use tokio::time::{Duration, interval};

use crate::scene::{ask, ask_all, echo, echo_case, profile};

/// One ready model, `echo`, and metrics on two sockets.
async fn scraped(execution_ms: f64, more: &str) -> Result<Server, Error> {
    let home = Home::with_config(&format!(
        "listen:\n  http: []\n  grpc: [\"unix:grpc.sock\"]\n  metrics: [\"unix:metrics.sock\", \"unix:more.sock\"]\n\
         gpus: [{{device: emulated, sms: 132}}]\ncontroller: {{policy: static}}\nmodels:\n  - {}\n",
        echo("echo", &format!("profile: profile.yaml, {more}"))
    ))?;
    home.write("profile.yaml", profile(execution_ms))?;
    Server::ready(home).await
}

async fn scrape(server: &Server, socket: &str) -> Result<Metrics, String> {
    let answer = http(&server.home().run_dir().join(socket), "GET", "/metrics").await;
    let Answer { head, body } = answer.map_err(|error| error.to_string())?;
    let kind = "content-type: text/plain; version=0.0.4; charset=utf-8\r\n";
    if !head.starts_with("http/1.1 200 ") || !head.contains(kind) {
        return Err(head);
    }
    Metrics::parse(&body)
}

#[tokio::test]
async fn a_request_and_a_resize_move_the_counters() {
    let server = scraped(5.0, "share: {initial: 50%}").await.unwrap();
    let before = scrape(&server, "metrics.sock").await.unwrap();
    let told = |metrics: &Metrics, name, more| metrics.of("echo", name, more);
    for (name, more, value) in [
        ("model_ready", "", Some(1.0)),
        ("share_ratio", "", Some(0.5)),
        ("share_sms", "", Some(66.0)),
        ("workers", "", Some(1.0)),
        ("slo_latency_seconds", "", Some(0.2)),
        ("requests_total", ",outcome=\"succeeded\"", Some(0.0)),
        ("request_latency_seconds_count", "", Some(0.0)),
        ("handovers_total", ",outcome=\"completed\"", Some(0.0)),
        ("handover_last_stall_seconds", "", None),
    ] {
        assert_eq!(told(&before, name, more), value, "{name}{more}");
    }
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, Outcome::Right);
    server.resize("echo", 20).await.unwrap();
    assert_eq!(ask(server.client(), "echo", &echo_case(2), 0.0).await, Outcome::Right);
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
            ("request_latency_seconds_bucket", ",le=\"0.003\"", 0.0),
            ("handovers_total", ",outcome=\"completed\"", 1.0),
            ("handovers_total", ",outcome=\"aborted\"", 0.0),
        ] {
            assert_eq!(told(&after, name, more), Some(value), "{name}{more}");
        }
        let sum = told(&after, "request_latency_seconds_sum", "").unwrap();
        assert!(sum >= 0.010, "two requests of 5 ms and more took {sum} s");
        assert!(told(&after, "handover_last_effect_seconds", "").is_some_and(|effect| effect > 0.0));
        assert!(told(&after, "handover_last_stall_seconds", "").is_some_and(|stall| stall >= 0.0));
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_emulated_gpu_has_no_memory_to_tell_of() {
    let server = scraped(5.0, "share: {initial: 50%}").await.unwrap();
    let status = server.status().await.unwrap();
    let gpus: Vec<_> = status.gpus.iter().map(|gpu| (gpu.index, gpu.device.as_str(), &gpu.nvml)).collect();
    assert_eq!(gpus, [(0, "emulated", &None)]);
    assert_eq!(status.models[0].workers[0].memory_mib, None);
    let answer = http(&server.home().run_dir().join("metrics.sock"), "GET", "/metrics").await.unwrap();
    let told = |line: &&str| line.starts_with("shadowslice_gpu_") || line.contains("gpu_memory_bytes{");
    assert_eq!(answer.body.lines().find(told), None);
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
    assert_eq!(after.of("echo", "model_ready", ""), Some(1.0));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn only_the_metrics_are_there() {
    let server = scraped(5.0, "share: {initial: 50%}").await.unwrap();
    let socket = server.home().run_dir().join("metrics.sock");
    for (method, path, status) in [
        ("GET", "/", 404),
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
async fn metrics_are_told_while_the_last_requests_are_answered() {
    let mut server = scraped(2000.0, "batch: {max: 1}, queue: {on_late: serve}").await.unwrap();
    let children = server.children();
    let client = server.client();
    let asking =
        tokio::spawn(async move { ask_all(&client, "echo", (0..2).map(echo_case).collect(), 0.0).await });
    server.wait_status("echo", "2 requests accepted", |model| model.requests.accepted == 2).await.unwrap();
    server.signal(Signal::SIGTERM).unwrap();
    let door = server.home().run_dir().join("grpc.sock");
    let mut look = interval(Duration::from_millis(10));
    while door.try_exists().unwrap() {
        look.tick().await;
    }
    let draining = scrape(&server, "metrics.sock").await.unwrap();
    let of = |name| draining.of("echo", name, "").unwrap();
    assert!(of("queue_requests") + of("in_flight_requests") >= 1.0, "all was answered already");
    assert!(server.ended().await.unwrap().success(), "{}", server.log());
    assert_eq!(asking.await.unwrap(), vec![Outcome::Right; 2]);
    assert_eq!(left_behind(server.home(), &children), Vec::<String>::new());
}
