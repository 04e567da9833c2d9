//! A sample contains the state of all models and GPUs, and the events since the previous sample.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::Snapshot;
use super::events::{self, HistoryEvent, RefusalTracker};
use super::parts::even_parts;
use super::usage::HourlyUsage;
use crate::status::{GpuStatus, HostStatus, ModelStatus, StreamStatus, sleep_note};
use shadowslice_control::controller::Mechanism;
use shadowslice_datapath::pipeline::{RecentLatencies, RequestCounts};
use shadowslice_datapath::readiness::HostState;
use shadowslice_shared::rounding::round;

/// A sample in the form in which the page receives it. Empty and zero fields are omitted.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct HistorySample {
    /// The time of the sample, in ms since 1970.
    time: u64,
    version: &'static str,
    host: HostState,
    ready: bool,
    policy: String,
    gpus: Vec<GpuSample>,
    pub(super) models: Vec<ModelSample>,
    #[serde(skip_serializing_if = "is_nothing")]
    pub(super) marks: Vec<HistoryEvent>,
}

#[derive(Debug, PartialEq, Serialize)]
struct GpuSample {
    name: String,
    sms: u32,
    #[serde(skip_serializing_if = "is_nothing")]
    used_mib: Option<u64>,
    #[serde(skip_serializing_if = "is_nothing")]
    total_mib: Option<u64>,
    #[serde(skip_serializing_if = "is_nothing")]
    watts: Option<u32>,
    #[serde(skip_serializing_if = "is_nothing")]
    busy_percent: Option<u32>,
    #[serde(skip_serializing_if = "is_nothing")]
    why: Option<String>,
}

/// The figures of a model over the time between two samples. The web page and `shadowslice top` show
/// them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelSample {
    pub(crate) name: String,
    gpu: usize,
    state: String,
    share_percent: u32,
    sms: u32,
    /// The number of SMs that the model gets if all models are busy (see [`even_parts`]).
    part_sms: f64,
    #[serde(skip_serializing_if = "is_nothing")]
    groups: Option<String>,
    mechanism: Mechanism,
    #[serde(skip_serializing_if = "is_nothing")]
    held: bool,
    slo_ms: f64,
    percentile: f64,
    #[serde(skip_serializing_if = "is_nothing")]
    pub(crate) p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "is_nothing")]
    pub(crate) p99_ms: Option<f64>,
    /// The mean time that answered requests waited in the queue, in ms.
    #[serde(skip_serializing_if = "is_nothing")]
    pub(crate) wait_ms: Option<f64>,
    /// The number of requests per second that were answered in time.
    #[serde(skip_serializing_if = "is_nothing")]
    in_time: f64,
    /// The number of requests per second that were answered late, or cancelled after the SLO had passed.
    #[serde(skip_serializing_if = "is_nothing")]
    late: f64,
    #[serde(skip_serializing_if = "is_nothing")]
    refused: f64,
    #[serde(skip_serializing_if = "is_nothing")]
    pub(crate) failed: f64,
    #[serde(skip_serializing_if = "is_nothing")]
    queue: usize,
    /// The number of requests per second in the last 10 s, as in `status`.
    #[serde(skip_serializing_if = "is_nothing")]
    pub(crate) rate: f64,
    #[serde(skip_serializing_if = "is_nothing")]
    pub(crate) refusals: f64,
    /// The percentage of the GPU's SM time that the model used in the last hour.
    #[serde(skip_serializing_if = "is_nothing")]
    pub(crate) hour_percent: f64,
    #[serde(skip_serializing_if = "is_nothing")]
    why: Option<String>,
    /// The streams of the model, as text.
    #[serde(skip_serializing_if = "is_nothing")]
    streams: Option<String>,
}

