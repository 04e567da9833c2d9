//! Open-loop and closed-loop loads.
//!
//! An open-loop load sends requests at their planned times, even if earlier requests are not
//! answered yet. Latency counts from the planned arrival. A stall of the server therefore adds to
//! the latency of every request that arrives during the stall. In a closed-loop load, each client
//! sends a request as soon as its previous request is answered, which saturates the server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::random::SplitMix64;

/// The time after which an unanswered request counts as failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// The maximum number of requests in flight. Further requests count as failed, which limits the
/// client's memory.
const MAX_IN_FLIGHT: usize = 16_384;

/// The maximum number of wrong answers whose description is kept.
const MAX_EXAMPLES: usize = 5;

/// The upper bound of the latency histogram, in microseconds, which is above [`REQUEST_TIMEOUT`].
const MAX_LATENCY_US: u64 = 60_000_000;

/// The distribution of arrivals over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArrivalPattern {
    /// Arrivals at equal intervals.
    Uniform,
    /// Arrivals at random intervals, as from many independent clients.
    Poisson,
}

impl ArrivalPattern {
    /// Returns the next interval between two arrivals, as a multiple of the mean interval.
    pub fn interval(self, random: &mut SplitMix64) -> f64 {
        match self {
            Self::Uniform => 1.0,
            Self::Poisson => -(1.0 - random.fraction()).ln(),
        }
    }
}

/// The arrivals of an open-loop load. The same plan always produces the same arrivals.
#[derive(Debug, Clone, Copy)]
pub struct LoadPlan {
    /// The mean rate, in requests per second.
    pub rate: f64,
    /// The time from the start to the last arrival.
    pub span: Duration,
    /// The distribution of the arrivals.
    pub arrivals: ArrivalPattern,
    /// The seed of random arrivals.
    pub seed: u64,
}

