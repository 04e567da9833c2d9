//! The metrics of real GPUs. NVML gives no values for an emulated GPU.

use super::table::one;
use super::text::{Metric, MetricSample, counter, gauge};
use crate::status::{GpuMemory, GpuStatus, MIB, NvmlStatus};

pub(super) const METRICS: &[Metric<GpuStatus>] = &[
    gauge("shadowslice_gpu_memory_used_bytes", "Memory of the GPU that processes have, to the MiB.", |gpu| {
        memory(gpu, |memory| memory.used_mib)
    }),
    gauge("shadowslice_gpu_memory_total_bytes", "Memory of the GPU, to the MiB.", |gpu| {
        memory(gpu, |memory| memory.total_mib)
    }),
    gauge(
        "shadowslice_gpu_utilization",
        "Part of the last moments in which any kernel ran on the GPU, however few SMs it took, \
         from 0 to 1.",
        utilisation,
    ),
    counter("shadowslice_gpu_xid_errors_total", "Errors (XID) that the GPU's driver reported.", |gpu| {
        told(gpu, |nvml| Some(nvml.xid_errors as f64))
    }),
];

pub(super) fn told(gpu: &GpuStatus, value: impl Fn(&NvmlStatus) -> Option<f64>) -> Vec<MetricSample> {
    one(gpu.nvml.as_ref().and_then(value))
}

pub(super) fn utilisation(gpu: &GpuStatus) -> Vec<MetricSample> {
    told(gpu, |nvml| nvml.utilisation_percent.map(|percent| f64::from(percent) / 100.0))
}

pub(super) fn memory(gpu: &GpuStatus, mib: impl Fn(GpuMemory) -> u64) -> Vec<MetricSample> {
    told(gpu, |nvml| nvml.memory.map(|memory| (mib(memory) * MIB) as f64))
}
