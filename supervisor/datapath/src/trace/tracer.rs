//! The tracer selects the requests to trace and queues them for the exporter.

use std::sync::atomic::{AtomicU32, Ordering};

use http::HeaderMap;
use parking_lot::Mutex;
use shadowslice_shared::units::Timestamp;
use tokio::sync::mpsc;

use super::journal::{Journal, RequestTrace};
use super::parent::{self, TraceParent};
use super::span::{RequestSpan, SpanProtocol, SpanStatus, TracedRequest};
use crate::clock::Clock;
use shadowslice_config::SampleRate;

/// The largest number of traced requests that wait for the exporter. If the queue is full, the
/// trace of a further request is dropped.
const MAX_QUEUED: usize = 4096;

/// The number of spans since the start, by outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpanCounts {
    pub exported: u64,
    /// The number of spans that were dropped because the queue was full.
    pub queue_full: u64,
    /// The number of spans that were dropped because the collector was unreachable or refused them.
    pub unsent: u64,
    /// The number of spans that the collector received and rejected.
    pub rejected: u64,
}

impl SpanCounts {
    pub fn dropped(&self) -> u64 {
        self.queue_full + self.unsent + self.rejected
    }

    pub fn by_outcome(&self) -> [(&'static str, u64); 4] {
        let Self { exported, queue_full, unsent, rejected } = *self;
        [("exported", exported), ("queue_full", queue_full), ("unsent", unsent), ("rejected", rejected)]
    }
}

/// A tracer, which selects the requests to trace and receives their spans. It never blocks.
#[derive(Debug)]
pub struct Tracer {
    clock: Clock,
    /// The fraction of requests without a parent that are traced, in parts of [`SampleRate::ALL`].
    sample: AtomicU32,
    queue_tx: mpsc::Sender<TracedRequest>,
    counts: Mutex<SpanCounts>,
}

impl Tracer {
    pub fn new(sample: SampleRate, clock: Clock) -> (Self, mpsc::Receiver<TracedRequest>) {
        let (queue_tx, queue_rx) = mpsc::channel(MAX_QUEUED);
        (Self { clock, sample: AtomicU32::new(sample.parts()), queue_tx, counts: Mutex::default() }, queue_rx)
    }

    pub fn set_sample(&self, sample: SampleRate) {
        self.sample.store(sample.parts(), Ordering::Relaxed);
    }

    pub fn counts(&self) -> SpanCounts {
        *self.counts.lock()
    }

    pub fn count(&self, add: impl FnOnce(&mut SpanCounts)) {
        add(&mut self.counts.lock());
    }

    /// Starts a span if the request is traced. A request with a parent is traced if its parent is
    /// traced. A request without a parent is selected at random.
    pub fn begin(
        &self,
        headers: &HeaderMap,
        protocol: impl FnOnce() -> SpanProtocol,
    ) -> Option<RequestSpan<'_>> {
        let parent = TraceParent::of(headers);
        let traced = match &parent {
            Some(parent) => parent.sampled,
            None => fastrand::u32(..SampleRate::ALL) < self.sample.load(Ordering::Relaxed),
        };
        traced.then(|| {
            let (trace_id, state) = match &parent {
                Some(parent) => (parent.trace_id, parent::state(headers)),
                None => (fastrand::u128(1..), String::new()),
            };
            let began = self.now();
            let traced = TracedRequest {
                trace_id,
                span_id: fastrand::u64(1..),
                parent,
                state,
                protocol: protocol(),
                began,
                ended: began,
                outcome: SpanStatus::Cancelled,
                trace: RequestTrace::default(),
            };
            RequestSpan { tracer: self, journal: Journal::default(), traced }
        })
    }

    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub(super) fn export(&self, traced: TracedRequest) {
        if let Err(lost) = self.queue_tx.try_send(traced) {
            self.counts.lock().queue_full += lost.into_inner().trace.spans();
        }
    }
}

#[cfg(test)]
mod tests {
    use http::header::HeaderValue;

    use super::*;

    fn headers(flags: Option<&str>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Some(flags) = flags {
            let value = format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}");
            headers.insert("traceparent", HeaderValue::from_str(&value).unwrap());
        }
        headers.insert("tracestate", HeaderValue::from_static("k=v"));
        headers
    }

    fn tracer(parts: u32) -> (Tracer, mpsc::Receiver<TracedRequest>) {
        Tracer::new(SampleRate::new(parts).unwrap(), Clock::start())
    }

    #[test]
    fn a_parent_decides_whatever_the_ratio() {
        let (all, mut queue_rx) = tracer(SampleRate::ALL);
        let (none, _) = tracer(0);
        assert!(all.begin(&headers(Some("00")), || SpanProtocol::Grpc).is_none());
        assert!(none.begin(&headers(Some("01")), || SpanProtocol::Grpc).is_some());
        assert!(none.begin(&headers(None), || SpanProtocol::Grpc).is_none());
        all.begin(&headers(Some("01")), || SpanProtocol::Grpc).unwrap().end(SpanStatus::Grpc(0));
        let traced = queue_rx.try_recv().unwrap();
        assert_eq!(traced.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c);
        assert_eq!(traced.parent.map(|parent| parent.span_id), Some(0xb7ad_6b71_6920_3331));
        assert_eq!((traced.state.as_str(), traced.outcome), ("k=v", SpanStatus::Grpc(0)));
    }

    #[test]
    fn without_a_parent_the_state_is_ignored_and_an_unfinished_span_is_cancelled() {
        let (all, mut queue_rx) = tracer(SampleRate::ALL);
        drop(all.begin(&headers(None), || SpanProtocol::Http("/x".to_owned())));
        drop(all.begin(&headers(Some("0x")), || SpanProtocol::Grpc));
        for _ in 0..2 {
            let traced = queue_rx.try_recv().unwrap();
            assert_eq!(
                (traced.state.as_str(), traced.parent, traced.outcome),
                ("", None, SpanStatus::Cancelled)
            );
        }
    }

    #[test]
    fn the_ratio_is_kept_over_many_requests() {
        let (tracer, _queue_rx) = tracer(SampleRate::ALL / 4);
        let traced =
            (0..20_000).filter(|_| tracer.begin(&headers(None), || SpanProtocol::Grpc).is_some()).count();
        // The range is the mean of 5000 plus or minus six standard deviations. The standard
        // deviation is about 61.
        assert!((4_632..5_368).contains(&traced), "{traced}");
        tracer.set_sample(SampleRate::new(0).unwrap());
        assert!((0..100).all(|_| tracer.begin(&headers(None), || SpanProtocol::Grpc).is_none()));
    }

    #[test]
    fn requests_beyond_the_queue_are_dropped_and_counted_in_spans() {
        let (tracer, _queue_rx) = tracer(SampleRate::ALL);
        for _ in 0..MAX_QUEUED + 3 {
            let span = tracer.begin(&headers(None), || SpanProtocol::Grpc).unwrap();
            span.journal().record_queued(Timestamp::default());
        }
        assert_eq!(tracer.counts(), SpanCounts { queue_full: 6, ..SpanCounts::default() });
    }
}