impl LoadPlan {
    /// Returns the arrivals as times since the start.
    pub fn schedule(&self) -> Vec<Duration> {
        let mut random = SplitMix64::new(self.seed);
        let mut at = 0.0;
        let mut next = || {
            at += self.arrivals.interval(&mut random) / self.rate;
            Duration::from_secs_f64(at)
        };
        std::iter::repeat_with(&mut next).take_while(|at| *at < self.span).collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestOutcome {
    Right,
    /// A wrong answer, with a description of the difference.
    Wrong(String),
    /// No answer, with the reason. Reasons are counted, so they must not contain varying parts.
    Failed(String),
}

/// The counts and latencies of a load.
#[derive(Debug, Clone)]
pub struct LoadTally {
    /// The number of requests that have been due so far.
    pub offered: u64,
    /// The number of correct answers.
    pub right: u64,
    pub wrong: u64,
    /// The number of requests without an answer, by reason.
    pub failed: BTreeMap<String, u64>,
    /// The descriptions of the first wrong answers.
    pub examples: Vec<String>,
    /// The latencies of the correct answers, in microseconds.
    pub latency_us: Histogram<u64>,
    /// The delays between planned arrival and sending in microseconds, which the client itself
    /// causes.
    pub late_us: Histogram<u64>,
}

impl Default for LoadTally {
    fn default() -> Self {
        let histogram = || {
            Histogram::new_with_max(MAX_LATENCY_US, 3)
                .expect("the bounds are constants that the histogram accepts")
        };
        Self {
            offered: 0,
            right: 0,
            wrong: 0,
            failed: BTreeMap::new(),
            examples: Vec::new(),
            latency_us: histogram(),
            late_us: histogram(),
        }
    }
}

impl LoadTally {
    /// Returns the number of correct and wrong answers.
    pub fn answered(&self) -> u64 {
        self.right + self.wrong
    }

    /// Returns the number of requests without an answer.
    pub fn failures(&self) -> u64 {
        self.failed.values().sum()
    }

    /// Returns a quantile of the latency of correct answers, in milliseconds. For example, 0.99
    /// selects the p99.
    pub fn latency_ms(&self, quantile: f64) -> f64 {
        Duration::from_micros(self.latency_us.value_at_quantile(quantile)).as_secs_f64() * 1e3
    }

    /// Returns a quantile of the client's own sending delay, in milliseconds. For example, 1.0
    /// selects the largest delay.
    pub fn sent_late_ms(&self, quantile: f64) -> f64 {
        Duration::from_micros(self.late_us.value_at_quantile(quantile)).as_secs_f64() * 1e3
    }

    /// Returns the fraction of the offered requests that were answered correctly within `slo`.
    pub fn attainment(&self, slo: Duration) -> f64 {
        let limit = u64::try_from(slo.as_micros()).unwrap_or(MAX_LATENCY_US);
        let within = self.latency_us.count_between(0, limit);
        if self.offered == 0 { 1.0 } else { within as f64 / self.offered as f64 }
    }

    /// Adds the counts and latencies of another load.
    pub fn add(&mut self, other: &Self) {
        self.offered += other.offered;
        self.right += other.right;
        self.wrong += other.wrong;
        for (why, count) in &other.failed {
            *self.failed.entry(why.clone()).or_default() += count;
        }
        let room = MAX_EXAMPLES.saturating_sub(self.examples.len());
        self.examples.extend(other.examples.iter().take(room).cloned());
        self.latency_us.add(&other.latency_us).expect("both have the same bounds");
        self.late_us.add(&other.late_us).expect("both have the same bounds");
    }

    fn record(&mut self, latency: Duration, outcome: RequestOutcome) {
        match outcome {
            RequestOutcome::Right => {
                self.right += 1;
                self.latency_us.saturating_record(micros(latency));
            }
            RequestOutcome::Wrong(how) => {
                self.wrong += 1;
                if self.examples.len() < MAX_EXAMPLES {
                    self.examples.push(how);
                }
            }
            RequestOutcome::Failed(why) => *self.failed.entry(why).or_default() += 1,
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(MAX_LATENCY_US)
}

/// Two tallies of a load: one for the requests in the first part of the load, and one for all later
/// requests.
#[derive(Debug, Clone)]
pub struct SplitTally {
    start: Instant,
    /// The length of the first part.
    first: Duration,
    tallies: [Arc<Mutex<LoadTally>>; 2],
}

impl SplitTally {
    /// Makes empty tallies for a load that starts now.
    pub fn after(first: Duration) -> Self {
        Self { start: Instant::now(), first, tallies: [Arc::default(), Arc::default()] }
    }

    /// Makes tallies that count all requests in the first tally.
    fn single(tally: &Arc<Mutex<LoadTally>>) -> Self {
        Self { start: Instant::now(), first: Duration::MAX, tallies: [Arc::clone(tally), Arc::default()] }
    }

    fn at(&self, due: Instant) -> &Arc<Mutex<LoadTally>> {
        &self.tallies[usize::from(due.saturating_duration_since(self.start) >= self.first)]
    }

    /// Returns the tallies of both parts.
    pub fn take(&self) -> [LoadTally; 2] {
        self.tallies.each_ref().map(|tally| std::mem::take(&mut *tally.lock()))
    }
}

/// Sends the planned requests, and returns when all of them have ended. `request(n)` sends the n-th
/// request and checks its answer. Other tasks can read `tally` during the load.
pub async fn run<F, R>(plan: &LoadPlan, tally: &Arc<Mutex<LoadTally>>, request: F)
where
    F: Fn(usize) -> R,
    R: Future<Output = RequestOutcome> + Send + 'static,
{
    run_split(plan, &SplitTally::single(tally), request).await;
}

/// Sends the planned requests like [`run`]. Counts each request in the tally for its planned time.
pub async fn run_split<F, R>(plan: &LoadPlan, tallies: &SplitTally, request: F)
where
    F: Fn(usize) -> R,
    R: Future<Output = RequestOutcome> + Send + 'static,
{
    let mut arrivals_rx = pace(plan.schedule());
    let mut in_flight = JoinSet::new();
    let mut n = 0;
    while let Some(due) = arrivals_rx.recv().await {
        let tally = tallies.at(due);
        tally.lock().offered += 1;
        while in_flight.try_join_next().is_some() {}
        if in_flight.len() < MAX_IN_FLIGHT {
            in_flight.spawn(send_one(due, Arc::clone(tally), request(n)));
        } else {
            tally.lock().record(Duration::ZERO, RequestOutcome::Failed("too many in flight".into()));
        }
        n += 1;
    }
    while in_flight.join_next().await.is_some() {}
}

/// Sends each arrival to a channel at its scheduled time, measured from the call of this function.
/// A thread does this, because tokio's timer has a resolution of a millisecond. The thread ends
/// after the last arrival or when the receiver is dropped.
fn pace(schedule: Vec<Duration>) -> mpsc::Receiver<Instant> {
    let (arrivals_tx, arrivals_rx) = mpsc::channel(MAX_IN_FLIGHT);
    let start = Instant::now();
    std::thread::spawn(move || {
        for due in schedule.into_iter().map(|due| start + due) {
            #[expect(
                clippy::disallowed_methods,
                reason = "the thread waits for nothing but the time of the next arrival"
            )]
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if arrivals_tx.blocking_send(due).is_err() {
                return;
            }
        }
    });
    arrivals_rx
}

/// Runs a closed-loop load until `work` ends, and returns the result of `work`. Each client sends
/// its requests one by one. `request(n)` sends the n-th request, counted over all clients.
pub async fn run_closed<F, R, W>(
    clients: usize,
    tally: &Arc<Mutex<LoadTally>>,
    request: F,
    work: W,
) -> W::Output
where
    F: Fn(usize) -> R + Send + Sync + 'static,
    R: Future<Output = RequestOutcome> + Send + 'static,
    W: Future,
{
    run_closed_split(clients, &SplitTally::single(tally), request, work).await
}

/// Runs a closed-loop load like [`run_closed`]. Counts each request in the tally for its send time.
pub async fn run_closed_split<F, R, W>(clients: usize, tallies: &SplitTally, request: F, work: W) -> W::Output
where
    F: Fn(usize) -> R + Send + Sync + 'static,
    R: Future<Output = RequestOutcome> + Send + 'static,
    W: Future,
{
    let (done, request) = (Arc::new(AtomicBool::new(false)), Arc::new(request));
    let next = Arc::new(AtomicUsize::new(0));
    let mut client_tasks = JoinSet::new();
    for _ in 0..clients {
        let (done, request, tallies, next) = (done.clone(), request.clone(), tallies.clone(), next.clone());
        client_tasks.spawn(async move {
            while !done.load(Ordering::Relaxed) {
                let now = Instant::now();
                let tally = tallies.at(now);
                tally.lock().offered += 1;
                let request = request(next.fetch_add(1, Ordering::Relaxed));
                send_one(now, tally.clone(), request).await;
            }
        });
    }
    let result = work.await;
    done.store(true, Ordering::Relaxed);
    client_tasks.join_all().await;
    result
}

async fn send_one(due: Instant, tally: Arc<Mutex<LoadTally>>, request: impl Future<Output = RequestOutcome>) {
    let late = due.elapsed();
    let outcome = timeout(REQUEST_TIMEOUT, request).await;
    let latency = due.elapsed();
    let outcome =
        outcome.unwrap_or_else(|_| RequestOutcome::Failed(format!("no answer within {REQUEST_TIMEOUT:?}")));
    let mut tally = tally.lock();
    tally.late_us.saturating_record(micros(late));
    tally.record(latency, outcome);
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep_until;

    use super::*;

    fn plan(arrivals: ArrivalPattern, seed: u64) -> LoadPlan {
        LoadPlan { rate: 100.0, span: Duration::from_secs(20), arrivals, seed }
    }

    #[test]
    fn the_same_seed_means_the_same_arrivals() {
        let schedule = |seed| plan(ArrivalPattern::Poisson, seed).schedule();
        assert_eq!(schedule(1), schedule(1));
        assert_ne!(schedule(1), schedule(2));
        let count = schedule(1).len();
        assert!((1800..2200).contains(&count), "{count} arrivals instead of about 2000");
        assert!(schedule(1).is_sorted());
        assert_eq!(plan(ArrivalPattern::Uniform, 1).schedule().len(), 1999);
    }

    #[tokio::test]
    async fn clients_of_a_closed_loop_wait_for_answers() {
        let tally = Arc::default();
        let (gate_tx, gate_rx) = tokio::sync::watch::channel(false);
        let request = move |_| {
            let mut gate_rx = gate_rx.clone();
            async move {
                gate_rx
                    .wait_for(|open| *open)
                    .await
                    .map_or(RequestOutcome::Wrong(String::new()), |_| RequestOutcome::Right)
            }
        };
        let counted = Arc::clone(&tally);
        run_closed(3, &tally, request, async move {
            while counted.lock().offered < 3 {
                tokio::task::yield_now().await;
            }
            assert_eq!(counted.lock().right, 0);
            gate_tx.send_replace(true);
            while counted.lock().offered < 100 {
                tokio::task::yield_now().await;
            }
        })
        .await;
        let tally: LoadTally = tally.lock().clone();
        assert!(tally.offered >= 100 && tally.right == tally.offered, "{tally:?}");
    }

    #[tokio::test]
    async fn a_stall_adds_to_the_latency_of_requests_that_arrive_during_it() {
        let plan = LoadPlan {
            rate: 100.0,
            span: Duration::from_millis(500),
            arrivals: ArrivalPattern::Uniform,
            seed: 0,
        };
        let tally = Arc::default();
        let stalled_until = Instant::now() + Duration::from_millis(400);
        run(&plan, &tally, |n| async move {
            sleep_until(stalled_until).await;
            match n {
                0 => RequestOutcome::Failed("lost".into()),
                1 => RequestOutcome::Wrong("differs".into()),
                _ => RequestOutcome::Right,
            }
        })
        .await;
        let tally = tally.lock();
        assert_eq!((tally.offered, tally.right, tally.wrong, tally.failures()), (49, 47, 1, 1));
        assert!(tally.latency_us.max() > 360_000, "the third request waited for 370 ms");
        let attainment = tally.attainment(Duration::from_millis(100));
        assert!(attainment < 0.45, "30 of 49 waited for longer than 100 ms, yet {attainment}");
    }
}
