//! Reads the machine's CPU load and memory from `/proc`.

use std::time::Duration;

use parking_lot::Mutex;
use procfs::{Current, CurrentSI, KernelStats, Meminfo};
use shadowslice_shared::units::Timestamp;

use shadowslice_datapath::clock::Clock;

/// The time for which a reading is cached, so that several callers see the load of the same period.
const PERIOD: Duration = Duration::from_secs(1);

/// The load of the machine. A field is `None` if `/proc` does not provide it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MachineUsage {
    /// The fraction of the time between the last two readings in which the CPUs were busy, from 0
    /// to 1.
    pub cpu_busy: Option<f64>,
    pub memory: Option<MachineMemory>,
}

/// The memory of the machine, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineMemory {
    pub total: u64,
    /// The memory that is in use and cannot be made available without swapping.
    pub used: u64,
}

/// A reader of the machine's load, which stores the last reading.
#[derive(Debug)]
pub struct MachineMonitor {
    clock: Clock,
    last: Mutex<Last>,
}

#[derive(Debug)]
struct Last {
    at: Timestamp,
    times: Option<CpuTimes>,
    usage: MachineUsage,
}

/// The times of all CPUs since the machine started, in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CpuTimes {
    idle: u64,
    all: u64,
}

impl MachineMonitor {
    pub fn new(clock: Clock) -> Self {
        let usage = MachineUsage { cpu_busy: None, memory: memory() };
        Self { clock, last: Mutex::new(Last { at: clock.now(), times: cpu_times(), usage }) }
    }

    /// Returns the load. During the first second, the CPU load is unknown.
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

/// Reads the CPU times. Waiting for I/O counts as idle. The time of guests (virtual machines) is
/// part of the user time.
fn cpu_times() -> Option<CpuTimes> {
    let cpu = KernelStats::current().ok()?.total;
    let idle = cpu.idle + cpu.iowait.unwrap_or(0);
    let more = [cpu.irq, cpu.softirq, cpu.steal].into_iter().flatten().sum::<u64>();
    Some(CpuTimes { idle, all: cpu.user + cpu.nice + cpu.system + idle + more })
}

fn memory() -> Option<MachineMemory> {
    let memory = Meminfo::current().ok()?;
    Some(MachineMemory {
        total: memory.mem_total,
        used: memory.mem_total.saturating_sub(memory.mem_available?),
    })
}

/// Returns the fraction of busy time between two readings, or `None` if no time has passed.
fn busy(before: CpuTimes, now: CpuTimes) -> Option<f64> {
    let all = now.all.checked_sub(before.all).filter(|all| *all > 0)?;
    let idle = now.idle.saturating_sub(before.idle).min(all);
    Some(1.0 - idle as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_busy_while_they_are_not_idle() {
        let before = CpuTimes { idle: 820, all: 1000 };
        let now = CpuTimes { idle: 920, all: 1200 };
        assert_eq!(busy(before, now), Some(0.5));
        assert_eq!(busy(now, now), None);
        assert_eq!(busy(now, before), None, "counters that decreased have no result");
    }

    #[test]
    fn this_machine_has_memory_and_cpus() {
        let times = cpu_times().unwrap();
        assert!(times.idle > 0 && times.idle < times.all, "{times:?}");
        let memory = MachineMonitor::new(Clock::start()).usage().memory.unwrap();
        assert!(memory.used > 0 && memory.used <= memory.total, "{memory:?}");
    }
}
