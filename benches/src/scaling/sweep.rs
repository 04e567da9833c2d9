//! Sweeps. Each sweep varies one variable: the number of models, the number of connections, or the
//! tensor size.

use std::path::Path;
use std::time::Duration;

use shadowslice_shared::errors;

use crate::MeasureError;
use crate::closed_loop::RoundResult;
use crate::exchange::EchoClient;
use crate::plan::{EchoProtocol, EchoSetting, SMALL, ServerKind, Transport};
use crate::scaling::memory::MemoryReading;
use crate::system::{RunningSupervisor, home};

const MODELS: [usize; 3] = [1, 10, 50];
const CONNECTIONS: [u16; 4] = [1, 100, 1000, 5000];
const BYTES: [usize; 6] = [SMALL, 4096, 65_536, 600_000, 4_000_000, 64_000_000];

/// The number of connections in the sweep over the number of models. Each connection sends requests
/// to one model.
const OVER_MODELS: u16 = 100;
/// The number of connections in the sweep over the tensor size.
const OVER_BYTES: u16 = 2;

/// The difference between the tensor sizes of two successive models, in bytes. Apart from the
/// tensor size, all models are the same.
const STEP_BYTES: usize = 4;

#[derive(Debug, Clone, Copy)]
struct SweepPoint {
    /// The name of the variable that the sweep varies.
    variable: &'static str,
    setting: EchoSetting,
    models: usize,
}

/// The result of one point of a sweep.
pub(super) struct SweepRow {
    /// The name of the variable that the sweep varies.
    pub(super) variable: &'static str,
    pub(super) setting: EchoSetting,
    pub(super) models: usize,
    pub(super) round: RoundResult,
    /// The supervisor's memory after all rounds.
    pub(super) memory: MemoryReading,
}

/// Measures all points whose setting's name contains `only`.
pub(super) async fn all(
    binaries: &Path,
    span: Duration,
    rounds: u32,
    only: &str,
) -> Result<Vec<SweepRow>, MeasureError> {
    let mut rows = Vec::new();
    for point in points().into_iter().filter(|point| point.setting.to_string().contains(only)) {
        let SweepPoint { setting, models, .. } = point;
        eprintln!("{setting}, {models} models");
        let measured = row(binaries, span, rounds, point).await;
        rows.push(
            measured.map_err(|error| format!("{setting}, {models} models: {}", errors::chain(&*error)))?,
        );
    }
    Ok(rows)
}

/// Returns all points of all sweeps, one sweep after the other.
fn points() -> Vec<SweepPoint> {
    const PROTOCOLS: [EchoProtocol; 2] = [EchoProtocol::Http, EchoProtocol::Grpc];
    let point = |variable, protocol, bytes, connections, models| {
        let (server, transport) = (ServerKind::Shadowslice, Transport::Unix);
        let setting = EchoSetting { server, protocol, transport, bytes, connections };
        SweepPoint { variable, setting, models }
    };
    let mut points = Vec::new();
    for protocol in PROTOCOLS {
        points.extend(MODELS.map(|models| point("models", protocol, SMALL, OVER_MODELS, models)));
    }
    for protocol in PROTOCOLS {
        points.extend(CONNECTIONS.map(|connections| point("connections", protocol, SMALL, connections, 1)));
    }
    for protocol in PROTOCOLS {
        points.extend(BYTES.map(|bytes| point("tensors", protocol, bytes, OVER_BYTES, 1)));
    }
    points
}

/// Measures one point in several rounds. Returns the round with the median number of requests per
/// second.
async fn row(
    binaries: &Path,
    span: Duration,
    rounds: u32,
    point: SweepPoint,
) -> Result<SweepRow, MeasureError> {
    let SweepPoint { variable, setting, models } = point;
    let sizes: Vec<usize> = (0..models).map(|model| setting.bytes + model * STEP_BYTES).collect();
    let system = RunningSupervisor::start(home(binaries, &sizes, setting.connections)?).await?;
    let mut all = Vec::new();
    for _ in 0..rounds {
        all.push(system.round(clients(&system, &setting, &sizes).await?, span).await?);
    }
    all.sort_by(|one, other| one.requests_per_second.total_cmp(&other.requests_per_second));
    let memory = MemoryReading::of(system.supervisor())?;
    system.stop().await?;
    Ok(SweepRow { variable, setting, models, round: all[all.len() / 2], memory })
}

/// Returns one client for each connection. Successive clients use successive models.
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
