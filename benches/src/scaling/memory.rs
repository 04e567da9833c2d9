//! The supervisor's memory after many requests.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::MeasureError;
use crate::closed_loop::send;
use crate::exchange::EchoClient;
use crate::plan::{EchoProtocol, EchoSetting, LARGE, SMALL, ServerKind, Transport};
use crate::system::{RunningSupervisor, home};

/// Connections that send small tensors, and large ones beside them.
const SMALL_CONNECTIONS: u16 = 28;
const LARGE_CONNECTIONS: u16 = 4;

/// Where clients come and go, all of them leave after so many requests, and new clients come.
const STAY: u64 = 1000;

/// A process's memory, in KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessMemory {
    /// Resident.
    pub(super) rss: u64,
    /// Resident; a shared page counts in part for each process that shares it.
    pub(super) pss: u64,
    /// Resident and its own: heap and stacks, not the slabs that it shares with workers.
    pub(super) anonymous: u64,
}

impl ProcessMemory {
    /// Of a process, now.
    pub(super) fn of(pid: i32) -> Result<Self, MeasureError> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?)
            .ok_or_else(|| "smaps_rollup lacks a line".into())
    }

    fn parse(text: &str) -> Option<Self> {
        let kib = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            value.trim().strip_suffix("kB")?.trim().parse().ok()
        };
        Some(Self { rss: kib("Rss")?, pss: kib("Pss")?, anonymous: kib("Anonymous")? })
    }
}

/// A row of the page.
pub(super) struct MemoryRow {
    pub(super) load: &'static str,
    /// The requests that were sent before.
    pub(super) after: String,
    pub(super) memory: ProcessMemory,
    /// Open files of the supervisor.
    pub(super) files: usize,
}

/// The load of the clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemoryLoad {
    /// Small tensors over connections that stay.
    Small,
    /// Both sizes, and clients that come and go.
    Mixed,
}

impl MemoryLoad {
    fn name(self) -> &'static str {
        match self {
            Self::Small => "64 B x32",
            Self::Mixed => "64 B x28 and 600 kB x4, all connect anew every 1,000 requests",
        }
    }

    async fn clients(self, system: &RunningSupervisor) -> Result<Vec<EchoClient>, MeasureError> {
        let setting = |bytes, connections| EchoSetting {
            server: ServerKind::Shadowslice,
            protocol: EchoProtocol::Http,
            transport: Transport::Unix,
            bytes,
            connections,
        };
        Ok(match self {
            Self::Small => system.clients(&setting(SMALL, SMALL_CONNECTIONS + LARGE_CONNECTIONS)).await?,
            Self::Mixed => {
                let mut clients = system.clients(&setting(SMALL, SMALL_CONNECTIONS)).await?;
                clients.extend(system.clients(&setting(LARGE, LARGE_CONNECTIONS)).await?);
                clients
            }
        })
    }
}

/// Memory under both loads, each on a fresh supervisor; the last time after so long a rest.
pub(super) async fn all(
    binaries: &Path,
    requests: &[u64],
    rest: Duration,
) -> Result<Vec<MemoryRow>, MeasureError> {
    let mut rows = Vec::new();
    for load in [MemoryLoad::Small, MemoryLoad::Mixed] {
        eprintln!("memory: {}", load.name());
        let system = RunningSupervisor::start(home(binaries, &[SMALL, LARGE], SMALL_CONNECTIONS)?).await?;
        let row = |after: String| {
            let files = fs::read_dir(format!("/proc/{}/fd", system.supervisor()))?.count();
            Ok::<_, MeasureError>(MemoryRow {
                load: load.name(),
                after,
                memory: ProcessMemory::of(system.supervisor())?,
                files,
            })
        };
        rows.push(row("start".into())?);
        let mut sent = 0;
        let mut clients = load.clients(&system).await?;
        for &wanted in requests {
            while sent < wanted {
                let many = match load {
                    MemoryLoad::Small => wanted - sent,
                    MemoryLoad::Mixed => STAY.min(wanted - sent),
                };
                clients = send(clients, many).await?;
                sent += many;
                if load == MemoryLoad::Mixed {
                    drop(clients);
                    clients = load.clients(&system).await?;
                }
            }
            rows.push(row(format!("{wanted} requests"))?);
        }
        drop(clients);
        tokio::time::sleep(rest).await;
        rows.push(row(format!("{} s without clients", rest.as_secs_f64()))?);
        system.stop().await?;
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaps_are_read_by_name() {
        let text =
            "55 00 ---p [rollup]\nRss:    900 kB\nPss:   700 kB\nPss_Anon:  1 kB\nAnonymous:   500 kB\n";
        assert_eq!(ProcessMemory::parse(text), Some(ProcessMemory { rss: 900, pss: 700, anonymous: 500 }));
        assert_eq!(ProcessMemory::parse("Rss: 1 kB\n"), None);
    }
}
