//! The metadata and the warm-up plan that follow from a loaded model and its configuration. This module
//! does no I/O.

use std::borrow::Cow;
use std::time::Duration;

use shadowslice_shared::boot::{BootRefusal, LoadedModel, WarmTime, WarmUp};
use shadowslice_shared::tensor::TensorSpec;

use crate::process::plan_warm_up;
use shadowslice_config::{BatchConfig, EngineConfig, ModelConfig, OnLate, batch_sizes};
use shadowslice_datapath::pipeline::Metadata;

/// Returns the metadata of a loaded model, or the reason why the model cannot be served as configured.
pub(super) fn describe(
    model: &ModelConfig,
    limit: Option<&BatchLimit>,
    loaded: &LoadedModel,
) -> Result<Metadata, BootRefusal> {
    Ok(Metadata {
        name: model.served_name().to_owned(),
        version: model.version.number.to_string(),
        platform: match model.engine {
            EngineConfig::OnnxRuntime { .. } => "onnxruntime_onnx",
            EngineConfig::Python { .. } => "python",
            EngineConfig::Emulated { .. } => "emulated",
        },
        max_batch: batching(&limited(&model.batch, limit), loaded)?.0,
        streams: loaded.streams,
        inputs: loaded.inputs.clone(),
        optional: loaded.optional.clone(),
        outputs: loaded.outputs.clone(),
    })
}

/// Returns the plan for the warm-up of a worker.
pub fn warm_up(
    model: &ModelConfig,
    limit: Option<&BatchLimit>,
    loaded: &LoadedModel,
) -> Result<WarmUp, BootRefusal> {
    let (max, sizes) = batching(&limited(&model.batch, limit), loaded)?;
    let plan = plan_warm_up(&loaded.inputs, max > 0, sizes, &model.warmup)?;
    Ok(WarmUp { batch_is_given: model.batch.max.is_some(), ..plan })
}

/// The largest batch of a model that cannot have the default batch. The configuration of the model gives
/// no size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchLimit {
    /// The largest batch, in rows. It is 0 if the first axis is not the batch axis.
    pub max: u32,
    /// The reason why larger batches are not used.
    pub why: String,
}

/// The time above which a batch is slow, even if the SLO allows more. Fewer sizes are warmed up only if
/// batches are slow.
const SLOW_BATCH: Duration = Duration::from_secs(1);

/// The multiple of the SLO's latency up to which a size is useful. It is above 1, because the host may be
/// busy during the warm-up.
const SLO_MARGIN: u32 = 2;

/// Returns the longest time of a useful batch. Returns `None` if every size is useful, for example because
/// the configuration gives the size.
pub(super) fn useful_for(model: &ModelConfig) -> Option<Duration> {
    let is_bound = model.batch.max.is_none() && model.queue.on_late == OnLate::Reject;
    is_bound.then(|| model.slo.latency.saturating_mul(SLO_MARGIN).max(SLOW_BATCH))
}

impl BatchLimit {
    /// Returns the limit that follows from these times. Only the last may be too long to be useful.
    /// Returns `None` if every size is useful.
    pub(super) fn of_use(useful: Option<Duration>, slo: Duration, times: &[WarmTime]) -> Option<Self> {
        let slow = times.last().filter(|last| useful.is_some_and(|useful| last.took > useful))?;
        let (rows, took) = (slow.rows, slow.took.as_secs_f64());
        let max = times.iter().rev().nth(1).map_or(rows, |before| before.rows);
        let slo = slo.as_secs_f64();
        Some(Self { max, why: format!("a batch of {rows} rows takes {took:.1} s, and the SLO is {slo} s") })
    }

    /// Returns the limit after a batch of `failed` rows failed. Returns `None` if no smaller batch exists,
    /// or if the configuration gives the size.
    pub(super) fn below(batch: &BatchConfig, failed: u32, why: &str) -> Option<Self> {
        let smaller = batch_sizes(BatchConfig::DEFAULT_MAX).into_iter().rfind(|&size| size < failed);
        let max = smaller.filter(|_| batch.max.is_none())?;
        Some(Self { max, why: format!("a batch of {failed} rows failed: {why}") })
    }
}

fn limited<'b>(batch: &'b BatchConfig, limit: Option<&BatchLimit>) -> Cow<'b, BatchConfig> {
    match limit {
        Some(limit) if batch.max.is_none() => {
            Cow::Owned(BatchConfig { max: Some(limit.max), ..batch.clone() })
        }
        _ => Cow::Borrowed(batch),
    }
}

/// Returns the largest batch, and the sizes to warm up.
fn batching(batch: &BatchConfig, loaded: &LoadedModel) -> Result<(u32, Vec<u32>), BootRefusal> {
    if let Some(max @ 1..) = batch.max.filter(|_| loaded.streams.is_some()) {
        let why = format!(
            "batch.max is {max}, but the model streams, and its requests cannot share a batch; remove batch.max"
        );
        return Err(BootRefusal::Model(why));
    }
    let fixed = loaded.inputs.iter().chain(&loaded.outputs).find(|tensor| !opens_with_batch(tensor));
    match (batch.max, fixed) {
        (Some(max @ 1..), Some(tensor)) => Err(BootRefusal::Model(format!(
            "batch.max is {max}, but '{}' has shape {:?}, whose first axis is not a batch of variable size; \
             set `batch: {{max: 0}}` or export the model with a dynamic first axis",
            tensor.name, tensor.shape
        ))),
        // The sizes of a step are its numbers of streams.
        _ if let Some(streams) = loaded.streams => Ok((0, batch_sizes(streams.per_step))),
        _ => Ok(batch.resolve(fixed.is_none())),
    }
}

fn opens_with_batch(tensor: &TensorSpec) -> bool {
    tensor.shape.first() == Some(&-1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_batch_becomes_smaller_and_a_given_one_stays() {
        let batch = |max| BatchConfig { max, sizes: None, max_delay: Duration::ZERO };
        let below = |max, failed| BatchLimit::below(&batch(max), failed, "too slow").map(|limit| limit.max);
        assert_eq!(
            [32, 17, 16, 2, 1].map(|failed| below(None, failed)),
            [16, 16, 8, 1, 0].map(|max| (max > 0).then_some(max))
        );
        assert_eq!(below(Some(32), 32), None);
        let times =
            [1, 2, 4].map(|rows| WarmTime { rows, took: Duration::from_secs(rows.into()), error: 0.0 });
        let of_use =
            |useful, times| BatchLimit::of_use(useful, Duration::from_secs(1), times).map(|limit| limit.max);
        assert_eq!(of_use(Some(Duration::from_secs(3)), &times[..]), Some(2));
        assert_eq!(of_use(Some(Duration::from_secs(4)), &times[..]), None);
        assert_eq!(of_use(None, &times[..]), None, "a CPU does not show how fast a GPU is");
        assert_eq!(of_use(Some(Duration::ZERO), &times[..1]), Some(1));
        let limit = BatchLimit { max: 4, why: String::new() };
        let resolved = |max| limited(&batch(max), Some(&limit)).resolve(true);
        assert_eq!(resolved(None), (4, vec![1, 2, 4]));
        assert_eq!(resolved(Some(8)).0, 8);
    }
}
