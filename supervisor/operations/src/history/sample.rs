//! One sample: how models and GPUs are, and what happened since the sample before.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::Seen;
use super::marks::{self, Mark, Refusing};
use super::parts::even_parts;
use crate::figures::significant;
use crate::status::{GpuStatus, ModelStatus};
use shadowslice_datapath::pipeline::{Counts, Look};
use shadowslice_datapath::readiness::Host;

/// What is absent is nothing or zero.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Sample {
    /// In ms since 1970.
    time: u64,
    version: &'static str,
    host: Host,
    ready: bool,
    policy: String,
    gpus: Vec<GpuSample>,
    models: Vec<ModelSample>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) marks: Vec<Mark>,
}

#[derive(Debug, PartialEq, Serialize)]
struct GpuSample {
    name: String,
    sms: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    used_mib: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    total_mib: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    watts: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    busy_percent: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

#[derive(Debug, PartialEq, Serialize)]
struct ModelSample {
    name: String,
    gpu: usize,
    state: String,
    share_percent: u32,
    sms: u32,
    /// See [`even_parts`].
    part_sms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    groups: Option<String>,
    mechanism: String,
    #[serde(skip_serializing_if = "is_false")]
    held: bool,
    slo_ms: f64,
    percentile: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_ms: Option<f64>,
    /// Requests a second, by how they ended.
    #[serde(skip_serializing_if = "is_zero")]
    in_time: f64,
    #[serde(skip_serializing_if = "is_zero")]
    late: f64,
    #[serde(skip_serializing_if = "is_zero")]
    refused: f64,
    #[serde(skip_serializing_if = "is_zero")]
    failed: f64,
    #[serde(skip_serializing_if = "is_none_there")]
    queue: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

fn is_zero(rate: &f64) -> bool {
    *rate == 0.0
}

fn is_none_there(count: &usize) -> bool {
    *count == 0
}

impl Sample {
    pub(super) fn between(before: &Seen, now: &Seen, at: SystemTime, refusing: &mut Refusing) -> Self {
        let status = &now.status;
        let span = now.at.saturating_duration_since(before.at);
        let parts = parts(&status.gpus, &status.models);
        let models = status.models.iter().zip(parts).map(|(model, part)| {
            let earlier = before.status.models.iter().find(|earlier| earlier.name == model.name);
            let look = now.looks.get(&model.name).copied();
            ModelSample::of(model, earlier, look, span).with_part(part)
        });
        Self {
            time: at
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0)),
            version: env!("CARGO_PKG_VERSION"),
            host: status.host,
            ready: status.ready,
            policy: now.plan.policy.clone(),
            gpus: status.gpus.iter().map(GpuSample::of).collect(),
            models: models.collect(),
            marks: marks::between(&before.status, status, &now.plan, refusing),
        }
    }
}

fn parts(gpus: &[GpuStatus], models: &[ModelStatus]) -> Vec<f64> {
    let mut parts = vec![0.0; models.len()];
    for gpu in gpus {
        let places: Vec<_> = (0..models.len()).filter(|place| models[*place].gpu == gpu.index).collect();
        let there: Vec<_> = places.iter().map(|place| &models[*place]).collect();
        places.iter().zip(even_parts(gpu, &there)).for_each(|(place, part)| parts[*place] = part);
    }
    parts
}

impl GpuSample {
    fn of(gpu: &GpuStatus) -> Self {
        let nvml = gpu.nvml.as_ref();
        let memory = nvml.and_then(|nvml| nvml.memory);
        Self {
            name: nvml.map_or(&gpu.device, |nvml| &nvml.name).clone(),
            sms: gpu.sms,
            used_mib: memory.map(|memory| memory.used_mib),
            total_mib: memory.map(|memory| memory.total_mib),
            watts: nvml.and_then(|nvml| nvml.power_mw).map(|mw| mw / 1000),
            busy_percent: nvml.and_then(|nvml| nvml.utilisation_percent),
            why: gpu.why.clone(),
        }
    }
}

impl ModelSample {
    fn of(model: &ModelStatus, before: Option<&ModelStatus>, look: Option<Look>, span: Duration) -> Self {
        let grown = Grown::between(before.map(|before| &before.requests), &model.requests);
        let a_second = |count: u64| significant(count as f64 / span.as_secs_f64().max(1e-3));
        Self {
            name: model.name.clone(),
            gpu: model.gpu,
            state: crate::status::state(model),
            share_percent: model.share_percent,
            sms: model.sms,
            part_sms: 0.0,
            groups: model.groups.clone(),
            mechanism: model.mechanism.clone(),
            held: model.held,
            slo_ms: model.slo.latency_ms,
            percentile: model.slo.percentile,
            p50_ms: look.map(|look| significant(look.p50_ms)),
            p99_ms: look.map(|look| significant(look.p99_ms)),
            in_time: a_second(grown.in_time),
            late: a_second(grown.late),
            refused: a_second(grown.refused),
            failed: a_second(grown.failed),
            queue: model.queue,
            why: model.why.clone(),
        }
    }

    fn with_part(self, part: f64) -> Self {
        Self { part_sms: significant(part), ..self }
    }
}

/// Requests that came to an end since the sample before.
struct Grown {
    in_time: u64,
    late: u64,
    refused: u64,
    failed: u64,
}

impl Grown {
    /// A model that was replaced counts from zero.
    fn between(before: Option<&Counts>, now: &Counts) -> Self {
        let zero = Counts::default();
        let before =
            before.filter(|before| before.succeeded <= now.succeeded && before.rejected <= now.rejected);
        let before = before.unwrap_or(&zero);
        let answered = now.succeeded - before.succeeded;
        let in_time = now.within_slo.saturating_sub(before.within_slo);
        Self {
            in_time,
            late: answered.saturating_sub(in_time),
            refused: now.rejected - before.rejected,
            failed: now.failed.saturating_sub(before.failed),
        }
    }
}
