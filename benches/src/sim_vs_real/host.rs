//! The CPU load that other programs put on the host.

use std::fs;
use std::time::{Duration, Instant};

use nix::unistd::{SysconfVar, sysconf};
use shadowslice_tests::process::ProcessHandle;

use crate::machine::{busy, cores};

/// The CPU time that all programs of the host, and the measured processes, have used up to a point
/// in time.
#[derive(Debug)]
pub(crate) struct HostReading {
    at: Instant,
    busy: Duration,
    ours: Duration,
}

impl HostReading {
    /// Reads the CPU times. The measured processes are `processes`, their ended children and this
    /// program.
    pub(crate) fn take(processes: impl IntoIterator<Item = ProcessHandle>) -> Self {
        let own = i32::try_from(std::process::id()).unwrap_or_default();
        let others = processes.into_iter().map(|process| process.pid);
        let ours = others.map(|pid| used(pid, 4)).sum::<Duration>() + used(own, 2);
        Self { at: Instant::now(), busy: busy(), ours }
    }

    /// Returns the CPU time that other programs have used since an earlier reading, in percent of
    /// all cores.
    pub(crate) fn others_percent(&self, earlier: &Self) -> f64 {
        let wall = (self.at - earlier.at).as_secs_f64();
        let others =
            (self.busy.saturating_sub(earlier.busy)).saturating_sub(self.ours.saturating_sub(earlier.ours));
        others.as_secs_f64() / wall.max(1e-3) / cores() as f64 * 100.0
    }
}

/// Returns the sum of the first `times` CPU times of a process. The four times are its user time,
/// its system time, and the user and system times of its ended children. Returns zero if the
/// process has ended.
fn used(pid: i32, times: usize) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The process name may contain spaces, so the fields are counted from the last bracket. The
    // first field after that bracket is the state.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_ascii_whitespace();
    let ticks: u64 = fields.skip(11).take(times).filter_map(|field| field.parse::<u64>().ok()).sum();
    let per_second = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
    Duration::from_secs_f64(ticks as f64 / per_second as f64)
}

/// Returns the host's load average over the last minute.
pub(crate) fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_ascii_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or_default()
}
