//! Which requests are traced, and where their traces go.

use std::sync::atomic::{AtomicU32, Ordering};

use http::HeaderMap;
use parking_lot::Mutex;
use shadowslice_shared::units::Timestamp;
use tokio::sync::mpsc;

use super::journal::{Journal, Journey};
use super::parent::{self, Parent};
use super::span::{Outcome, Protocol, Span, Traced};
use crate::clock::Clock;
use shadowslice_config::SampleRate;

/// Traced requests that may wait to be sent on; more are dropped.
const WAITING: usize = 4096;

/// How spans ended since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    pub exported: u64,
    /// Dropped, because [`WAITING`] requests waited.
    pub queue_full: u64,
    /// Dropped, because the collector could not be reached, or did not take them.
    pub unsent: u64,
    /// Received by the collector, which said that it does not keep them.
    pub rejected: u64,
}

impl Counts {
    pub fn dropped(&self) -> u64 {
        self.queue_full + self.unsent + self.rejected
    }

    pub fn by_outcome(&self) -> [(&'static str, u64); 4] {
        let Self { exported, queue_full, unsent, rejected } = *self;
        [("exported", exported), ("queue_full", queue_full), ("unsent", unsent), ("rejected", rejected)]
    }
}

/// Decides which requests are traced, and takes in their spans. Never waits.
#[derive(Debug)]
pub struct Tracer {
    clock: Clock,
    /// The part of the requests without a parent that are traced.
    sample: AtomicU32,
    told: mpsc::Sender<Traced>,
    counts: Mutex<Counts>,
}

impl Tracer {
    pub fn new(sample: SampleRate, clock: Clock) -> (Self, mpsc::Receiver<Traced>) {
        let (told, traced) = mpsc::channel(WAITING);
        (Self { clock, sample: AtomicU32::new(sample.parts()), told, counts: Mutex::default() }, traced)
    }

    pub fn set_sample(&self, sample: SampleRate) {
        self.sample.store(sample.parts(), Ordering::Relaxed);
    }

    pub fn counts(&self) -> Counts {
        *self.counts.lock()
    }

    pub fn count(&self, add: impl FnOnce(&mut Counts)) {
        add(&mut self.counts.lock());
    }

    /// A request is traced as its parent is, or by chance if it has no parent.
    pub fn begin(&self, headers: &HeaderMap, protocol: impl FnOnce() -> Protocol) -> Option<Span<'_>> {
        let parent = Parent::of(headers);
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
            let traced = Traced {
                trace_id,
                span_id: fastrand::u64(1..),
                parent,
                state,
                protocol: protocol(),
                began,
                ended: began,
                outcome: Outcome::Cancelled,
                journey: Journey::default(),
            };
            Span { tracer: self, journal: Journal::default(), traced }
        })
    }

    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub(super) fn tell(&self, traced: Traced) {
        if let Err(lost) = self.told.try_send(traced) {
            self.counts.lock().queue_full += lost.into_inner().journey.spans();
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
        Tracer::new(SampleRate::new(parts).unwrap(), Clock::start())
    }

    #[test]
    fn a_parent_decides_whatever_the_ratio() {
        let (all, mut told) = tracer(SampleRate::ALL);
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
        let (all, mut told) = tracer(SampleRate::ALL);
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
        let (tracer, _told) = tracer(SampleRate::ALL / 4);
        let traced =
            (0..20_000).filter(|_| tracer.begin(&headers(None), || Protocol::Grpc).is_some()).count();
        // Six standard deviations of 61.
        assert!((4_632..5_368).contains(&traced), "{traced}");
        tracer.set_sample(SampleRate::new(0).unwrap());
        assert!((0..100).all(|_| tracer.begin(&headers(None), || Protocol::Grpc).is_none()));
    }

    #[test]
    fn what_does_not_fit_is_dropped_and_counted_in_spans() {
        let (tracer, _told) = tracer(SampleRate::ALL);
        for _ in 0..WAITING + 3 {
            let span = tracer.begin(&headers(None), || Protocol::Grpc).unwrap();
            span.journal().queued(Timestamp::default());
        }
        assert_eq!(tracer.counts(), Counts { queue_full: 6, ..Counts::default() });
    }
}
