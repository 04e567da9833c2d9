use std::sync::Arc;

use shadowslice_shared::units::{Percent, Sms};

use super::*;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use shadowslice_datapath::trace::{RequestAttempt, RunLocation, TraceParent};

const WALL: WallClock = WallClock {
    since_epoch: Duration::from_secs(1000),
    at: Timestamp::after_origin(Duration::from_secs(10)),
};

fn at(ms: u64) -> Timestamp {
    Timestamp::after_origin(Duration::from_millis(ms))
}

/// Converts a time in ms on the monotonic clock to ns since 1970.
fn unix(ms: u64) -> u64 {
    (990_000 + ms) * 1_000_000
}

fn ran(sent: u64, worker: u64, ending: RunEnd) -> Option<WorkerRun> {
    let place =
        RunLocation { worker, share: Percent::new(30).unwrap(), sms: Sms(38), device: "emulated".into() };
    Some(WorkerRun { sent: at(sent), batch: 5, rows: 9, requests: 2, location: Arc::new(place), end: ending })
}

fn traced(outcome: SpanStatus, journey: RequestTrace) -> TracedRequest {
    TracedRequest {
        trace_id: 0xabc,
        span_id: 7,
        parent: Some(TraceParent { trace_id: 0xabc, span_id: 0x1234, sampled: true }),
        state: "k=v".to_owned(),
        protocol: SpanProtocol::Grpc,
        began: at(100),
        ended: at(200),
        outcome,
        trace: journey,
    }
}

fn id(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |id, byte| id << 8 | u64::from(*byte))
}

fn made(traced: &TracedRequest) -> Vec<Span> {
    let mut last = 100;
    spans(traced, WALL, &mut || {
        last += 1;
        last
    })
}

fn attribute_text(span: &Span, key: &str) -> Option<String> {
    let found = span.attributes.iter().find(|attribute| attribute.key == key)?;
    Some(match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        Value::BoolValue(flag) => flag.to_string(),
        _ => return None,
    })
}

