//! What Linux says of the machine: how busy its CPUs are, and its memory.

use std::fs;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::units::Moment;

use shadowslice_datapath::clock::Clock;

/// How long what was read stands, so that several who ask see the load of a while, and not of an instant.
const PERIOD: Duration = Duration::from_secs(1);

/// The machine at work. Each part is `None` where `/proc` does not say.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MachineUsage {
    /// Part of the CPUs' time in which they were not idle, from 0 to 1, between the last two looks.
    pub cpu_busy: Option<f64>,
    /// Its memory.
    pub memory: Option<MachineMemory>,
}

/// Memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineMemory {
    /// All of it.
    pub total: u64,
    /// What could not be had at present without swapping.
    pub used: u64,
}

/// Looks at the machine when asked, at most once a second.
#[derive(Debug)]
pub struct Machine {
    clock: Clock,
    last: Mutex<Last>,
}

#[derive(Debug)]
struct Last {
    at: Moment,
    times: Option<CpuTimes>,
    usage: MachineUsage,
}

/// Of all CPUs together since the machine started, in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CpuTimes {
    idle: u64,
    all: u64,
}

impl Machine {
    /// From now on.
    pub fn new(clock: Clock) -> Self {
        let usage = MachineUsage { cpu_busy: None, memory: memory() };
        Self { clock, last: Mutex::new(Last { at: clock.now(), times: cpu_times(), usage }) }
    }

    /// How it is used. The first second says nothing of the CPUs yet.
    pub fn usage(&self) -> MachineUsage {
        let now = self.clock.now();
        let mut last = self.last.lock();
        if now.since(last.at) >= PERIOD {
            let times = cpu_times();
            let cpu_busy = last.times.zip(times).and_then(|(before, now)| busy(before, now));
            *last = Last { at: now, times, usage: MachineUsage { cpu_busy, memory: memory() } };
        }
        last.usage
    }
}

fn cpu_times() -> Option<CpuTimes> {
    parse_cpu_times(&fs::read_to_string("/proc/stat").ok()?)
}

fn memory() -> Option<MachineMemory> {
    parse_memory(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// `None` where no time went by.
fn busy(before: CpuTimes, now: CpuTimes) -> Option<f64> {
    let all = now.all.checked_sub(before.all).filter(|all| *all > 0)?;
    let idle = now.idle.saturating_sub(before.idle).min(all);
    Some(1.0 - idle as f64 / all as f64)
}

/// The first line of `/proc/stat`. Idle is idle and waiting for I/O; guests' time is in user time already.
fn parse_cpu_times(stat: &str) -> Option<CpuTimes> {
    let numbers = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    let ticks: Vec<u64> = numbers.take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
    Some(CpuTimes { idle: ticks.get(3)?.saturating_add(*ticks.get(4)?), all: ticks.iter().sum() })
}

fn parse_memory(meminfo: &str) -> Option<MachineMemory> {
    let bytes = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let (total, available) = (bytes("MemTotal")?, bytes("MemAvailable")?);
    Some(MachineMemory { total, used: total.saturating_sub(available) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_busy_as_far_as_they_were_not_idle_in_between() {
        let before = parse_cpu_times("cpu  100 5 50 800 20 1 2 22 7 0\ncpu0 1 1 1 1\n").unwrap();
        assert_eq!(before, CpuTimes { idle: 820, all: 1000 });
        let now = parse_cpu_times("cpu  150 5 50 870 50 1 2 72 7 0\n").unwrap();
        assert_eq!(busy(before, now), Some(0.5));
        assert_eq!(busy(now, now), None);
        assert_eq!(busy(now, before), None, "a clock that went back says nothing");
    }

    #[test]
    fn memory_is_used_that_is_not_available() {
        let told = "MemTotal:       1000 kB\nMemFree:  100 kB\nMemAvailable:    400 kB\n";
        assert_eq!(parse_memory(told), Some(MachineMemory { total: 1_024_000, used: 614_400 }));
    }

    #[test]
    fn what_is_not_understood_is_not_known() {
        for stat in ["", "cpu", "cpu  1 2 3", "cpu  1 2 3 x 5", "intr 1 2 3 4 5"] {
            assert_eq!(parse_cpu_times(stat), None, "{stat}");
        }
        for memory in
            ["", "MemTotal: 7 kB\n", "MemTotal: 7\nMemAvailable: 3\n", "MemTotal: a kB\nMemAvailable: 3 kB"]
        {
            assert_eq!(parse_memory(memory), None, "{memory}");
        }
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = Machine::new(Clock::start()).usage().memory.unwrap();
        assert!(memory.used > 0 && memory.used <= memory.total, "{memory:?}");
    }
}
