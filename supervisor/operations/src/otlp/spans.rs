//! Converts the steps of a request into spans. This module does no I/O.
//!
//! ```text
//! inference ─┬─ queue ─ batch (a worker that died) ─ queue ─ batch
//!            └─ a pair for each try                             └─ execution
//! ```

use std::time::Duration;

use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::trace::v1::span::{Event, SpanKind};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, Status};
use shadowslice_shared::units::Timestamp;

use super::attributes::{number, text};
use shadowslice_datapath::trace::{
    LostReason, RequestTrace, RouteChange, RunEnd, SpanProtocol, SpanStatus, TracedRequest, WorkerRun,
};

/// The flags of a span in a sampled trace: the trace is sampled (0x1), and it is known whether the
/// parent is remote (0x100).
const SAMPLED: u32 = 0x101;

/// The flag of a span whose parent is remote.
const REMOTE: u32 = 0x200;

/// A reading of the wall clock. It is used to convert timestamps of the monotonic clock to
/// wall-clock time.
#[derive(Debug, Clone, Copy)]
pub(super) struct WallClock {
    /// The time since 1970 at the timestamp [`WallClock::at`].
    pub(super) since_epoch: Duration,
    pub(super) at: Timestamp,
}

impl WallClock {
    fn unix_ns(self, moment: Timestamp) -> u64 {
        let since = (self.since_epoch + moment.since(self.at)).saturating_sub(self.at.since(moment));
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }
}

struct SpanBuilder<'t> {
    traced: &'t TracedRequest,
    wall: WallClock,
    next_id: &'t mut dyn FnMut() -> u64,
}

/// Returns the spans of a request. The first is the request's own span. Its child spans follow,
/// with ids from `next_id`.
pub(super) fn spans(traced: &TracedRequest, wall: WallClock, next_id: &mut dyn FnMut() -> u64) -> Vec<Span> {
    let mut maker = SpanBuilder { traced, wall, next_id };
    let mut spans = vec![maker.request()];
    for one in &traced.trace.attempts {
        let end = one.run.as_ref().map_or(traced.ended, |ran| ran.sent);
        spans.push(maker.child(&traced.span_id.to_be_bytes(), "queue", (one.queued, end)));
        if let Some(ran) = &one.run {
            maker.batch(ran, &mut spans);
        }
    }
    spans
}

impl SpanBuilder<'_> {
    fn request(&mut self) -> Span {
        let TracedRequest { span_id, parent, protocol, outcome, trace: journey, began, ended, .. } =
            self.traced;
        let mut span = self.span(*span_id, "inference", (*began, *ended));
        span.kind = SpanKind::Server.into();
        span.trace_state.clone_from(&self.traced.state);
        if let Some(parent) = parent {
            span.parent_span_id = parent.span_id.to_be_bytes().to_vec();
            span.flags |= REMOTE;
        }
        span.attributes = of_protocol(protocol);
        span.attributes.extend(of_outcome(*outcome, journey));
        span.attributes.extend(of_journey(journey));
        span.events = journey.route_change.iter().map(|handover| self.handover(*handover)).collect();
        span.status = status(*outcome, journey);
        span
    }

    fn batch(&mut self, run: &WorkerRun, spans: &mut Vec<Span>) {
        let end = match run.end {
            RunEnd::Open => self.traced.ended,
            RunEnd::Answered { copied, .. } => copied,
            RunEnd::Lost { at, .. } => at,
        };
        let mut batch = self.child(&self.traced.span_id.to_be_bytes(), "batch", (run.sent, end));
        let place = &run.location;
        batch.attributes = vec![
            number("shadowslice.batch.id", run.batch),
            number("shadowslice.batch.rows", run.rows),
            number("shadowslice.batch.requests", run.requests as u64),
            number("shadowslice.worker.id", place.worker),
            number("shadowslice.share_percent", place.share.get()),
            number("shadowslice.sms", place.sms.0),
            text("shadowslice.device", &*place.device),
            text("shadowslice.batch.outcome", ending(run.end)),
        ];
        if let RunEnd::Lost { why, .. } = run.end {
            batch.attributes.push(text("error.type", ending(run.end)));
            batch.status = (why != LostReason::TakenBack).then(|| error(lost(why)));
        }
        if let RunEnd::Answered { received, execution, .. } = run.end {
            let execution = self.child(&batch.span_id, "execution", (received - execution, received));
            spans.extend([batch, execution]);
        } else {
            spans.push(batch);
        }
    }

    fn child(&mut self, parent: &[u8], name: &str, times: (Timestamp, Timestamp)) -> Span {
        let span_id = (self.next_id)();
        let mut span = self.span(span_id, name, times);
        span.parent_span_id = parent.to_vec();
        span
    }

    fn span(&self, span_id: u64, name: &str, (began, ended): (Timestamp, Timestamp)) -> Span {
        Span {
            trace_id: self.traced.trace_id.to_be_bytes().to_vec(),
            span_id: span_id.to_be_bytes().to_vec(),
            flags: SAMPLED,
            name: name.to_owned(),
            kind: SpanKind::Internal.into(),
            start_time_unix_nano: self.wall.unix_ns(began),
            end_time_unix_nano: self.wall.unix_ns(ended.max(began)),
            ..Span::default()
        }
    }

    fn handover(&self, route_change: RouteChange) -> Event {
        let RouteChange { at, from, to } = route_change;
        let name = if from.is_some() { "handover" } else { "worker replaced" };
        let from = from.map(|from| number("shadowslice.from_worker.id", from));
        let attributes = from.into_iter().chain([number("shadowslice.to_worker.id", to)]).collect();
        Event { time_unix_nano: self.wall.unix_ns(at), name: name.to_owned(), attributes, ..Event::default() }
    }
}

