//! The memory of the supervisor after many requests.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::MeasureError;
use crate::closed_loop::send;
use crate::exchange::EchoClient;
use crate::plan::{EchoProtocol, EchoSetting, LARGE, SMALL, ServerKind, Transport};
use crate::system::{RunningSupervisor, home};

/// The number of connections that send small tensors in the mixed load. Another
/// [`LARGE_CONNECTIONS`] connections send large tensors.
const SMALL_CONNECTIONS: u16 = 28;
const LARGE_CONNECTIONS: u16 = 4;

/// The number of requests after which all clients of the mixed load open new connections.
const RECONNECT_AFTER: u64 = 1000;

/// The memory of a process, in KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryReading {
    /// The resident memory (RSS).
    pub(super) rss: u64,
    /// The proportional memory (PSS). It divides the size of each shared page by the number of
    /// processes that share the page.
    pub(super) pss: u64,
    /// The private resident memory. It includes the heap and the stacks, but not the slabs that the
    /// supervisor shares with workers.
    pub(super) anonymous: u64,
}

impl MemoryReading {
    /// Reads the memory of a process.
    pub(super) fn of(pid: i32) -> Result<Self, MeasureError> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?)
            .ok_or_else(|| format!("/proc/{pid}/smaps_rollup has no Rss, Pss or Anonymous line").into())
    }

    fn parse(text: &str) -> Option<Self> {
        let kib = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            value.trim().strip_suffix("kB")?.trim().parse().ok()
        };
        Some(Self { rss: kib("Rss")?, pss: kib("Pss")?, anonymous: kib("Anonymous")? })
    }
}

/// A reading of the supervisor's memory during or after a load.
pub(super) struct MemoryRow {
    pub(super) load: &'static str,
    /// A description of the requests that the clients had sent before the reading.
    pub(super) after: String,
    pub(super) memory: MemoryReading,
    /// The number of files that the supervisor has open.
    pub(super) files: usize,
}

/// A load under which the supervisor's memory is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemoryLoad {
    /// Small tensors over permanent connections.
    Small,
    /// Tensors of both sizes, from clients that reconnect after every [`RECONNECT_AFTER`] requests.
    Mixed,
}

impl MemoryLoad {
    fn name(self) -> &'static str {
        match self {
            Self::Small => "64 B x32",
            Self::Mixed => "64 B x28 and 600 kB x4, reconnecting every 1,000 requests",
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

/// Measures the memory under both loads, with a new supervisor for each load. Reads the memory
/// after each number of requests, and again after the time `rest` without clients.
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
                memory: MemoryReading::of(system.supervisor())?,
                files,
            })
        };
        rows.push(row("start".into())?);
        let mut sent = 0;
        let mut clients = load.clients(&system).await?;
        for &wanted in requests {
            while sent < wanted {
                let count = match load {
                    MemoryLoad::Small => wanted - sent,
                    MemoryLoad::Mixed => RECONNECT_AFTER.min(wanted - sent),
                };
                clients = send(clients, count).await?;
                sent += count;
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
        assert_eq!(MemoryReading::parse(text), Some(MemoryReading { rss: 900, pss: 700, anonymous: 500 }));
        assert_eq!(MemoryReading::parse("Rss: 1 kB\n"), None);
    }
}
