//! The metrics with Triton's names, for dashboards that were made for Triton.

use std::time::Duration;

use super::ModelMetrics;
use super::gpus::{memory, nvml_sample, utilisation};
use super::table::{batch_rows, by, one};
use super::text::{Metric, MetricSample, counter, escaped, gauge, write_all};
use crate::machine::MachineUsage;
use crate::status::GpuStatus;
use shadowslice_datapath::pipeline::{CacheCounts, Durations};

pub(super) const MODELS: &[Metric<ModelMetrics>] = &[
    counter("nv_inference_request_success", "Requests answered.", |model| {
        one(model.status.requests.succeeded as f64)
    }),
    counter(
        "nv_inference_request_failure",
        "Requests without an answer, by the reason as Triton names it.",
        failures,
    ),
    counter("nv_inference_count", "Rows answered.", |model| one(batch_rows(model))),
    counter("nv_inference_exec_count", "Batches answered.", |model| {
        one(model.totals.batch_execution.count as f64)
    }),
    counter(
        "nv_inference_request_duration_us",
        "Time of answered requests from arrival to answer, in us.",
        |model| us(model, |durations| durations.request),
    ),
    counter("nv_inference_queue_duration_us", "Time of answered requests in the queue, in us.", |model| {
        us(model, |durations| durations.queue)
    }),
    counter(
        "nv_inference_compute_input_duration_us",
        "Time to copy the inputs of answered requests into shared memory, in us.",
        |model| us(model, |durations| durations.compute_input),
    ),
    counter(
        "nv_inference_compute_infer_duration_us",
        "Time to execute the batches of answered requests, in us.",
        |model| us(model, |durations| durations.compute_infer),
    ),
    counter(
        "nv_inference_compute_output_duration_us",
        "Time to copy the outputs of the batches of answered requests, in us.",
        |model| us(model, |durations| durations.compute_output),
    ),
    counter("nv_cache_num_hits_per_model", "Requests that the cache of answers answered.", |model| {
        cached(model, |cache| cache.hits.count as f64)
    }),
    counter("nv_cache_num_misses_per_model", "Requests that the cache of answers did not answer.", |model| {
        cached(model, |cache| cache.misses.count as f64)
    }),
    counter("nv_cache_hit_duration_per_model", "Time to find answers in the cache, in us.", |model| {
        cached(model, |cache| cache.hits.time.as_micros() as f64)
    }),
    counter(
        "nv_cache_miss_duration_per_model",
        "Time of searches for answers that are not in the cache, in us.",
        |model| cached(model, |cache| cache.misses.time.as_micros() as f64),
    ),
    gauge("nv_inference_pending_request_count", "Requests in the queue.", |model| {
        one(model.status.queue as f64)
    }),
];

/// Returns a count of the cache. A model without a cache has none.
fn cached(model: &ModelMetrics, count: impl Fn(&CacheCounts) -> f64) -> Vec<MetricSample> {
    one(model.totals.cache.as_ref().map(count))
}

pub(super) const GPUS: &[Metric<GpuStatus>] = &[
    gauge(
        "nv_gpu_utilization",
        "Part of the last sampling period in which any kernel ran on the GPU, from 0 to 1.",
        utilisation,
    ),
    gauge("nv_gpu_memory_total_bytes", "Total GPU memory, to the MiB.", |gpu| {
        memory(gpu, |memory| memory.total_mib)
    }),
    gauge("nv_gpu_memory_used_bytes", "GPU memory in use by processes, to the MiB.", |gpu| {
        memory(gpu, |memory| memory.used_mib)
    }),
    gauge("nv_gpu_power_usage", "Power that the GPU draws, in W.", |gpu| {
        nvml_sample(gpu, |nvml| nvml.power_mw.map(|mw| f64::from(mw) / 1e3))
    }),
    gauge("nv_gpu_power_limit", "Power limit of the GPU, in W.", |gpu| {
        nvml_sample(gpu, |nvml| nvml.power_limit_mw.map(|mw| f64::from(mw) / 1e3))
    }),
    counter("nv_energy_consumption", "Energy that the GPU used since its driver was loaded, in J.", |gpu| {
        nvml_sample(gpu, |nvml| nvml.energy_mj.map(|mj| mj as f64 / 1e3))
    }),
];

pub(super) const MACHINE: &[Metric<MachineUsage>] = &[
    gauge(
        "nv_cpu_utilization",
        "Part of the time in which the host's CPUs were busy, from 0 to 1.",
        |machine| one(machine.cpu_busy),
    ),
    gauge("nv_cpu_memory_total_bytes", "Total memory of the host.", |machine| {
        one(machine.memory.map(|memory| memory.total as f64))
    }),
    gauge("nv_cpu_memory_used_bytes", "Memory of the host that is not available.", |machine| {
        one(machine.memory.map(|memory| memory.used as f64))
    }),
];

pub(super) fn write(text: &mut String, models: &[ModelMetrics], gpus: &[GpuStatus], machine: MachineUsage) {
    write_all(text, MODELS, models, |model| {
        format!("model=\"{}\",version=\"{}\"", escaped(&model.status.model), model.status.version)
    });
    write_all(text, GPUS, gpus, |gpu| {
        let uuid = gpu.nvml.as_ref().map_or("", |nvml| &nvml.uuid);
        format!("gpu_uuid=\"{}\"", escaped(uuid))
    });
    write_all(text, MACHINE, &[machine], |_| String::new());
}

/// Returns the failed requests by Triton's reasons. All failures of accepted requests count as
/// `BACKEND`: a worker failed or was missing, or the input was invalid.
fn failures(model: &ModelMetrics) -> Vec<MetricSample> {
    let requests = &model.status.requests;
    let reasons = [
        ("REJECTED", requests.rejected),
        ("CANCELED", requests.cancelled),
        ("BACKEND", requests.failed + requests.invalid),
        ("OTHER", 0),
    ];
    by("reason", &reasons)
}

fn us(model: &ModelMetrics, of: fn(&Durations) -> Duration) -> Vec<MetricSample> {
    one(of(&model.totals.durations).as_micros() as f64)
}
