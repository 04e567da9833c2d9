//! Tests of the effect that attacks have on a well-behaved client of another model. `make attack`
//! prints the results as a table.
//!
//! The attacker is a thread with the lowest priority, because the supervisor is not responsible for
//! the CPU time that the attacker uses. A *twin* measures the effect of that CPU time alone. The
//! twin is a thread with the same priority that sends its bytes to a socket without a server.

mod attacks;
mod faults;
mod setting;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use nix::sys::signal::Signal::{SIGKILL, SIGSTOP};
use nix::unistd::geteuid;
use parking_lot::Mutex;
use rustix::process::nice;
use shadowslice_tests::cases::compare;
use shadowslice_tests::http::InferHttpClient;
use shadowslice_tests::load::{self, ArrivalPattern, LoadPlan, LoadTally, RequestOutcome};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use crate::fixtures::{assert_nothing_lost, echo_case};
use crate::hostile::{AnyResult, SOON};
use attacks::Target;
use setting::{AttackSetting, MEMORY, NEIGHBOUR};

/// The memory that is allowed above `limits.memory`, in MiB. It covers the queues of two models,
/// the buffers of connections, and the supervisor itself.
const EXTRA_MEMORY: u64 = 2 * 64 + 256;

/// The maximum time from the end of an attack to the next answer for the neighbour, in ms.
const RECOVERY_LIMIT: f64 = 2000.0;

struct Attack {
    name: &'static str,
    setting: AttackSetting,
    start: for<'t> fn(&'t Target) -> LocalBoxFuture<'t, AnyResult<()>>,
}

/// Makes an element of [`ALL`].
macro_rules! attack {
    ($name:literal, $setting:ident, $start:expr $(, $with:expr)*) => {
        Attack {
            name: $name,
            setting: AttackSetting::$setting,
            start: |target| Box::pin($start(target $(, $with)*)),
        }
    };
}

const ALL: [Attack; 22] = [
    attack!("a long log that nobody reads", Unread, attacks::noise),
    attack!("46 MB of empty parameters (gRPC)", Plain, attacks::parameters),
    attack!("46 MB of empty bytes_contents", Strings, attacks::contents, 23_000_000, 0),
    attack!("46 MB of bytes_contents of 9", Strings, attacks::contents, 4 << 20, 9),
    attack!("60 MB of JSON strings", Strings, attacks::strings),
    attack!("a configuration that is a FIFO", Plain, faults::fifo),
    attack!("24 gzip bombs at a time", Plain, attacks::bombs),
    attack!("40 bodies of 60 MB, unknown model", Plain, attacks::bodies_for_no_model),
    attack!("30,000 calls without messages", Plain, attacks::calls_without_messages),
    attack!("20 slow readers of 7 MiB", Plain, attacks::slow_readers),
    attack!("70,000 open calls", Plain, attacks::many_calls),
    attack!("idle connections up to the limit", Crowded, attacks::idle_connections),
    attack!("more memory than the host has", Confined, attacks::endless),
    attack!("inputs that kill, rising priority", Slow, faults::bad_inputs, SIGKILL),
    attack!("inputs that hang, rising priority", Slow, faults::bad_inputs, SIGSTOP),
    attack!("kill -9 of the neighbour's standby", Plain, faults::standby, SIGKILL),
    attack!("SIGSTOP of the neighbour's standby", Plain, faults::standby, SIGSTOP),
    attack!("kill -9 of the attacker's workers", Plain, faults::worker, SIGKILL),
    attack!("SIGSTOP of the attacker's workers", Plain, faults::worker, SIGSTOP),
    attack!("workers that lie", Lying, faults::lies),
    attack!("refused peers", Closed, attacks::refused),
    attack!("malformed messages", Plain, attacks::malformed),
];

/// A running attack on its own thread.
struct RunningAttack {
    stop_tx: oneshot::Sender<()>,
    thread: JoinHandle<AnyResult<()>>,
}

impl RunningAttack {
    fn start(attack: impl FnOnce() -> LocalBoxFuture<'static, AnyResult<()>> + Send + 'static) -> Self {
        let (stop_tx, stop_rx) = oneshot::channel();
        let thread = thread::spawn(move || {
            nice(19)?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                tokio::select! {
                    _ = stop_rx => Ok(()),
                    ended = attack() => ended.and(Err("the attack ended by itself".into())),
                }
            })
        });
        Self { stop_tx, thread }
    }

    fn end(self) -> AnyResult<()> {
        // If the attack has already ended on its own, the result of the thread shows it. The error
        // is therefore ignored.
        let _ = self.stop_tx.send(());
        self.thread.join().map_err(|_| "the attack panicked")?
    }
}

