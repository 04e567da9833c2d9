//! Tests of traced requests. A collector must receive their spans, and no request may wait for the
//! collector.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use shadowslice_tests::home::{DEFAULT_TIMEOUT, HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::metrics::{self, Metrics};
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UnixStream};
use tokio::time::timeout;
use tonic::{Code, Status};

use crate::collector::{Collector, attribute, hex, named};
use crate::fixtures::{ask, ask_all, echo, echo_case, profile};

const SETTINGS: &str = "share: {initial: 50%}, queue: {on_late: serve}";

/// Starts a server with one model that takes `execution_ms` per batch, and sends traces to a collector.
async fn traced(
    execution_ms: f64,
    sample: &str,
    collector: SocketAddr,
    settings: &str,
) -> Result<ServerUnderTest, HarnessError> {
    let model = echo("echo", &format!("profile: profile.yaml, {settings}"));
    let yaml = format!(
        "listen: {{http: [\"unix:http.sock\"], grpc: [\"unix:grpc.sock\"], metrics: [\"unix:metrics.sock\"]}}\n\
         gpus: [{{device: emulated, sms: 132}}]\n\
         controller: {{policy: static}}\n\
         tracing: {{otlp: \"http://{collector}\", sample: {sample}, service: test}}\n\
         models:\n  - {model}\n"
    );
    let home = Home::with_config(&yaml)?;
    home.write("profile.yaml", profile(execution_ms))?;
    ServerUnderTest::start_ready(home).await
}

/// Returns a `traceparent` header of the n-th trace.
fn parent(n: u32, flags: &str) -> String {
    format!("00-{}-00000000000000aa-{flags}", trace(n))
}

fn trace(n: u32) -> String {
    format!("4bf92f3577b34da6a3ce929d{n:08x}")
}

