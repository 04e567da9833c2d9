//! The host of a measurement, and the CPU time of the measured processes.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::time::ClockId;
use nix::unistd::{Pid, SysconfVar, sysconf};
use serde::Serialize;

/// The host on which the figures were measured.
#[derive(Debug, Serialize)]
pub(crate) struct HostInfo {
    /// The name of the processor.
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    /// The release of the Linux kernel.
    pub(crate) kernel: String,
    /// The GPU on which the figures were measured. In these benchmarks, it is always emulated.
    pub(crate) device: &'static str,
    /// The date and time of the measurement, in UTC.
    pub(crate) date: String,
    /// The commit that is checked out. If files have changed since that commit, a note follows.
    pub(crate) commit: String,
}

impl HostInfo {
    /// Returns the information about this host.
    pub(crate) fn here() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let changed = output_of("git", &["status", "--porcelain"]).is_some_and(|files| !files.is_empty());
        let commit =
            output_of("git", &["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".into());
        Self {
            cpu: model.map_or("unknown", |(_, model)| model).to_owned(),
            cores: cores(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            device: "emulated",
            date: output_of("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]).unwrap_or_else(|| "unknown".into()),
            commit: if changed { commit + " with changes" } else { commit },
        }
    }
}

/// Returns the output of a program, or `None` if the program cannot run or fails.
fn output_of(program: &str, arguments: &[&str]) -> Option<String> {
    let folder = env!("CARGO_MANIFEST_DIR");
    let output = Command::new(program).args(arguments).current_dir(folder).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the number of cores that this program may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The CPU-time clock of a process. It counts the user and system time of all threads of the
/// process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CpuClock(ClockId);

impl CpuClock {
    /// Returns the CPU-time clock of a process.
    pub(crate) fn of(process: Pid) -> nix::Result<Self> {
        ClockId::pid_cpu_clock_id(process).map(Self)
    }

    fn read(self) -> nix::Result<Duration> {
        self.0.now().map(Duration::from)
    }
}

/// The clocks of a server's processes.
#[derive(Debug)]
pub(crate) struct ServerClocks {
    /// The clock of the process that clients connect to.
    pub(crate) server: CpuClock,
    /// The clocks of the processes that the server started.
    pub(crate) workers: Vec<CpuClock>,
}

/// A reading of all clocks at one point in time.
#[derive(Debug)]
pub(crate) struct CpuReading {
    at: Instant,
    server: Duration,
    workers: Duration,
    client: Duration,
    busy: Duration,
}

impl CpuReading {
    /// Reads all clocks now.
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

    /// Returns the wall time and the CPU time since an earlier reading.
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

/// The wall time between two readings, and the CPU time that each process used in that time.
#[derive(Debug)]
pub(crate) struct CpuUsage {
    pub(crate) wall: Duration,
    pub(crate) server: Duration,
    pub(crate) workers: Duration,
    pub(crate) client: Duration,
    busy: Duration,
}

impl CpuUsage {
    /// Returns the CPU time of all programs other than the server, its workers and the clients, in
    /// percent of all cores.
    pub(crate) fn others_percent(&self) -> f64 {
        let others = self.busy.saturating_sub(self.server + self.workers + self.client);
        others.as_secs_f64() / self.wall.as_secs_f64() / cores() as f64 * 100.0
    }
}

/// Returns the total time in which the host's cores were not idle since the host started. Includes
/// the time that the hypervisor gave to other virtual machines. Returns zero if `/proc/stat` cannot
/// be read.
pub(crate) fn busy() -> Duration {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    // The fields are user, nice, system, idle, iowait, irq, softirq and steal. Fields after these
    // are skipped, because user already includes the time of guests.
    let fields = stat.lines().next().unwrap_or_default().split_ascii_whitespace().skip(1).take(8);
    let ticks: Vec<u64> = fields.filter_map(|field| field.parse().ok()).collect();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    let busy = ticks.iter().sum::<u64>() - idle;
    let per_second = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
    Duration::from_secs_f64(busy as f64 / per_second as f64)
}