fn of_protocol(protocol: &SpanProtocol) -> Vec<KeyValue> {
    match protocol {
        SpanProtocol::Http(path) => vec![
            text("shadowslice.protocol", "http"),
            text("http.request.method", "POST"),
            text("url.path", path.as_str()),
            text("url.scheme", "http"),
        ],
        SpanProtocol::Grpc => vec![
            text("shadowslice.protocol", "grpc"),
            text("rpc.system", "grpc"),
            text("rpc.service", "inference.GRPCInferenceService"),
            text("rpc.method", "ModelInfer"),
        ],
    }
}

fn of_outcome(outcome: SpanStatus, journey: &RequestTrace) -> Vec<KeyValue> {
    let (code, failed) = match outcome {
        SpanStatus::Cancelled => return vec![text("error.type", "cancelled")],
        SpanStatus::Http(status) => {
            (number("http.response.status_code", status), (status >= 400).then(|| status.to_string()))
        }
        SpanStatus::Grpc(code) => {
            let name = || format!("{:?}", tonic::Code::from(code));
            (number("rpc.grpc.status_code", code), (code != 0).then(name))
        }
    };
    let failed = failed.map(|kind| text("error.type", journey.refusal.map_or(kind, str::to_owned)));
    [code].into_iter().chain(failed).collect()
}

fn of_journey(journey: &RequestTrace) -> Vec<KeyValue> {
    let RequestTrace { model, version, rows, copy_in, retries, refusal, .. } = journey;
    let known = model.iter().flat_map(|model| {
        let version = version.to_string();
        [text("shadowslice.model.name", model.as_str()), text("shadowslice.model.version", version)]
    });
    let stored = rows.iter().flat_map(|rows| {
        [number("shadowslice.rows", *rows), number("shadowslice.input_copy_us", copy_in.as_micros())]
    });
    let refused = refusal.iter().map(|refusal| text("shadowslice.refusal", *refusal));
    known.chain(stored).chain([number("shadowslice.retries", *retries)]).chain(refused).collect()
}

/// Returns an error status if the server caused the failure. Failures that the client caused are
/// not reported as errors, as OpenTelemetry's conventions require for servers.
fn status(outcome: SpanStatus, journey: &RequestTrace) -> Option<Status> {
    let faulty = match outcome {
        SpanStatus::Cancelled => false,
        SpanStatus::Http(status) => status >= 500,
        SpanStatus::Grpc(code) => {
            use tonic::Code::{DataLoss, DeadlineExceeded, Internal, Unavailable, Unimplemented, Unknown};
            let faults = [Unknown, DeadlineExceeded, Unimplemented, Internal, Unavailable, DataLoss];
            faults.contains(&tonic::Code::from(code))
        }
    };
    faulty.then(|| error(journey.why.as_deref().unwrap_or_default()))
}

fn error(message: &str) -> Status {
    Status { message: message.to_owned(), code: StatusCode::Error.into() }
}

fn ending(ending: RunEnd) -> &'static str {
    match ending {
        RunEnd::Open => "abandoned",
        RunEnd::Answered { .. } => "answered",
        RunEnd::Lost { why: LostReason::Died, .. } => "worker_died",
        RunEnd::Lost { why: LostReason::TakenBack, .. } => "taken_back",
        RunEnd::Lost { why: LostReason::Failed, .. } => "failed",
        RunEnd::Lost { why: LostReason::Nonsense, .. } => "nonsense",
    }
}

fn lost(why: LostReason) -> &'static str {
    match why {
        LostReason::Died => "the worker died or hung",
        LostReason::TakenBack => "a hand-over took the batch back",
        LostReason::Failed => "the engine failed on the batch",
        LostReason::Nonsense => "the worker's answer was invalid",
    }
}

#[cfg(test)]
#[path = "spans_tests.rs"]
mod tests;
