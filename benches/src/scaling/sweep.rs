//! Sweeps in which one quantity grows at a time: models, connections, tensors.

use std::path::Path;
use std::time::Duration;

use crate::closed_loop::RoundResult;
use crate::exchange::EchoClient;
use crate::plan::{EchoProtocol, EchoSetting, SMALL, ServerKind, Transport};
use crate::scaling::memory::ProcessMemory;
use crate::system::{RunningSupervisor, home};
use crate::{MeasureError, chain};

const MODELS: [usize; 3] = [1, 10, 50];
const CONNECTIONS: [u16; 4] = [1, 100, 1000, 5000];
const BYTES: [usize; 6] = [SMALL, 4096, 65_536, 600_000, 4_000_000, 64_000_000];

/// The connections over which models are asked in turns; each connection always asks the same
/// model.
const OVER_MODELS: u16 = 100;
/// The connections that carry tensors of all sizes.
const OVER_BYTES: u16 = 2;

/// Models differ in nothing but their tensor's bytes, by this much.
const STEP_BYTES: usize = 4;

/// A row of the page.
pub(super) struct SweepRow {
    pub(super) grows: &'static str,
    pub(super) setting: EchoSetting,
    pub(super) models: usize,
    pub(super) round: RoundResult,
    /// Of the supervisor, after all rounds.
    pub(super) memory: ProcessMemory,
}

/// All rows with `only` in their setting's name.
pub(super) async fn all(
    binaries: &Path,
    span: Duration,
    rounds: u32,
    only: &str,
) -> Result<Vec<SweepRow>, MeasureError> {
    let mut rows = Vec::new();
    let wanted = cases().into_iter().filter(|(_, setting, _)| setting.to_string().contains(only));
    for (grows, setting, models) in wanted {
        eprintln!("{setting}, {models} models");
        let measured = row(binaries, span, rounds, setting, models).await;
        let (round, memory) =
            measured.map_err(|error| format!("{setting}, {models} models: {}", chain(&*error)))?;
        rows.push(SweepRow { grows, setting, models, round, memory });
    }
    Ok(rows)
}

fn cases() -> Vec<(&'static str, EchoSetting, usize)> {
    let mut cases = Vec::new();
    for protocol in [EchoProtocol::Http, EchoProtocol::Grpc] {
        let of = |bytes, connections| EchoSetting {
            server: ServerKind::Shadowslice,
            protocol,
            transport: Transport::Unix,
            bytes,
            connections,
        };
        cases.extend(MODELS.map(|models| ("models", of(SMALL, OVER_MODELS), models)));
        cases.extend(CONNECTIONS.map(|connections| ("connections", of(SMALL, connections), 1)));
        cases.extend(BYTES.map(|bytes| ("tensors", of(bytes, OVER_BYTES), 1)));
    }
    cases.sort_by_key(|(grows, ..)| *grows != "models" && *grows != "connections");
    cases.sort_by_key(|(grows, ..)| *grows != "models");
    cases
}

async fn row(
    binaries: &Path,
    span: Duration,
    rounds: u32,
    setting: EchoSetting,
    models: usize,
) -> Result<(RoundResult, ProcessMemory), MeasureError> {
    let sizes: Vec<usize> = (0..models).map(|model| setting.bytes + model * STEP_BYTES).collect();
    let system = RunningSupervisor::start(home(binaries, &sizes, setting.connections)?).await?;
    let mut all = Vec::new();
    for _ in 0..rounds {
        all.push(system.round(clients(&system, &setting, &sizes).await?, span).await?);
    }
    all.sort_by(|one, other| one.requests_per_second.total_cmp(&other.requests_per_second));
    let memory = ProcessMemory::of(system.supervisor())?;
    system.stop().await?;
    Ok((all[all.len() / 2], memory))
}

/// A client a connection; the models have about as many each.
async fn clients(
    system: &RunningSupervisor,
    setting: &EchoSetting,
    sizes: &[usize],
) -> Result<Vec<EchoClient>, MeasureError> {
    let mut clients = Vec::new();
    for connection in 0..setting.connections {
        let bytes = sizes[usize::from(connection) % sizes.len()];
        clients.push(system.client(&EchoSetting { bytes, ..*setting }, connection).await?);
    }
    Ok(clients)
}
