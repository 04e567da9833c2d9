//! The metrics, in the text format of Prometheus. Pure: from a status to a text.

mod gpus;
mod table;
mod text;
mod triton;

use crate::access_log::DroppedLines;
use crate::machine::MachineUsage;
use crate::own_process::ProcessUsage;
use crate::status::{GpuStatus, ModelStatus};
use shadowslice_control::controller::{Changes, WaitReason};
use shadowslice_datapath::host_counters::HostCounts;
use shadowslice_datapath::pipeline::{Total, Totals};
use shadowslice_datapath::trace::SpanCounts;
use text::{escaped, write_all};

/// Totals and changes are those since the start.
#[derive(Debug)]
pub struct ModelMetrics {
    pub status: ModelStatus,
    pub totals: Totals,
    pub changes: Changes,
    /// What its workers wait for.
    pub waits: Vec<WaitReason>,
}

/// A file with certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    pub file: String,
    /// `certificate` or `client_ca`.
    pub kind: &'static str,
    /// When the first of them expires, in s since 1970.
    pub expires: u64,
}

#[derive(Debug)]
pub struct Policy {
    pub name: String,
    /// How long its decisions took, since the start.
    pub took: Total,
}

/// What is measured of the supervisor, and of its host.
#[derive(Debug, Clone)]
pub struct Own {
    /// Lines of the log that found no room.
    pub log_dropped: u64,
    /// Lines of the access log that were dropped; `None` if there is no such log.
    pub access_log_dropped: Option<DroppedLines>,
    /// Bytes that requests and answers have, and may have.
    pub request_memory: (u64, u64),
    /// What clients were answered, and what limits refused.
    pub host: HostCounts,
    /// When the configuration was reloaded last, in s since 1970, and whether all changes are in force.
    pub last_reload: Option<(f64, bool)>,
    /// Connections and calls of peers that may not.
    pub peers_refused: u64,
    /// Those of all listeners.
    pub certificates: Vec<Certificate>,
    pub machine: MachineUsage,
    pub process: ProcessUsage,
}

/// The supervisor's own metrics come before Triton's.
pub fn render(
    models: &[ModelMetrics],
    policy: Option<&Policy>,
    traces: Option<SpanCounts>,
    gpus: &[GpuStatus],
    own: &Own,
) -> String {
    let mut text = String::new();
    write_all(&mut text, table::MODELS, models, |model| {
        format!("model=\"{}\",gpu=\"{}\"", escaped(&model.status.name), model.status.gpu)
    });
    let policies = policy.map_or(&[][..], std::slice::from_ref);
    write_all(&mut text, table::POLICY, policies, |policy| format!("policy=\"{}\"", escaped(&policy.name)));
    write_all(&mut text, gpus::METRICS, gpus, |gpu| format!("gpu=\"{}\"", gpu.index));
    let traces = traces.map(|counts| counts.by_outcome());
    let traces = traces.as_ref().map_or(&[][..], |outcomes| &outcomes[..]);
    write_all(&mut text, table::TRACES, traces, |(outcome, _)| format!("outcome=\"{outcome}\""));
    write_all(&mut text, table::OWN, std::slice::from_ref(own), |_| String::new());
    write_all(&mut text, table::CERTIFICATES, &own.certificates, |certificate| {
        format!("file=\"{}\",kind=\"{}\"", escaped(&certificate.file), certificate.kind)
    });
    write_all(&mut text, table::HOST, &[own.host], |_| String::new());
    write_all(&mut text, table::BUILD, &[()], |()| format!("version=\"{}\"", env!("CARGO_PKG_VERSION")));
    write_all(&mut text, table::PROCESS, &[own.process], |_| String::new());
    triton::write(&mut text, models, gpus, own.machine);
    text
}

#[cfg(test)]
mod lacks_tests;
#[cfg(test)]
mod names_tests;
#[cfg(test)]
mod tests;