/// Returns the name, the parent, the start and the end of each span. Times are in ms.
fn outline(spans: &[Span]) -> Vec<(&str, u64, u64, u64)> {
    let ms = |ns: u64| ns / 1_000_000 - 990_000;
    let one =
        |span: &Span| (id(&span.parent_span_id), ms(span.start_time_unix_nano), ms(span.end_time_unix_nano));
    spans.iter().map(|span| (span.name.as_str(), one(span).0, one(span).1, one(span).2)).collect()
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn a_retried_request_has_a_wait_and_a_batch_for_each_time() {
    let answered =
        RunEnd::Answered { received: at(190), execution: Duration::from_millis(15), copied: at(192) };
    let journey = RequestTrace {
        model: Some("m".to_owned()),
        version: 1,
        rows: Some(4),
        copy_in: Duration::from_micros(30),
        attempts: vec![
            RequestAttempt {
                queued: at(110),
                run: ran(120, 1, RunEnd::Lost { at: at(150), why: LostReason::Died }),
            },
            RequestAttempt { queued: at(150), run: ran(160, 2, answered) },
        ],
        retries: 1,
        route_change: Some(RouteChange { at: at(155), from: None, to: 2 }),
        ..RequestTrace::default()
    };
    let traced = traced(SpanStatus::Grpc(0), journey);
    let spans = made(&traced);
    let expected = [
        ("inference", 0x1234, 100, 200),
        ("queue", 7, 110, 120),
        ("batch", 7, 120, 150),
        ("queue", 7, 150, 160),
        ("batch", 7, 160, 192),
        ("execution", 104, 175, 190),
    ];
    assert_eq!(outline(&spans), expected);
    assert_eq!(spans.len() as u64, traced.trace.spans(), "what is counted where they are dropped");
    let trace_id = &0xabc_u128.to_be_bytes()[..];
    assert!(spans.iter().all(|span| span.trace_id == trace_id && span.span_id.len() == 8));
    let [request, _, died, _, batch, _] = &spans[..] else { panic!() };
    assert_eq!((request.kind, request.flags, died.flags), (SpanKind::Server.into(), 0x301, 0x101));
    assert_eq!((request.trace_state.as_str(), died.trace_state.as_str()), ("k=v", ""));
    for (key, value) in [
        ("shadowslice.model.name", "m"),
        ("shadowslice.model.version", "1"),
        ("shadowslice.rows", "4"),
        ("shadowslice.retries", "1"),
        ("shadowslice.input_copy_us", "30"),
        ("rpc.grpc.status_code", "0"),
        ("shadowslice.protocol", "grpc"),
    ] {
        assert_eq!(attribute_text(request, key).as_deref(), Some(value), "{key}");
    }
    for (key, value) in [
        ("shadowslice.batch.rows", "9"),
        ("shadowslice.share_percent", "30"),
        ("shadowslice.sms", "38"),
        ("shadowslice.worker.id", "2"),
        ("shadowslice.device", "emulated"),
        ("shadowslice.batch.outcome", "answered"),
    ] {
        assert_eq!(attribute_text(batch, key).as_deref(), Some(value), "{key}");
    }
    assert_eq!(attribute_text(died, "error.type").as_deref(), Some("worker_died"));
    assert_eq!(died.status.as_ref().map(|status| status.code), Some(StatusCode::Error.into()));
    assert!(
        request.status.is_none() && attribute_text(request, "error.type").is_none(),
        "the client saw none of it"
    );
    let [event] = &request.events[..] else { panic!() };
    assert_eq!((event.name.as_str(), event.time_unix_nano), ("worker replaced", unix(155)));
}

#[test]
fn an_unfinished_batch_ends_with_the_request() {
    let waits = RequestTrace {
        attempts: vec![RequestAttempt { queued: at(110), run: None }],
        ..RequestTrace::default()
    };
    let spans = made(&traced(SpanStatus::Cancelled, waits));
    assert_eq!(outline(&spans)[1..], [("queue", 7, 110, 200)]);
    assert_eq!(attribute_text(&spans[0], "error.type").as_deref(), Some("cancelled"));
    assert!(spans[0].status.is_none());
    let runs = vec![RequestAttempt { queued: at(110), run: ran(120, 1, RunEnd::Open) }];
    let spans =
        made(&traced(SpanStatus::Cancelled, RequestTrace { attempts: runs, ..RequestTrace::default() }));
    assert_eq!(outline(&spans)[2..], [("batch", 7, 120, 200)]);
    assert_eq!(attribute_text(&spans[2], "shadowslice.batch.outcome").as_deref(), Some("abandoned"));
}

#[test]
fn faults_of_the_server_are_errors_and_faults_of_clients_are_not() {
    let refused = || RequestTrace {
        refusal: Some("late"),
        why: Some("too late".to_owned()),
        ..RequestTrace::default()
    };
    for (outcome, refusal, kind, faulty) in [
        (SpanStatus::Http(200), false, None, false),
        (SpanStatus::Http(400), false, Some("400"), false),
        (SpanStatus::Http(503), true, Some("late"), true),
        (SpanStatus::Grpc(14), true, Some("late"), true),
        (SpanStatus::Grpc(4), false, Some("DeadlineExceeded"), true),
        (SpanStatus::Grpc(5), false, Some("NotFound"), false),
        (SpanStatus::Grpc(13), false, Some("Internal"), true),
    ] {
        let journey = if refusal { refused() } else { RequestTrace::default() };
        let [span] = &made(&traced(outcome, journey))[..] else { panic!("{outcome:?}") };
        assert_eq!(attribute_text(span, "error.type").as_deref(), kind, "{outcome:?}");
        assert_eq!(span.status.is_some(), faulty, "{outcome:?}");
        let message = span.status.as_ref().map_or("", |status| status.message.as_str());
        assert_eq!(message == "too late", refusal, "{outcome:?}");
    }
}

#[test]
fn a_hand_over_names_the_worker_that_served_before() {
    let handover = Some(RouteChange { at: at(150), from: Some(3), to: 4 });
    let [span] = &made(&traced(
        SpanStatus::Http(200),
        RequestTrace { route_change: handover, ..RequestTrace::default() },
    ))[..] else {
        panic!()
    };
    assert_eq!((span.events[0].name.as_str(), span.events[0].attributes.len()), ("handover", 2));
}