/// Imitates an attacker without a server. Sends bytes to a socket whose other end discards them.
async fn twin() -> AnyResult<()> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (mut ours, mut theirs) = tokio::net::UnixStream::pair()?;
    let (sent, mut room) = (vec![1; 64 << 10], vec![0; 64 << 10]);
    loop {
        let (wrote, read) = tokio::join!(ours.write_all(&sent), theirs.read_exact(&mut room));
        wrote.and(read)?;
        tokio::task::yield_now().await;
    }
}

async fn ask_neighbour(client: InferHttpClient, n: usize) -> RequestOutcome {
    let case = echo_case(u16::try_from(n % 60_000).unwrap_or(0));
    match client.infer(NEIGHBOUR, &case.inputs).await {
        Ok(answer) => compare(&case.outputs, &answer, 0.0)
            .map_or_else(RequestOutcome::Wrong, |()| RequestOutcome::Right),
        Err(why) => RequestOutcome::Failed(why),
    }
}

/// Runs the neighbour's load, and returns the tally of the load.
async fn neighbour_load(client: &InferHttpClient, seed: u64) -> LoadTally {
    let plan =
        LoadPlan { rate: 200.0, span: Duration::from_secs(5), arrivals: ArrivalPattern::Poisson, seed };
    let tally: Arc<Mutex<LoadTally>> = Arc::default();
    load::run(&plan, &tally, |n| ask_neighbour(client.clone(), n)).await;
    let tally = tally.lock();
    tally.clone()
}

fn mib(bytes: Option<u64>) -> u64 {
    bytes.map_or(u64::MAX, |bytes| bytes >> 20)
}

/// Formats the p50, the p99 and the maximum latency, in ms.
fn figures(tally: &LoadTally) -> String {
    let [half, most, all] = [0.5, 0.99, 1.0].map(|quantile| tally.latency_ms(quantile));
    format!("{half:>5.1} {most:>6.1} {all:>6.1}")
}

#[allow(clippy::print_stdout, reason = "the test prints a table for its user")]
async fn row(Attack { name, setting, start }: Attack) -> AnyResult<()> {
    let unread = Arc::new(AtomicBool::new(false));
    let server = Arc::new(setting.server(&unread).await?);
    let client = InferHttpClient::new(server.tcp_address("HTTP").await?);
    let mut quiet = neighbour_load(&client, 1).await;
    let running = RunningAttack::start(|| Box::pin(twin()));
    let beside_twin = neighbour_load(&client, 2).await;
    running.end()?;
    let (before, rounds) = (mib(server.process().memory()), Arc::new(AtomicU64::new(0)));
    let target = Target { server: Arc::clone(&server), rounds: Arc::clone(&rounds) };
    unread.store(true, Relaxed);
    let running = RunningAttack::start(move || Box::pin(async move { start(&target).await }));
    let attacked = neighbour_load(&client, 3).await;
    running.end()?;
    let (ended, first) = (Instant::now(), timeout(SOON, ask_neighbour(client.clone(), 1)).await?);
    let back = ended.elapsed().as_secs_f64() * 1e3;
    quiet.add(&neighbour_load(&client, 4).await);
    let (peak, rounds) = (mib(server.process().peak_memory()), rounds.load(Relaxed));
    let ratio = |over: &LoadTally| attacked.latency_ms(0.99) / over.latency_ms(0.99);
    println!(
        "{name:<34} {} | {} | {} | {:>5.1} {:>5.1} | {before:>4} {peak:>5} | {:>4} {:>5} | {back:>5.0} | {rounds:>6}",
        figures(&quiet),
        figures(&beside_twin),
        figures(&attacked),
        ratio(&quiet),
        ratio(&beside_twin),
        attacked.failures(),
        attacked.wrong,
    );
    [&quiet, &beside_twin, &attacked].into_iter().for_each(assert_nothing_lost);
    assert!(first == RequestOutcome::Right && back <= RECOVERY_LIMIT, "{name}: {first:?} after {back:.0} ms");
    assert!(rounds > 0, "{name}: the attack had no round");
    assert!(peak <= MEMORY + EXTRA_MEMORY, "{name}: {peak} MiB");
    let server = Arc::into_inner(server).ok_or("the attack still holds the server")?;
    Ok(server.stop().await?)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; `make attack` runs it"]
async fn a_neighbour_loses_nothing_to_an_attack() {
    // The variable ATTACK selects attacks by a part of their name.
    let one = std::env::var("ATTACK").unwrap_or_default();
    println!(
        "ms: p50, p99, longest; MiB\n{:<34} {:<19} | {:<19} | {:<19} | p99 / both  | memory, peak | lost, wrong | back | rounds",
        "", "quiet", "beside a twin", "attacked"
    );
    for attack in ALL.into_iter().filter(|attack| attack.name.contains(&one)) {
        if attack.setting == AttackSetting::Closed && !geteuid().is_root() {
            println!("{}: skipped, because only root can switch to another user", attack.name);
            continue;
        }
        let name = attack.name;
        row(attack).await.unwrap_or_else(|why| panic!("{name}: {why}"));
    }
}
