//! A closed loop: every client sends a request, waits for its answer, and sends the next one.

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

/// How long the loop runs before it is measured.
const WARM_UP: Duration = Duration::from_millis(100);

/// How long the last answers may take.
const LAST_ANSWERS: Duration = Duration::from_secs(10);

/// The longest latency told apart, in nanoseconds.
const LONGEST_NS: u64 = 60_000_000_000;

/// If other programs take more of the machine than this, in percent, a round is disturbed.
const DISTURBED_PERCENT: f64 = 10.0;

/// The result of one round.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct RoundResult {
    /// Requests that were answered.
    pub requests: u64,
    /// The same per second.
    pub requests_per_second: f64,
    /// Median latency.
    pub p50_us: f64,
    /// The latency that one request in a hundred exceeds.
    pub p99_us: f64,
    /// CPU time per request: of the supervisor, or of the bare server.
    pub supervisor_cpu_us: f64,
    /// CPU time per request of all workers.
    pub worker_cpu_us: f64,
    /// CPU time per request of this program.
    pub client_cpu_us: f64,
    /// The CPU time that other programs and hosts took of the machine, in percent of all cores.
    pub others_percent: f64,
}

impl RoundResult {
    /// CPU time per request of all the server's processes.
    pub fn server_cpu_us(&self) -> f64 {
        self.supervisor_cpu_us + self.worker_cpu_us
    }

    /// Whether it had the machine nearly for itself.
    pub fn is_quiet(&self) -> bool {
        self.others_percent <= DISTURBED_PERCENT
    }
}

/// The state that the clients share.
struct Shared {
    latency_ns: Mutex<Histogram<u64>>,
    over: AtomicBool,
}

/// Runs all clients for `span`, and measures.
pub async fn run(
    clients: Vec<EchoClient>,
    span: Duration,
    clocks: &ServerClocks,
) -> Result<RoundResult, MeasureError> {
    let empty = || Histogram::<u64>::new_with_max(LONGEST_NS, 3).expect("constant bounds that fit");
    let shared = Arc::new(Shared { latency_ns: Mutex::new(empty()), over: AtomicBool::new(false) });
    let mut asking = JoinSet::new();
    for client in clients {
        asking.spawn(ask(client, Arc::clone(&shared)));
    }
    go_on(&mut asking, WARM_UP).await?;
    let before = CpuReading::take(clocks)?;
    *shared.latency_ns.lock() = empty();
    go_on(&mut asking, span).await?;
    let after = CpuReading::take(clocks)?;
    let latency_ns = shared.latency_ns.lock().clone();
    shared.over.store(true, Ordering::Relaxed);
    let ending = async {
        while let Some(ended) = asking.join_next().await {
            ended??;
        }
        Ok::<_, MeasureError>(())
    };
    timeout(LAST_ANSWERS, ending).await??;
    round(&before, &after, &latency_ns)
}

/// Sends so many requests over all clients together, and hands the clients back.
pub(crate) async fn send(clients: Vec<EchoClient>, requests: u64) -> Result<Vec<EchoClient>, MeasureError> {
    let left = Arc::new(AtomicU64::new(requests));
    let mut asking = JoinSet::new();
    for mut client in clients {
        let left = Arc::clone(&left);
        asking.spawn(async move {
            let take = || {
                left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
            };
            for turn in 0.. {
                if !take() {
                    break;
                }
                client.ask(turn).await?;
            }
            Ok::<_, ExchangeError>(client)
        });
    }
    let mut clients = Vec::new();
    while let Some(ended) = asking.join_next().await {
        clients.push(ended??);
    }
    Ok(clients)
}

/// Lets the clients run. A client ends only by a fault.
async fn go_on(asking: &mut JoinSet<Result<(), ExchangeError>>, span: Duration) -> Result<(), MeasureError> {
    tokio::select! {
        () = sleep(span) => Ok(()),
        ended = asking.join_next() => match ended {
            Some(ended) => Ok(ended.map_err(|fault: JoinError| MeasureError::from(fault))??),
            None => Err("there are no clients".into()),
        }
    }
}

async fn ask(mut client: EchoClient, shared: Arc<Shared>) -> Result<(), ExchangeError> {
    let mut turn = 0;
    while !shared.over.load(Ordering::Relaxed) {
        let sent = Instant::now();
        client.ask(turn).await?;
        let took = u64::try_from(sent.elapsed().as_nanos()).unwrap_or(LONGEST_NS);
        shared.latency_ns.lock().saturating_record(took);
        turn += 1;
    }
    Ok(())
}

fn round(
    before: &CpuReading,
    after: &CpuReading,
    latency_ns: &Histogram<u64>,
) -> Result<RoundResult, MeasureError> {
    let requests = latency_ns.len();
    if requests == 0 {
        return Err("not one answer came while it was measured".into());
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
