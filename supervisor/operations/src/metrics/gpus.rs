//! The metrics of GPUs. Most have no values for an emulated GPU, because NVML does not know it.

use super::table::one;
use super::text::{Metric, MetricSample, counter, gauge};
use crate::status::{GpuMemory, GpuStatus, MIB, NvmlStatus};

pub(super) const METRICS: &[Metric<GpuStatus>] = &[
    gauge("shadowslice_gpu_memory_used_bytes", "GPU memory in use by processes, to the MiB.", |gpu| {
        memory(gpu, |memory| memory.used_mib)
    }),
    gauge("shadowslice_gpu_memory_total_bytes", "Total GPU memory, to the MiB.", |gpu| {
        memory(gpu, |memory| memory.total_mib)
    }),
    gauge(
        "shadowslice_gpu_utilization",
        "Part of the last sampling period in which any kernel ran on the GPU, on however few SMs, \
         from 0 to 1.",
        utilisation,
    ),
    counter(
        "shadowslice_gpu_sm_seconds_total",
        "SMs of the GPU times the time since the supervisor's start, in SM-seconds.",
        |gpu| one(gpu.sm_seconds),
    ),
    counter("shadowslice_gpu_xid_errors_total", "XID errors that the GPU's driver reported.", |gpu| {
        nvml_sample(gpu, |nvml| Some(nvml.xid_errors as f64))
    }),
];

pub(super) fn nvml_sample(gpu: &GpuStatus, value: impl Fn(&NvmlStatus) -> Option<f64>) -> Vec<MetricSample> {
    one(gpu.nvml.as_ref().and_then(value))
}

pub(super) fn utilisation(gpu: &GpuStatus) -> Vec<MetricSample> {
    nvml_sample(gpu, |nvml| nvml.utilisation_percent.map(|percent| f64::from(percent) / 100.0))
}

pub(super) fn memory(gpu: &GpuStatus, mib: impl Fn(GpuMemory) -> u64) -> Vec<MetricSample> {
    nvml_sample(gpu, |nvml| nvml.memory.map(|memory| (mib(memory) * MIB) as f64))
}
