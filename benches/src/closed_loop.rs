//! A closed loop, in which each client sends a request, waits for its answer, and then sends the
//! next request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};

use crate::MeasureError;
use crate::exchange::{EchoClient, ExchangeError};
use crate::machine::{CpuReading, ServerClocks};

/// The time for which the loop runs before the measurement starts.
const WARM_UP: Duration = Duration::from_millis(100);

/// The maximum time that the clients may take to finish their last requests after the measurement.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest latency that the histogram can represent, in nanoseconds.
const LONGEST_NS: u64 = 60_000_000_000;

/// The maximum CPU time of other programs in an undisturbed round, in percent of all cores.
const DISTURBED_PERCENT: f64 = 10.0;

/// The result of one round.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct RoundResult {
    pub(crate) requests: u64,
    /// The number of answered requests per second.
    pub(crate) requests_per_second: f64,
    /// The median latency, in µs.
    pub p50_us: f64,
    /// The 99th percentile of the latency, in µs.
    pub p99_us: f64,
    /// The CPU time of the supervisor, or of the bare server, per request, in µs.
    pub(crate) supervisor_cpu_us: f64,
    /// The CPU time of all workers per request, in µs.
    pub(crate) worker_cpu_us: f64,
    /// The CPU time of this program per request, in µs.
    pub(crate) client_cpu_us: f64,
    /// The CPU time that other programs and virtual machines used, in percent of all cores.
    pub(crate) others_percent: f64,
}

impl RoundResult {
    /// Returns the CPU time of all the server's processes per request, in µs.
    pub(crate) fn server_cpu_us(&self) -> f64 {
        self.supervisor_cpu_us + self.worker_cpu_us
    }

    /// Returns true if other programs used at most 10 % of the host's CPU time.
    pub(crate) fn is_quiet(&self) -> bool {
        self.others_percent <= DISTURBED_PERCENT
    }
}

/// The state that all clients of a loop share.
struct LoopState {
    latency_ns: Mutex<Histogram<u64>>,
    over: AtomicBool,
}

/// Runs all clients and measures them for `span`. Returns the result.
pub(crate) async fn run(
    clients: Vec<EchoClient>,
    span: Duration,
    clocks: &ServerClocks,
) -> Result<RoundResult, MeasureError> {
    let empty = || Histogram::<u64>::new_with_max(LONGEST_NS, 3).expect("constant bounds that fit");
    let shared = Arc::new(LoopState { latency_ns: Mutex::new(empty()), over: AtomicBool::new(false) });
    let mut loops = JoinSet::new();
    for client in clients {
        loops.spawn(send_until_over(client, Arc::clone(&shared)));
    }
    run_for(&mut loops, WARM_UP).await?;
    let before = CpuReading::take(clocks)?;
    *shared.latency_ns.lock() = empty();
    run_for(&mut loops, span).await?;
    let after = CpuReading::take(clocks)?;
    let latency_ns = shared.latency_ns.lock().clone();
    shared.over.store(true, Ordering::Relaxed);
    let ending = async {
        while let Some(ended) = loops.join_next().await {
            ended??;
        }
        Ok::<_, MeasureError>(())
    };
    timeout(END_TIMEOUT, ending).await??;
    summarise(&before, &after, &latency_ns)
}

/// Sends `requests` requests, divided among all clients. Returns the clients, so that the caller
/// can continue to use them.
pub(crate) async fn send(clients: Vec<EchoClient>, requests: u64) -> Result<Vec<EchoClient>, MeasureError> {
    let left = Arc::new(AtomicU64::new(requests));
    let mut senders = JoinSet::new();
    for mut client in clients {
        let left = Arc::clone(&left);
        senders.spawn(async move {
            let take = || {
                left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
            };
            for turn in 0.. {
                if !take() {
                    break;
                }
                client.exchange(turn).await?;
            }
            Ok::<_, ExchangeError>(client)
        });
    }
    let mut clients = Vec::new();
    while let Some(ended) = senders.join_next().await {
        clients.push(ended??);
    }
    Ok(clients)
}

/// Waits for `span` while the clients run. A client ends early only if an exchange fails.
async fn run_for(loops: &mut JoinSet<Result<(), ExchangeError>>, span: Duration) -> Result<(), MeasureError> {
    tokio::select! {
        () = sleep(span) => Ok(()),
        ended = loops.join_next() => match ended {
            Some(ended) => Ok(ended.map_err(|fault: JoinError| MeasureError::from(fault))??),
            None => Err("there are no clients".into()),
        }
    }
}

async fn send_until_over(mut client: EchoClient, shared: Arc<LoopState>) -> Result<(), ExchangeError> {
    let mut turn = 0;
    while !shared.over.load(Ordering::Relaxed) {
        let sent = Instant::now();
        client.exchange(turn).await?;
        let took = u64::try_from(sent.elapsed().as_nanos()).unwrap_or(LONGEST_NS);
        shared.latency_ns.lock().saturating_record(took);
        turn += 1;
    }
    Ok(())
}

fn summarise(
    before: &CpuReading,
    after: &CpuReading,
    latency_ns: &Histogram<u64>,
) -> Result<RoundResult, MeasureError> {
    let requests = latency_ns.len();
    if requests == 0 {
        return Err("no request was answered during the measurement".into());
    }
    let each_us = |total: Duration| total.as_secs_f64() * 1e6 / requests as f64;
    let used = after.since(before);
    Ok(RoundResult {
        requests,
        requests_per_second: requests as f64 / used.wall.as_secs_f64(),
        p50_us: latency_ns.value_at_quantile(0.5) as f64 / 1e3,
        p99_us: latency_ns.value_at_quantile(0.99) as f64 / 1e3,
        supervisor_cpu_us: each_us(used.server),
        worker_cpu_us: each_us(used.workers),
        client_cpu_us: each_us(used.client),
        others_percent: used.others_percent(),
    })
}
