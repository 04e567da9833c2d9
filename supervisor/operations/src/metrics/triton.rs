//! The metrics that Triton has, under its names, so that readers of Triton's metrics can read them
//! here.

use std::time::Duration;

use super::ModelMetrics;
use super::gpus::{memory, told};
use super::table::{by, one};
use super::text::MetricType::{Counter, Gauge};
use super::text::{Metric, Sample, escaped, write_all};
use crate::machine::MachineUsage;
use crate::status::GpuStatus;
use shadowslice_datapath::pipeline::Durations;

/// The version that every model has.
const VERSION: &str = "1";

pub(super) const MODELS: &[Metric<ModelMetrics>] = &[
    Metric {
        name: "nv_inference_request_success",
        kind: Counter,
        help: "Requests answered.",
        samples: |model| one(model.status.requests.succeeded as f64),
    },
    Metric {
        name: "nv_inference_request_failure",
        kind: Counter,
        help: "Requests without an answer, by Triton's reasons.",
        samples: failures,
    },
    Metric {
        name: "nv_inference_count",
        kind: Counter,
        help: "Rows answered.",
        samples: |model| one(model.totals.batch_rows.sum() as f64),
    },
    Metric {
        name: "nv_inference_exec_count",
        kind: Counter,
        help: "Batches answered.",
        samples: |model| one(model.totals.batch_rows.count() as f64),
    },
    Metric {
        name: "nv_inference_request_duration_us",
        kind: Counter,
        help: "Sum over answered requests, in us: from acceptance to answer.",
        samples: |model| us(model, |durations| durations.request),
    },
    Metric {
        name: "nv_inference_queue_duration_us",
        kind: Counter,
        help: "Sum over answered requests, in us: neither copied nor executed.",
        samples: |model| us(model, |durations| durations.queue),
    },
    Metric {
        name: "nv_inference_compute_input_duration_us",
        kind: Counter,
        help: "Sum over answered requests, in us: inputs copied into shared memory.",
        samples: |model| us(model, |durations| durations.compute_input),
    },
    Metric {
        name: "nv_inference_compute_infer_duration_us",
        kind: Counter,
        help: "Sum over answered requests, in us: their batch executed.",
        samples: |model| us(model, |durations| durations.compute_infer),
    },
    Metric {
        name: "nv_inference_compute_output_duration_us",
        kind: Counter,
        help: "Sum over answered requests, in us: the outputs of their batch copied out of shared memory.",
        samples: |model| us(model, |durations| durations.compute_output),
    },
    Metric {
        name: "nv_inference_pending_request_count",
        kind: Gauge,
        help: "Requests that wait.",
        samples: |model| one(model.status.queue as f64),
    },
];

/// Metrics of real GPUs.
pub(super) const GPUS: &[Metric<GpuStatus>] = &[
    Metric {
        name: "nv_gpu_utilization",
        kind: Gauge,
        help: "Part of the last moments in which any kernel ran on the GPU, from 0 to 1.",
        samples: |gpu| told(gpu, |nvml| nvml.utilisation_percent.map(|percent| f64::from(percent) / 100.0)),
    },
    Metric {
        name: "nv_gpu_memory_total_bytes",
        kind: Gauge,
        help: "Memory of the GPU, to the MiB.",
        samples: |gpu| memory(gpu, |memory| memory.total_mib),
    },
    Metric {
        name: "nv_gpu_memory_used_bytes",
        kind: Gauge,
        help: "Memory of the GPU that processes have, to the MiB.",
        samples: |gpu| memory(gpu, |memory| memory.used_mib),
    },
    Metric {
        name: "nv_gpu_power_usage",
        kind: Gauge,
        help: "What the GPU draws, in W.",
        samples: |gpu| told(gpu, |nvml| nvml.power_mw.map(|mw| f64::from(mw) / 1e3)),
    },
    Metric {
        name: "nv_gpu_power_limit",
        kind: Gauge,
        help: "The most that the GPU may draw, in W.",
        samples: |gpu| told(gpu, |nvml| nvml.power_limit_mw.map(|mw| f64::from(mw) / 1e3)),
    },
    Metric {
        name: "nv_energy_consumption",
        kind: Counter,
        help: "What the GPU took since its driver was loaded, in J.",
        samples: |gpu| told(gpu, |nvml| nvml.energy_mj.map(|mj| mj as f64 / 1e3)),
    },
];

pub(super) const MACHINE: &[Metric<MachineUsage>] = &[
    Metric {
        name: "nv_cpu_utilization",
        kind: Gauge,
        help: "Part of the CPUs' time in which they were not idle, from 0 to 1.",
        samples: |machine| machine.cpu_busy.map_or_else(Vec::new, one),
    },
    Metric {
        name: "nv_cpu_memory_total_bytes",
        kind: Gauge,
        help: "Memory of the machine.",
        samples: |machine| machine.memory.map_or_else(Vec::new, |memory| one(memory.total as f64)),
    },
    Metric {
        name: "nv_cpu_memory_used_bytes",
        kind: Gauge,
        help: "Memory of the machine that could not be had at present.",
        samples: |machine| machine.memory.map_or_else(Vec::new, |memory| one(memory.used as f64)),
    },
];

/// Writes all of them.
pub(super) fn write(text: &mut String, models: &[ModelMetrics], gpus: &[GpuStatus], machine: MachineUsage) {
    write_all(text, MODELS, models, |model| {
        format!("model=\"{}\",version=\"{VERSION}\"", escaped(&model.status.name))
    });
    write_all(text, GPUS, gpus, |gpu| {
        let uuid = gpu.nvml.as_ref().map_or("", |nvml| &nvml.uuid);
        format!("gpu_uuid=\"{}\"", escaped(uuid))
    });
    write_all(text, MACHINE, &[machine], |_| String::new());
}

/// By Triton's reasons. A request that was accepted and failed did so for its worker, or for want
/// of a worker.
fn failures(model: &ModelMetrics) -> Vec<Sample> {
    let requests = &model.status.requests;
    let reasons = [
        ("REJECTED", requests.rejected),
        ("CANCELED", requests.cancelled),
        ("BACKEND", requests.failed),
        ("OTHER", 0),
    ];
    by("reason", &reasons)
}

fn us(model: &ModelMetrics, of: fn(&Durations) -> Duration) -> Vec<Sample> {
    one(of(&model.totals.durations).as_micros() as f64)
}
