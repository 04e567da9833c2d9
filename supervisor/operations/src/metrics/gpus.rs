//! The metrics of real GPUs. NVML gives no values for an emulated GPU.

use super::table::one;
use super::text::MetricType::{Counter, Gauge};
use super::text::{Metric, Sample};
use crate::status::{GpuMemory, GpuStatus, NvmlStatus};

/// Bytes of a MiB.
pub(super) const MIB: u64 = 1 << 20;

/// All metrics of GPUs.
pub(super) const METRICS: &[Metric<GpuStatus>] = &[
    Metric {
        name: "shadowslice_gpu_memory_used_bytes",
        kind: Gauge,
        help: "Memory of the GPU that processes have, to the MiB.",
        samples: |gpu| memory(gpu, |memory| memory.used_mib),
    },
    Metric {
        name: "shadowslice_gpu_memory_total_bytes",
        kind: Gauge,
        help: "Memory of the GPU, to the MiB.",
        samples: |gpu| memory(gpu, |memory| memory.total_mib),
    },
    Metric {
        name: "shadowslice_gpu_utilization",
        kind: Gauge,
        help: "Part of the last moments in which any kernel ran on the GPU, however few SMs it took, from 0 to 1.",
        samples: |gpu| told(gpu, |nvml| nvml.utilisation_percent.map(|percent| f64::from(percent) / 100.0)),
    },
    Metric {
        name: "shadowslice_gpu_xid_errors_total",
        kind: Counter,
        help: "Errors (XID) that the GPU's driver reported.",
        samples: |gpu| told(gpu, |nvml| Some(nvml.xid_errors as f64)),
    },
];

pub(super) fn told(gpu: &GpuStatus, value: impl Fn(&NvmlStatus) -> Option<f64>) -> Vec<Sample> {
    gpu.nvml.as_ref().and_then(value).map_or_else(Vec::new, one)
}

pub(super) fn memory(gpu: &GpuStatus, mib: impl Fn(GpuMemory) -> u64) -> Vec<Sample> {
    told(gpu, |nvml| nvml.memory.map(|memory| (mib(memory) * MIB) as f64))
}
