//! Shares: read per model, settled per GPU.

use shadowslice_shared::units::{Percent, Sms};

use super::reader::{Fields, Value};
use super::types::{Config, GpuConfig, ModelConfig, ShareConfig};
use super::units;

/// Of a GPU that is not asked: an H100's or H200's.
const USUAL_SMS: u32 = 132;

const MAX_NAMED: usize = 5;

/// An initial share that is not given is the whole until it is settled.
pub(super) fn share(model: &Fields<'_>, gpu: Option<&GpuConfig>) -> ShareConfig {
    let fields = model.section("share", &["initial", "min", "max"]);
    let read = |key| fields.get(key).and_then(|value| value.parsed(units::percent));
    let (initial, min, max) = (read("initial"), read("min"), read("max"));
    let max = max.unwrap_or(Percent::WHOLE);
    let min = min.unwrap_or_else(|| default_min(gpu).min(max));
    if min > max {
        fields.fault("min", format!("{min} is above max, {max}; lower it or raise max"));
    } else if let Some(initial) = initial.filter(|initial| !(min..=max).contains(initial)) {
        fields.fault(
            "initial",
            format!("{initial} is outside of min and max, {min} to {max}; choose one of these"),
        );
    }
    ShareConfig { initial: initial.unwrap_or(Percent::WHOLE), given: initial.is_some(), min, max }
}

/// Worth one step of SMs.
fn default_min(gpu: Option<&GpuConfig>) -> Percent {
    let total = match gpu {
        Some(GpuConfig::Emulated { sms }) => sms.0,
        Some(GpuConfig::Cuda { .. }) | None => USUAL_SMS,
    };
    Percent::new((100 * Sms::STEP).div_ceil(total)).unwrap_or(Percent::WHOLE)
}

impl Config {
    /// Puts the models on these GPUs, one for each in their order.
    pub fn put(&mut self, gpus: &[usize]) {
        for (model, &gpu) in self.models.iter_mut().zip(gpus) {
            model.gpu = gpu;
        }
        settle(&mut self.models);
    }
}

/// Models without an initial share divide equally the part that the other models on their GPU
/// leave, each within its own `min` and `max`.
pub(super) fn settle(models: &mut [ModelConfig]) {
    let parts: Vec<_> = models.iter().map(|model| equal_part(models, model.gpu)).collect();
    for (model, part) in models.iter_mut().zip(parts).filter(|(model, _)| !model.share.given) {
        // Where min and max are at fault, any share will do.
        model.share.initial = part.min(model.share.max).max(model.share.min);
    }
}

fn equal_part(models: &[ModelConfig], gpu: usize) -> Percent {
    let on_gpu = models.iter().filter(|model| model.gpu == gpu);
    let (given, others): (Vec<_>, Vec<_>) = on_gpu.map(|model| model.share).partition(|share| share.given);
    let given: u32 = given.iter().map(|share| share.initial.get()).sum();
    let others = u32::try_from(others.len()).unwrap_or(u32::MAX);
    let part = 100_u32.saturating_sub(given) / others.max(1);
    Percent::new(part.max(1)).unwrap_or(Percent::WHOLE)
}

/// Minimal shares that do not fit on a GPU together are a fault, if they are written, and the GPUs
/// too. `items` are where the models stand.
pub(super) fn check_sums(models: &[ModelConfig], items: &[Value<'_>], gpus: usize) {
    for gpu in 0..gpus {
        let counts = |(model, item): &(&ModelConfig, &Value<'_>)| {
            model.gpu == gpu && !model.gpu_auto && written(item).is_some()
        };
        let on_gpu: Vec<_> = models.iter().zip(items).filter(counts).collect();
        let sum: u32 = on_gpu.iter().map(|(model, _)| model.share.min.get()).sum();
        let mut before = 0;
        let over = on_gpu.iter().find(|(model, _)| {
            before += model.share.min.get();
            before > 100
        });
        if let Some((_, item)) = over {
            let named = on_gpu.iter().take(MAX_NAMED);
            let parts: Vec<_> =
                named.map(|(model, _)| format!("{} {}", model.name, model.share.min)).collect();
            let more = if on_gpu.len() > MAX_NAMED { ", ..." } else { "" };
            written(item).as_ref().unwrap_or(item).fault(format!(
                "the models on GPU {gpu} have share.min of {sum}% together ({}{more}) and 100% is all there is; lower one or use another GPU",
                parts.join(", ")
            ));
        }
    }
}

fn written<'a>(item: &Value<'a>) -> Option<Value<'a>> {
    item.entry("share")?.entry("min")
}
