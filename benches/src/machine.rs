//! The machine, and the CPU time that its processes take.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::time::ClockId;
use nix::unistd::{Pid, SysconfVar, sysconf};
use serde::Serialize;

/// The machine on which the figures were taken.
#[derive(Debug, Serialize)]
pub struct HostInfo {
    /// The processor's name.
    pub cpu: String,
    /// Its cores.
    pub cores: usize,
    /// The kernel's release.
    pub kernel: String,
    /// The accelerator plays no part here: the engine is emulated.
    pub device: &'static str,
    /// Now, in UTC.
    pub date: String,
    /// The commit that is checked out, and whether any file was changed since.
    pub commit: String,
}

impl HostInfo {
    /// This machine, now.
    pub fn here() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let changed = said("git", &["status", "--porcelain"]).is_some_and(|files| !files.is_empty());
        let commit = said("git", &["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".into());
        Self {
            cpu: model.map_or("unknown", |(_, model)| model).to_owned(),
            cores: cores(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            device: "emulated",
            date: said("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]).unwrap_or_else(|| "unknown".into()),
            commit: if changed { commit + " with changes" } else { commit },
        }
    }
}

fn said(program: &str, arguments: &[&str]) -> Option<String> {
    let folder = env!("CARGO_MANIFEST_DIR");
    let output = Command::new(program).args(arguments).current_dir(folder).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The cores that this program may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The CPU time of a process: all its threads, user and system, as the kernel accounts it.
#[derive(Debug, Clone, Copy)]
pub struct CpuClock(ClockId);

impl CpuClock {
    /// The clock of a process.
    pub fn of(process: Pid) -> nix::Result<Self> {
        ClockId::pid_cpu_clock_id(process).map(Self)
    }

    fn read(self) -> nix::Result<Duration> {
        self.0.now().map(Duration::from)
    }
}

/// The clocks of a server's processes.
#[derive(Debug)]
pub struct ServerClocks {
    /// The process that clients talk to.
    pub server: CpuClock,
    /// The processes that the server started.
    pub workers: Vec<CpuClock>,
}

/// The readings of all clocks at one moment.
#[derive(Debug)]
pub(crate) struct CpuReading {
    at: Instant,
    server: Duration,
    workers: Duration,
    client: Duration,
    busy: Duration,
}

impl CpuReading {
    /// Reads them.
    pub(crate) fn take(clocks: &ServerClocks) -> nix::Result<Self> {
        let workers = clocks.workers.iter().map(|worker| worker.read());
        Ok(Self {
            at: Instant::now(),
            server: clocks.server.read()?,
            workers: workers.sum::<Result<_, _>>()?,
            client: CpuClock(ClockId::CLOCK_PROCESS_CPUTIME_ID).read()?,
            busy: busy(),
        })
    }

    /// The time that passed and was used since an earlier reading.
    pub(crate) fn since(&self, earlier: &Self) -> CpuUsage {
        CpuUsage {
            wall: self.at - earlier.at,
            server: self.server - earlier.server,
            workers: self.workers - earlier.workers,
            client: self.client - earlier.client,
            busy: self.busy.saturating_sub(earlier.busy),
        }
    }
}

/// The time between two readings, and the CPU time that each process used in it.
#[derive(Debug)]
pub(crate) struct CpuUsage {
    pub(crate) wall: Duration,
    pub(crate) server: Duration,
    pub(crate) workers: Duration,
    pub(crate) client: Duration,
    busy: Duration,
}

impl CpuUsage {
    /// The busy time that neither the server, its workers nor the clients used, in percent of all
    /// cores.
    pub(crate) fn others_percent(&self) -> f64 {
        let others = self.busy.saturating_sub(self.server + self.workers + self.client);
        others.as_secs_f64() / self.wall.as_secs_f64() / cores() as f64 * 100.0
    }
}

/// The time for which the machine's cores were not idle; the hypervisor's time counts. Zero if it
/// cannot be told.
pub fn busy() -> Duration {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    // user nice system idle iowait irq softirq steal; guests are in user already.
    let fields = stat.lines().next().unwrap_or_default().split_ascii_whitespace().skip(1).take(8);
    let ticks: Vec<u64> = fields.filter_map(|field| field.parse().ok()).collect();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    let busy = ticks.iter().sum::<u64>() - idle;
    let per_second = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
    Duration::from_secs_f64(busy as f64 / per_second as f64)
}
