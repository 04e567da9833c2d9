//! The load of the host besides the measurement.

use std::fs;
use std::time::{Duration, Instant};

use nix::unistd::{SysconfVar, sysconf};
use shadowslice_benches::machine::{busy, cores};
use shadowslice_tests::process::ProcessHandle;

/// The CPU time that the machine, the supervisor with its workers and this program had used at one
/// moment.
#[derive(Debug)]
pub(crate) struct Reading {
    at: Instant,
    busy: Duration,
    ours: Duration,
}

impl Reading {
    /// A reading now, with these processes counted as part of the measurement, like this program.
    /// The time of their children that have ended counts too.
    pub(crate) fn take(processes: impl IntoIterator<Item = ProcessHandle>) -> Self {
        let own = i32::try_from(std::process::id()).unwrap_or_default();
        let others = processes.into_iter().map(|process| process.pid);
        let ours = others.map(|pid| used(pid, 4)).sum::<Duration>() + used(own, 2);
        Self { at: Instant::now(), busy: busy(), ours }
    }

    /// The CPU time that other programs used since an earlier reading, in percent of all cores.
    pub(crate) fn others_percent(&self, earlier: &Self) -> f64 {
        let wall = (self.at - earlier.at).as_secs_f64();
        let others =
            (self.busy.saturating_sub(earlier.busy)).saturating_sub(self.ours.saturating_sub(earlier.ours));
        others.as_secs_f64() / wall.max(1e-3) / cores() as f64 * 100.0
    }
}

/// The first so many of a process's times: user, system, and its ended children's user and system
/// time. Zero for a process that is gone.
fn used(pid: i32, times: usize) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may hold anything, so fields count from the last bracket: the state is the third of all.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_ascii_whitespace();
    let ticks: u64 = fields.skip(11).take(times).filter_map(|field| field.parse::<u64>().ok()).sum();
    let per_second = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
    Duration::from_secs_f64(ticks as f64 / per_second as f64)
}

/// Processes that ran or waited for a core in the last minute, on average.
pub(crate) fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_ascii_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or_default()
}
