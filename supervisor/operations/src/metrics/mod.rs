//! Converts a status into metrics in the Prometheus text format. This module does no I/O.

mod gpus;
mod table;
mod tenants;
mod text;
mod triton;
mod versions;

use crate::access_log::DroppedLines;
use crate::machine::MachineUsage;
use crate::own_process::ProcessUsage;
use crate::status::{GpuStatus, ModelStatus, TenantStatus};
use shadowslice_control::controller::{Changes, Planned, WaitReason};
use shadowslice_control::models::LastReload;
use shadowslice_datapath::host_counters::HostCounts;
use shadowslice_datapath::pipeline::Totals;
use shadowslice_datapath::trace::SpanCounts;
use text::{escaped, write_all};

/// The measurements of a model. All totals count from the start of the supervisor.
#[derive(Debug)]
pub struct ModelMetrics {
    pub status: ModelStatus,
    pub totals: Totals,
    pub changes: Changes,
    /// The reasons why the model's workers cannot start yet.
    pub waits: Vec<WaitReason>,
}

/// A file with certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    pub file: String,
    /// The kind of the certificate: `certificate` or `client_ca`.
    pub kind: &'static str,
    /// The time at which the first certificate in the file expires, in seconds since 1970.
    pub expires: u64,
}

/// The measurements of the supervisor and of its host.
#[derive(Debug, Clone)]
pub struct SupervisorMetrics {
    /// The number of log lines that were dropped because the queue was full.
    pub log_dropped: u64,
    /// The number of access log lines that were dropped, or `None` without an access log.
    pub access_log_dropped: Option<DroppedLines>,
    /// The memory that is reserved for requests and answers.
    pub request_memory: MemoryReservation,
    /// The counts of responses to clients and of requests that limits refused.
    pub host: HostCounts,
    /// The last reload of the configuration, or `None`.
    pub last_reload: Option<LastReload>,
    /// The number of connections and calls that were refused because the peer had no permission.
    pub peers_refused: u64,
    /// The certificates of all listeners.
    pub certificates: Vec<Certificate>,
    pub tenants: Vec<TenantStatus>,
    pub machine: MachineUsage,
    pub process: ProcessUsage,
}

/// An amount of reserved memory and its limit, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryReservation {
    pub reserved: u64,
    pub limit: u64,
}

/// Renders all metrics: first the metrics with the supervisor's own names, then the metrics with
/// Triton's names.
pub fn render(
    models: &[ModelMetrics],
    policy: Option<&Planned>,
    traces: Option<SpanCounts>,
    gpus: &[GpuStatus],
    own: &SupervisorMetrics,
) -> String {
    let mut text = String::new();
    let labels = |model: &ModelMetrics| {
        // The first version has no label, so that the series of models without versions have none.
        let version = match model.status.version {
            0 | 1 => String::new(),
            number => format!(",version=\"{number}\""),
        };
        format!("model=\"{}\",gpu=\"{}\"{version}", escaped(&model.status.model), model.status.gpu)
    };
    write_all(&mut text, table::MODELS, models, labels);
    write_all(&mut text, versions::METRICS, models, labels);
    let policies = policy.map_or(&[][..], std::slice::from_ref);
    write_all(&mut text, table::POLICY, policies, |policy| {
        format!("policy=\"{}\"", escaped(&policy.policy.to_string()))
    });
    write_all(&mut text, gpus::METRICS, gpus, |gpu| format!("gpu=\"{}\"", gpu.index));
    let traces = traces.map(|counts| counts.by_outcome());
    let traces = traces.as_ref().map_or(&[][..], |outcomes| &outcomes[..]);
    write_all(&mut text, table::TRACES, traces, |(outcome, _)| format!("outcome=\"{outcome}\""));
    write_all(&mut text, table::OWN, std::slice::from_ref(own), |_| String::new());
    write_all(&mut text, table::CERTIFICATES, &own.certificates, |certificate| {
        format!("file=\"{}\",kind=\"{}\"", escaped(&certificate.file), certificate.kind)
    });
    write_all(&mut text, tenants::METRICS, &own.tenants, |tenant| {
        format!("tenant=\"{}\"", escaped(&tenant.name))
    });
    write_all(&mut text, table::HOST, &[own.host], |_| String::new());
    write_all(&mut text, table::BUILD, &[()], |()| format!("version=\"{}\"", env!("CARGO_PKG_VERSION")));
    write_all(&mut text, table::PROCESS, &[own.process], |_| String::new());
    triton::write(&mut text, models, gpus, own.machine);
    text
}

#[cfg(test)]
mod absent_tests;
#[cfg(test)]
mod names_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod versions_tests;