/// Sends a request over HTTP with these headers, and returns the complete answer.
async fn post(server: &ServerUnderTest, model: &str, headers: &[(&str, &str)]) -> io::Result<String> {
    let values = ["1"; 16].join(",");
    let tensor = format!(r#"{{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [{values}]}}"#);
    let body = format!(r#"{{"inputs": [{tensor}]}}"#);
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let request = format!(
        "POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = UnixStream::connect(server.home().run_dir().join("http.sock")).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    timeout(DEFAULT_TIMEOUT, stream.read_to_string(&mut answer)).await??;
    Ok(answer)
}

/// Sends a request to `echo` over gRPC with this `traceparent`.
async fn call(server: &ServerUnderTest, traceparent: &str) -> Result<(), Status> {
    let metadata = [("traceparent", traceparent), ("tracestate", "vendor=1")];
    server.client().infer_with("echo", &echo_case(1).inputs, &metadata).await.map(drop)
}

/// Returns the span that covers the whole request.
fn own(spans: &[Span]) -> &Span {
    let own = named(spans, "inference");
    assert_eq!(own.len(), 1, "{spans:#?}");
    own[0]
}

async fn spans_counted(server: &ServerUnderTest, outcome: &str) -> io::Result<f64> {
    let socket = server.home().run_dir().join("metrics.sock");
    let answer = metrics::ask(&socket, "GET", "/metrics").await?;
    let metrics = Metrics::parse(&answer.body).map_err(io::Error::other)?;
    let counted = metrics.named(&format!("shadowslice_trace_spans_total{{outcome=\"{outcome}\"}}"));
    counted.ok_or_else(|| io::Error::other("the metrics have no counter of spans"))
}

/// Waits until at least this number of spans have this outcome.
async fn until_counted(server: &ServerUnderTest, outcome: &str, least: f64) -> io::Result<()> {
    let counting = async {
        while spans_counted(server, outcome).await? < least {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    };
    timeout(DEFAULT_TIMEOUT, counting).await?
}

#[tokio::test]
async fn a_request_has_a_span_in_its_callers_trace_over_both_protocols() {
    let collector = Collector::start().await.unwrap();
    let server = traced(5.0, "0%", collector.address, SETTINGS).await.unwrap();
    let state = [("tracestate", "a=1"), ("tracestate", "b=2")];
    let answer = post(&server, "echo", &[&[("traceparent", parent(1, "01").as_str())][..], &state].concat())
        .await
        .unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let head = answer.split("\r\n\r\n").next().unwrap().to_lowercase();
    assert!(!head.contains("trace"), "the answer has no tracing header: {head}");
    call(&server, &parent(2, "01")).await.unwrap();
    for (n, protocol, state, status) in [
        (1, "http", "a=1,b=2", ("http.response.status_code", "200")),
        (2, "grpc", "vendor=1", ("rpc.grpc.status_code", "0")),
    ] {
        let spans = collector.trace(&trace(n)).await.unwrap();
        let own = own(&spans);
        assert_eq!((own.kind, own.flags & 0xff), (SpanKind::Server.into(), 1));
        assert_eq!(
            (hex(&own.parent_span_id).as_str(), own.trace_state.as_str()),
            ("00000000000000aa", state)
        );
        for (key, value) in [
            status,
            ("shadowslice.protocol", protocol),
            ("shadowslice.model.name", "echo"),
            ("shadowslice.model.version", "1"),
            ("shadowslice.rows", "1"),
            ("shadowslice.retries", "0"),
        ] {
            assert_eq!(attribute(own, key).as_deref(), Some(value), "{key}");
        }
        let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["inference", "queue", "batch", "execution"]);
        let [_, queue, batch, execution] = &spans[..] else { panic!() };
        assert_eq!((&queue.parent_span_id, &batch.parent_span_id), (&own.span_id, &own.span_id));
        assert_eq!(execution.parent_span_id, batch.span_id);
        for (key, value) in [
            ("shadowslice.batch.rows", "1"),
            ("shadowslice.share_percent", "50"),
            ("shadowslice.sms", "66"),
            ("shadowslice.device", "emulated"),
            ("shadowslice.batch.outcome", "answered"),
        ] {
            assert_eq!(attribute(batch, key).as_deref(), Some(value), "{key}");
        }
        assert_in_order([own, queue, batch, execution]);
        let took = Duration::from_nanos(execution.end_time_unix_nano - execution.start_time_unix_nano);
        assert!(took >= Duration::from_millis(5), "the profile says 5 ms: {took:?}");
    }
    assert_eq!(collector.resource("service.name").as_deref(), Some("test"));
    // Spans are counted when the collector's answer arrives.
    until_counted(&server, "exported", 8.0).await.unwrap();
    assert_eq!(spans_counted(&server, "exported").await.unwrap(), 8.0);
    server.stop().await.unwrap();
}

/// Checks that spans contain their child spans, that the child spans do not overlap, and that the
/// times are recent.
fn assert_in_order([own, queue, batch, execution]: [&Span; 4]) {
    let times = [
        own.start_time_unix_nano,
        queue.start_time_unix_nano,
        queue.end_time_unix_nano,
        batch.start_time_unix_nano,
        execution.start_time_unix_nano,
        execution.end_time_unix_nano,
        batch.end_time_unix_nano,
        own.end_time_unix_nano,
    ];
    assert!(times.is_sorted(), "{times:?}");
    let now =
        std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap_or_default();
    let age = now.saturating_sub(Duration::from_nanos(times[0]));
    assert!(age < Duration::from_secs(60) && now >= Duration::from_nanos(times[7]), "{age:?}");
}

#[tokio::test]
async fn the_parent_decides_on_sampling_and_without_one_the_ratio() {
    let collector = Collector::start().await.unwrap();
    for (sample, expected) in [("100%", 4), ("0%", 0)] {
        let server = traced(1.0, sample, collector.address, SETTINGS).await.unwrap();
        let before = collector.spans().len();
        call(&server, &parent(3, "00")).await.unwrap();
        post(&server, "echo", &[("traceparent", &parent(4, "00"))]).await.unwrap();
        let malformed = [
            "00-xyz",
            &parent(5, "01").to_uppercase(),
            &parent(6, "01")[..54],
            &format!("{}-0", parent(7, "01")),
        ];
        for header in malformed {
            post(&server, "echo", &[("traceparent", header), ("tracestate", "a=1")]).await.unwrap();
        }
        // Traced requests arrive at the collector in the order in which the requests ended.
        let last = parent(if expected > 0 { 8 } else { 9 }, "01");
        call(&server, &last).await.unwrap();
        collector.trace(&last[3..35]).await.unwrap();
        let spans = collector.spans().split_off(before);
        let own = named(&spans, "inference");
        let begun: Vec<_> = own.iter().filter(|span| hex(&span.trace_id) != last[3..35]).collect();
        assert_eq!(begun.len(), expected, "{sample}");
        for span in begun {
            assert!(span.parent_span_id.is_empty() && span.trace_state.is_empty(), "{span:?}");
            assert!(!hex(&span.trace_id).starts_with(&trace(0)[..24]), "a new trace");
        }
        server.stop().await.unwrap();
    }
}

#[tokio::test]
async fn a_reload_changes_the_sampling_ratio() {
    let collector = Collector::start().await.unwrap();
    let server = traced(1.0, "0%", collector.address, SETTINGS).await.unwrap();
    post(&server, "echo", &[]).await.unwrap();
    let config = server.home().path().join("config.yaml");
    let yaml = std::fs::read_to_string(&config).unwrap();
    server.home().write("config.yaml", yaml.replace("sample: 0%", "sample: 100%")).unwrap();
    let said = server.command_output(&["reload"]).await.unwrap();
    assert!(said.contains("tracing.sample: changed") && said.contains("0 changed, 1 unchanged"), "{said}");
    post(&server, "echo", &[]).await.unwrap();
    collector.wait("span", |spans| (!spans.is_empty()).then_some(())).await.unwrap();
    server.home().write("config.yaml", yaml.replace("tracing:", "#")).unwrap();
    let refused = server.command_output(&["reload"]).await.unwrap_err().to_string();
    assert!(refused.contains("a reload cannot change tracing"), "{refused}");
    server.stop().await.unwrap();
    assert_eq!(named(&collector.spans(), "inference").len(), 1, "only the request after the reload");
}

#[tokio::test]
async fn spans_of_refused_requests_have_the_reason() {
    let collector = Collector::start().await.unwrap();
    let settings = "share: {initial: 50%}, batch: {max: 1}, queue: {max_requests: 2, on_late: serve}";
    let server = traced(200.0, "100%", collector.address, settings).await.unwrap();
    let outcomes = ask_all(&server.client(), "echo", (0..10).map(echo_case).collect(), 0.0).await;
    let refused = outcomes.iter().filter(|outcome| **outcome != RequestOutcome::Right).count();
    assert!(refused > 0, "{outcomes:?}");
    assert!(
        post(&server, "absent", &[("traceparent", &parent(1, "01"))])
            .await
            .unwrap()
            .starts_with("HTTP/1.1 404")
    );
    let metadata = [("traceparent", parent(2, "01"))];
    let metadata = metadata.each_ref().map(|(name, value)| (*name, value.as_str()));
    let unknown = server.client().infer_with("absent", &echo_case(1).inputs, &metadata).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    for (n, kind) in [(1, "404"), (2, "NotFound")] {
        let spans = collector.trace(&trace(n)).await.unwrap();
        assert_eq!(attribute(own(&spans), "error.type").as_deref(), Some(kind));
        assert!(own(&spans).status.is_none(), "not an error of the server");
    }
    let spans = collector.spans();
    let full = |span: &&Span| attribute(span, "shadowslice.refusal").as_deref() == Some("queue_full");
    let full: Vec<_> = spans.iter().filter(full).collect();
    assert_eq!(full.len(), refused);
    for span in full {
        let status = span.status.as_ref().unwrap();
        assert_eq!(status.code, i32::from(StatusCode::Error));
        assert!(status.message.contains("the queue of model 'echo' is full"), "{status:?}");
        assert_eq!(attribute(span, "rpc.grpc.status_code").as_deref(), Some("14"));
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_request_whose_client_disconnects_is_cancelled() {
    let collector = Collector::start().await.unwrap();
    let server = traced(1000.0, "0%", collector.address, SETTINGS).await.unwrap();
    let parents = [parent(1, "01"), parent(2, "01")];
    let mut client = server.client();
    let headers = [("traceparent", parents[0].as_str())];
    let metadata = [("traceparent", parents[1].as_str())];
    let inputs = echo_case(1).inputs;
    let leave = async {
        let both = |model: &ModelStatusJson| model.requests.accepted == 2;
        server.wait_status("echo", "both requests", both).await.unwrap();
    };
    tokio::select! {
        answer = post(&server, "echo", &headers) => panic!("{answer:?}"),
        answer = client.infer_with("echo", &inputs, &metadata) => panic!("{answer:?}"),
        () = leave => {}
    }
    for n in [1, 2] {
        let spans = collector.trace(&trace(n)).await.unwrap();
        assert_eq!(attribute(own(&spans), "error.type").as_deref(), Some("cancelled"));
        assert!(own(&spans).status.is_none() && named(&spans, "execution").is_empty());
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn spans_that_a_collector_rejects_are_counted() {
    let collector = Collector::rejecting(1).await.unwrap();
    let server = traced(1.0, "0%", collector.address, SETTINGS).await.unwrap();
    call(&server, &parent(1, "01")).await.unwrap();
    until_counted(&server, "rejected", 1.0).await.unwrap();
    assert_eq!(spans_counted(&server, "exported").await.unwrap(), 3.0);
    server.wait_line(&["it is full"]).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_killed_worker_and_the_retry_are_visible() {
    let collector = Collector::start().await.unwrap();
    let server = traced(500.0, "0%", collector.address, SETTINGS).await.unwrap();
    let pid = server.model("echo").await.unwrap().workers[0].pid;
    let kill = async {
        let busy = |model: &ModelStatusJson| model.requests.accepted == 1;
        server.wait_status("echo", "a request in flight", busy).await.unwrap();
        ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
    };
    let parent = parent(1, "01");
    let (answered, ()) = tokio::join!(call(&server, &parent), kill);
    answered.unwrap();
    let spans = collector.trace(&trace(1)).await.unwrap();
    assert_eq!(attribute(own(&spans), "shadowslice.retries").as_deref(), Some("1"));
    assert!(own(&spans).status.is_none(), "the client did not notice the death");
    let batches = named(&spans, "batch");
    let outcomes: Vec<_> =
        batches.iter().map(|span| attribute(span, "shadowslice.batch.outcome").unwrap()).collect();
    assert_eq!(outcomes, ["worker_died", "answered"]);
    assert_ne!(
        attribute(batches[0], "shadowslice.worker.id"),
        attribute(batches[1], "shadowslice.worker.id")
    );
    assert_eq!(named(&spans, "queue").len(), 2);
    let events: Vec<_> = own(&spans).events.iter().map(|event| event.name.as_str()).collect();
    assert_eq!(events, ["worker replaced"]);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_hand_over_is_visible_in_the_span() {
    let collector = Collector::start().await.unwrap();
    // On few SMs, the running batch takes 2.6 s. That is longer than the start of a shadow on a
    // busy host.
    let few = "share: {initial: 30%}, queue: {on_late: serve}";
    let server = traced(1_500.0, "0%", collector.address, few).await.unwrap();
    let resize = async {
        let busy = |model: &ModelStatusJson| model.requests.accepted == 1;
        server.wait_status("echo", "a request in flight", busy).await.unwrap();
        server.resize("echo", 50).await.unwrap();
    };
    let (during, after) = (parent(1, "01"), parent(2, "01"));
    let (answered, ()) = tokio::join!(call(&server, &during), resize);
    answered.unwrap();
    call(&server, &after).await.unwrap();
    for (n, share, events) in [(1, "30", &["handover"][..]), (2, "50", &[])] {
        let spans = collector.trace(&trace(n)).await.unwrap();
        let seen: Vec<_> = own(&spans).events.iter().map(|event| event.name.as_str()).collect();
        assert_eq!(seen, events);
        let batch = named(&spans, "batch")[0];
        assert_eq!(attribute(batch, "shadowslice.share_percent").as_deref(), Some(share));
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn while_the_collector_is_away_requests_are_served_and_spans_counted() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let server = traced(1.0, "100%", address, SETTINGS).await.unwrap();
    for n in 0..50 {
        assert_eq!(ask(server.client(), "echo", &echo_case(n), 0.0).await, RequestOutcome::Right);
    }
    until_counted(&server, "unsent", 200.0).await.unwrap();
    server.wait_line(&["spans were dropped"]).await.unwrap();
    let warnings = server.log().matches("spans were dropped").count();
    assert_eq!(warnings, 1, "one line for all spans: {}", server.log());
    let collector = Collector::listen(TcpListener::bind(address).await.unwrap(), 0).unwrap();
    call(&server, &parent(1, "01")).await.unwrap();
    collector.trace(&trace(1)).await.unwrap();
    until_counted(&server, "exported", 4.0).await.unwrap();
    server.wait_line(&["the collector accepts spans again"]).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_collector_that_never_answers_delays_no_request_and_the_stop_only_briefly() {
    // The kernel accepts connections to this listener, but no process answers them.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = traced(1.0, "100%", listener.local_addr().unwrap(), SETTINGS).await.unwrap();
    for n in 0..50 {
        let begun = Instant::now();
        assert_eq!(ask(server.client(), "echo", &echo_case(n), 0.0).await, RequestOutcome::Right);
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
    let stopped = Instant::now();
    server.stop().await.unwrap();
    let took = stopped.elapsed();
    assert!(
        (Duration::from_secs(4)..Duration::from_secs(12)).contains(&took),
        "the stop waits for 5 s: {took:?}"
    );
}

#[tokio::test]
async fn queued_spans_are_sent_before_the_exit() {
    let collector = Collector::start().await.unwrap();
    let server = traced(1.0, "0%", collector.address, SETTINGS).await.unwrap();
    call(&server, &parent(1, "01")).await.unwrap();
    server.stop().await.unwrap();
    assert_eq!(named(&collector.spans(), "inference").len(), 1, "the span arrived before the exit");
}
