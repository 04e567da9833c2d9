//! Which requests are traced, and where their traces go.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use http::HeaderMap;
use shadowslice_shared::units::Moment;
use tokio::sync::mpsc;

use super::journal::Journal;
use super::parent::{self, Parent};
use super::span::{Context, Outcome, Protocol, Span, Traced};
use crate::clock::Clock;
use shadowslice_config::Sample;

/// Traced requests that may wait to be sent on; more are dropped.
const WAITING: usize = 4096;

/// How spans ended since the start.
#[derive(Debug, Default)]
pub struct Counts {
    exported: AtomicU64,
    queue_full: AtomicU64,
    unsent: AtomicU64,
    rejected: AtomicU64,
}

/// [`Counts`] at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted {
    /// Taken by the collector.
    pub exported: u64,
    /// Dropped, because [`WAITING`] requests waited.
    pub queue_full: u64,
    /// Dropped, because the collector could not be reached, or did not take them.
    pub unsent: u64,
    /// Received by the collector, which said that it does not keep them.
    pub rejected: u64,
}

impl Counted {
    /// All that were dropped.
    pub fn dropped(&self) -> u64 {
        self.queue_full + self.unsent + self.rejected
    }

    /// Each count with its name.
    pub fn by_outcome(&self) -> [(&'static str, u64); 4] {
        let Self { exported, queue_full, unsent, rejected } = *self;
        [("exported", exported), ("queue_full", queue_full), ("unsent", unsent), ("rejected", rejected)]
    }
}

impl Counts {
    /// A batch was taken, except for the `rejected` spans.
    pub fn exported(&self, spans: u64, rejected: u64) {
        self.exported.fetch_add(spans.saturating_sub(rejected), Ordering::Relaxed);
        self.rejected.fetch_add(rejected.min(spans), Ordering::Relaxed);
    }

    /// A batch could not be sent.
    pub fn unsent(&self, spans: u64) {
        self.unsent.fetch_add(spans, Ordering::Relaxed);
    }

    /// The counts now.
    pub fn read(&self) -> Counted {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counted {
            exported: of(&self.exported),
            queue_full: of(&self.queue_full),
            unsent: of(&self.unsent),
            rejected: of(&self.rejected),
        }
    }
}

/// The part of the requests without a parent that are traced; it may change at any time.
#[derive(Debug, Clone)]
pub struct Sampling(Arc<AtomicU32>);

impl Sampling {
    fn of(sample: Sample) -> Self {
        Self(Arc::new(AtomicU32::new(sample.parts())))
    }

    /// From now on it is another.
    pub fn set(&self, sample: Sample) {
        self.0.store(sample.parts(), Ordering::Relaxed);
    }

    fn takes(&self, lot: u32) -> bool {
        lot < self.0.load(Ordering::Relaxed)
    }
}

/// Decides which requests are traced, and takes in their spans. Never waits.
#[derive(Debug)]
pub struct Tracer {
    clock: Clock,
    sampling: Sampling,
    told: mpsc::Sender<Traced>,
    counts: Arc<Counts>,
}

impl Tracer {
    /// A tracer that traces `sample` of the requests without a parent, and where their traces come out.
    pub fn new(sample: Sample, clock: Clock) -> (Self, mpsc::Receiver<Traced>) {
        let (told, traced) = mpsc::channel(WAITING);
        (Self { clock, sampling: Sampling::of(sample), told, counts: Arc::default() }, traced)
    }

    /// The part of the requests without a parent that it traces, to be changed.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// How the spans ended.
    pub fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }

    /// Begins the span of a request, if it is traced: as its parent is, or by chance if it has no
    /// parent.
    pub fn begin(&self, headers: &HeaderMap, protocol: impl FnOnce() -> Protocol) -> Option<Span<'_>> {
        let parent = Parent::of(headers);
        let traced = match &parent {
            Some(parent) => parent.sampled,
            None => self.sampling.takes(fastrand::u32(..Sample::ALL)),
        };
        traced.then(|| {
            let (trace_id, state) = match &parent {
                Some(parent) => (parent.trace_id, parent::state(headers)),
                None => (fastrand::u128(1..), String::new()),
            };
            Span {
                tracer: self,
                context: Context { trace_id, span_id: fastrand::u64(1..), parent, state },
                protocol: protocol(),
                began: self.now(),
                journal: Journal::default(),
                outcome: Outcome::Cancelled,
            }
        })
    }

    pub(super) fn now(&self) -> Moment {
        self.clock.now()
    }

    pub(super) fn tell(&self, traced: Traced) {
        if let Err(lost) = self.told.try_send(traced) {
            self.counts.queue_full.fetch_add(lost.into_inner().journey.spans(), Ordering::Relaxed);
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

    fn tracer(parts: u32) -> (Tracer, mpsc::Receiver<Traced>) {
        Tracer::new(Sample::new(parts).unwrap(), Clock::start())
    }

    #[test]
    fn a_parent_decides_whatever_the_ratio() {
        let (all, mut told) = tracer(Sample::ALL);
        let (none, _) = tracer(0);
        assert!(all.begin(&headers(Some("00")), || Protocol::Grpc).is_none());
        assert!(none.begin(&headers(Some("01")), || Protocol::Grpc).is_some());
        assert!(none.begin(&headers(None), || Protocol::Grpc).is_none());
        all.begin(&headers(Some("01")), || Protocol::Grpc).unwrap().end(Outcome::Grpc(0));
        let traced = told.try_recv().unwrap();
        assert_eq!(traced.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c);
        assert_eq!(traced.parent.map(|parent| parent.span_id), Some(0xb7ad_6b71_6920_3331));
        assert_eq!((traced.state.as_str(), traced.outcome), ("k=v", Outcome::Grpc(0)));
    }

    #[test]
    fn without_a_parent_a_state_means_nothing_and_an_unfinished_span_was_given_up() {
        let (all, mut told) = tracer(Sample::ALL);
        drop(all.begin(&headers(None), || Protocol::Http("/x".to_owned())));
        drop(all.begin(&headers(Some("0x")), || Protocol::Grpc));
        for _ in 0..2 {
            let traced = told.try_recv().unwrap();
            assert_eq!(
                (traced.state.as_str(), traced.parent, traced.outcome),
                ("", None, Outcome::Cancelled)
            );
        }
    }

    #[test]
    fn the_ratio_is_kept_over_many_requests() {
        let (tracer, _told) = tracer(Sample::ALL / 4);
        let traced =
            (0..20_000).filter(|_| tracer.begin(&headers(None), || Protocol::Grpc).is_some()).count();
        // Six standard deviations of 61.
        assert!((4_632..5_368).contains(&traced), "{traced}");
        tracer.sampling().set(Sample::new(0).unwrap());
        assert!((0..100).all(|_| tracer.begin(&headers(None), || Protocol::Grpc).is_none()));
    }

    #[test]
    fn what_does_not_fit_is_dropped_and_counted_in_spans() {
        let (tracer, _told) = tracer(Sample::ALL);
        for _ in 0..WAITING + 3 {
            let span = tracer.begin(&headers(None), || Protocol::Grpc).unwrap();
            span.journal().queued(Moment::default());
        }
        assert_eq!(tracer.counts().read(), Counted { queue_full: 6, ..Counted::default() });
    }
}
