//! The traces, the access log and the metrics of the supervisor.

use std::sync::Arc;

use shadowslice_config::Config;
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::peer::Refusals;
use shadowslice_datapath::trace::Tracer;
use shadowslice_ingress::IngressMemory;
use shadowslice_operations::access_log::AccessLogWriter;
use shadowslice_operations::log::Log;
use shadowslice_operations::machine::MachineMonitor;
use shadowslice_operations::metrics;
use shadowslice_operations::otlp::Exporter;
use shadowslice_operations::own_process::OwnProcess;

use crate::listeners::Listeners;
use crate::serve::{Failed, unavailable};
use crate::shown;

pub(crate) struct Telemetry {
    pub(crate) tracer: Option<Arc<Tracer>>,
    pub(crate) exporter: Option<Exporter>,
    pub(crate) access_log: Option<AccessLogWriter>,
}

impl Telemetry {
    pub(crate) fn start(config: &Config, clock: Clock) -> Result<Self, Failed> {
        let started = config.tracing.as_ref().map(|tracing| Exporter::start(tracing, clock)).transpose();
        let (tracer, exporter) =
            started.map_err(|error| unavailable("cannot start tracing", &error))?.unzip();
        let access_log = config.access_log.as_deref().map(AccessLogWriter::start).transpose();
        let access_log = access_log.map_err(|error| unavailable("cannot start the access log", &error))?;
        Ok(Self { tracer, exporter, access_log })
    }

    /// Returns a function that reads the metrics of the supervisor itself.
    pub(crate) fn metrics(
        &self,
        listeners: &Listeners,
        log: &Log,
        clock: Clock,
    ) -> impl Fn() -> metrics::SupervisorMetrics + Send + Sync + use<> {
        let (machine, process) = (MachineMonitor::new(clock), OwnProcess::new());
        let (log_dropped, memory) = (log.dropped(), listeners.ingress.memory());
        let host_counts = listeners.ingress.counts();
        let certificates = listeners.ingress.certificates(&listeners.background.metrics);
        let refusals: Arc<Refusals> = Arc::clone(&listeners.refusals);
        let access_log_dropped = self.access_log.as_ref().map(AccessLogWriter::dropped);
        move || {
            let IngressMemory { reserved, limit } = memory();
            metrics::SupervisorMetrics {
                log_dropped: log_dropped(),
                access_log_dropped: access_log_dropped.as_ref().map(|dropped| dropped()),
                request_memory: metrics::MemoryReservation { reserved, limit },
                host: host_counts(),
                last_reload: None,
                peers_refused: refusals.count(),
                certificates: shown::certificates(&certificates),
                tenants: Vec::new(),
                machine: machine.usage(),
                process: process.usage(),
            }
        }
    }
}