fn is_nothing<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl HistorySample {
    pub(super) fn between(
        before: &Snapshot,
        now: &Snapshot,
        at: SystemTime,
        refusing: &mut RefusalTracker,
    ) -> Self {
        let status = &now.status;
        let span = now.at.saturating_duration_since(before.at);
        let parts = parts(&status.gpus, &status.models);
        let models = status.models.iter().zip(parts).map(|(model, part)| {
            let earlier = before.status.models.iter().find(|earlier| earlier.instance() == model.instance());
            let latency = now.latencies.get(&model.name).copied();
            ModelSample::of(model, earlier, latency, part, span)
        });
        Self {
            time: at
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0)),
            version: env!("CARGO_PKG_VERSION"),
            host: status.host,
            ready: status.ready,
            policy: now.plan.policy.to_string(),
            gpus: status.gpus.iter().map(GpuSample::of).collect(),
            models: models.collect(),
            marks: events::between(&before.status, status, &now.plan, refusing),
        }
    }
}

impl HistorySample {
    /// Sets the use of the GPU in the last hour. The models have the order of `status`.
    pub(super) fn set_usage(&mut self, usage: &HourlyUsage, status: &HostStatus) {
        for (sample, model) in self.models.iter_mut().zip(&status.models) {
            sample.hour_percent = round(usage.percent(model, status));
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
    /// Returns the fraction of the requests that were answered in time, or `None` without requests.
    pub(crate) fn attainment(&self) -> Option<f64> {
        let offered = self.in_time + self.late + self.refused + self.failed;
        (offered > 0.0).then(|| self.in_time / offered)
    }

    /// Returns true if the model had no requests.
    pub(crate) fn is_idle(&self) -> bool {
        self.attainment().is_none() && self.queue == 0
    }

    /// Returns true if the model violated its SLO.
    pub(crate) fn violates_slo(&self) -> bool {
        self.attainment().is_some_and(|met| met * 100.0 < self.percentile)
    }

    fn of(
        model: &ModelStatus,
        before: Option<&ModelStatus>,
        latency: Option<RecentLatencies>,
        part_sms: f64,
        span: Duration,
    ) -> Self {
        // If a model was replaced, its counters started again from zero, so they are not compared
        // with the earlier counters.
        let counts = before.and_then(|before| model.requests.since(&before.requests));
        let RequestCounts { succeeded, within_slo, rejected, failed, cancelled_late, .. } =
            counts.unwrap_or(model.requests);
        let overload = model.overload.as_ref().map(|why| format!("overloaded: {why}"));
        let waited = model.queue_wait_s
            - before.filter(|_| counts.is_some()).map_or(0.0, |before| before.queue_wait_s);
        let wait_ms = (succeeded > 0).then(|| round(waited.max(0.0) * 1e3 / succeeded as f64));
        let a_second = |count: u64| round(count as f64 / span.as_secs_f64().max(1e-3));
        Self {
            name: model.name.clone(),
            gpu: model.gpu,
            state: crate::status::state(model),
            share_percent: model.share_percent,
            sms: model.sms,
            part_sms: round(part_sms),
            groups: model.groups.clone(),
            mechanism: model.mechanism,
            held: model.held,
            slo_ms: model.slo.latency_ms,
            percentile: model.slo.percentile,
            p50_ms: latency.map(|latency| round(latency.p50_ms)),
            p99_ms: latency.map(|latency| round(latency.p99_ms)),
            wait_ms,
            in_time: a_second(within_slo),
            late: a_second(succeeded.saturating_sub(within_slo) + cancelled_late),
            refused: a_second(rejected),
            failed: a_second(failed),
            queue: model.queue,
            rate: model.rates.map_or(0.0, |rates| round(rates.requests)),
            refusals: model.rates.map_or(0.0, |rates| round(rates.refused)),
            hour_percent: 0.0,
            streams: model.streams.as_ref().and_then(StreamStatus::text),
            why: model.why.clone().or(overload).or_else(|| sleep_note(model).filter(|_| model.sleeps())),
        }
    }
}
