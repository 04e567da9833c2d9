//! Open-loop loads on models of this process, and what comes of them.
//!
//! Requests enter the data path behind the protocols. Their latency therefore excludes the time in sockets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::pipeline::{Alarm, RequestArrival, RequestInput, RequestOptions};
use shadowslice_datapath::router::Route;
use tokio::task::JoinSet;

/// The duration of the measurement of a model's capacity.
const CAPACITY_SPAN: Duration = Duration::from_millis(1_500);

/// The number of full batches in flight while the capacity is measured.
const CAPACITY_BATCHES: u32 = 3;

/// A model under load.
pub(super) struct LoadTarget {
    pub(super) route: Route,
    pub(super) inputs: Vec<RequestInput>,
    pub(super) max_batch: u32,
    pub(super) slo: Duration,
    /// The percentage of requests that must be answered within `slo`.
    pub(super) percentile: f64,
}

/// The requests of one model in the measured span.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct LoadCounts {
    pub(super) offered: u64,
    pub(super) answered: u64,
    pub(super) in_time: u64,
    /// The longest delay between the due time of a request and its start.
    pub(super) sent_late: Duration,
}

impl LoadCounts {
    /// Returns the fraction of requests that were answered in time, or 0 if there were none.
    pub(super) fn attainment(&self) -> f64 {
        self.in_time as f64 / self.offered.max(1) as f64
    }
}

impl LoadTarget {
    /// Returns true if the model met its SLO.
    pub(super) fn holds(&self, counts: &LoadCounts) -> bool {
        counts.attainment() * 100.0 >= self.percentile
    }

    /// Returns true if the request was answered.
    async fn ask(route: &Route, inputs: Vec<RequestInput>) -> bool {
        let answered = route.infer(inputs, RequestOptions::default(), RequestArrival::now(None)).await;
        answered.map(|mut answers| answers.delivery().mark_written()).is_ok()
    }

    /// Returns the number of requests per second that the model answers if clients always wait for it.
    pub(super) async fn capacity(&self) -> f64 {
        let end = Instant::now() + CAPACITY_SPAN;
        let mut clients = JoinSet::new();
        for _ in 0..CAPACITY_BATCHES * self.max_batch.max(1) {
            let (route, inputs) = (self.route.clone(), self.inputs.clone());
            clients.spawn(async move {
                let mut answered = 0_u64;
                while Instant::now() < end {
                    answered += u64::from(Self::ask(&route, inputs.clone()).await);
                }
                answered
            });
        }
        clients.join_all().await.into_iter().sum::<u64>() as f64 / CAPACITY_SPAN.as_secs_f64()
    }

    /// Sends requests at `rate` per second at random times (Poisson), and counts those that are due between
    /// `from` and `until`. Returns when all are answered.
    pub(super) async fn run(&self, rate: f64, from: Instant, until: Instant, clock: Clock) -> LoadCounts {
        let (counts, alarm) = (Arc::new(Mutex::new(LoadCounts::default())), Alarm::new(clock));
        let (mut requests, mut due) = (JoinSet::new(), Instant::now());
        loop {
            due += Duration::from_secs_f64(-(1.0 - fastrand::f64()).ln() / rate);
            if due >= until {
                break;
            }
            alarm.wait(clock.now() + due.saturating_duration_since(Instant::now())).await;
            while requests.try_join_next().is_some() {}
            let counted = (due >= from).then(|| Arc::clone(&counts));
            let (route, inputs, slo) = (self.route.clone(), self.inputs.clone(), self.slo);
            requests.spawn(async move {
                let late = due.elapsed();
                let answered = Self::ask(&route, inputs).await;
                let in_time = answered && due.elapsed() <= slo;
                if let Some(counts) = counted {
                    let mut counts = counts.lock();
                    counts.offered += 1;
                    counts.answered += u64::from(answered);
                    counts.in_time += u64::from(in_time);
                    counts.sent_late = counts.sent_late.max(late);
                }
            });
        }
        requests.join_all().await;
        *counts.lock()
    }
}
