//! Reads the key `share` of models, and sets the shares that the configuration does not give.

use shadowslice_shared::units::{Percent, Sms};

use super::reader::{Fields, Value};
use super::types::{Config, GpuConfig, ModelConfig, ShareConfig};
use super::units;

/// The assumed number of SMs of a real GPU. An H100 or H200 has this number.
pub(super) const USUAL_SMS: u32 = 132;

/// The largest number of models that an error message names.
const MAX_NAMED: usize = 5;

/// Reads a model's share. If the initial share is missing, it is 100 % until [`set_initial_shares`]
/// replaces it.
pub(super) fn share(model: &Fields<'_>, gpu: Option<&GpuConfig>) -> ShareConfig {
    let fields = model.section("share");
    let share = |value: &Value<'_>| value.parsed(units::percent);
    let (initial, max) = (fields.optional("initial", share), fields.read("max", share));
    let min = fields.optional("min", share).unwrap_or_else(|| default_min(gpu).min(max));
    if min > max {
        fields.fault("min", format!("{min} is above share.max, {max}; lower it or raise share.max"));
    } else if let Some(initial) = initial.filter(|initial| !(min..=max).contains(initial)) {
        fields.fault(
            "initial",
            format!("{initial} is outside share.min and share.max; use a share from {min} to {max}"),
        );
    }
    ShareConfig { initial: initial.unwrap_or(Percent::WHOLE), given: initial.is_some(), min, max }
}

/// Returns the default of `share.min`: the smallest share that gives [`Sms::STEP`] SMs.
fn default_min(gpu: Option<&GpuConfig>) -> Percent {
    let total = match gpu {
        Some(GpuConfig::Emulated { sms, .. }) => sms.0,
        Some(GpuConfig::Cuda { .. }) | None => USUAL_SMS,
    };
    Percent::new((100 * Sms::STEP).div_ceil(total)).unwrap_or(Percent::WHOLE)
}

impl Config {
    /// Assigns a GPU to each model, and sets the shares that depend on the GPU. `gpus` contains one
    /// GPU index for each model, in the order of the models.
    pub fn assign_gpus(&mut self, gpus: &[usize]) {
        for (model, &gpu) in self.models.iter_mut().zip(gpus) {
            model.gpu = gpu;
        }
        set_initial_shares(&mut self.models);
    }
}

/// Sets the initial share of each model without an initial share in the configuration. These models
/// get equal parts of the share that the other models on the same GPU leave. Each part is limited
/// to the model's `min` and `max`.
pub(super) fn set_initial_shares(models: &mut [ModelConfig]) {
    let parts: Vec<_> = models.iter().map(|model| equal_part(models, model.gpu)).collect();
    for (model, part) in models.iter_mut().zip(parts).filter(|(model, _)| !model.share.given) {
        // If `min` and `max` have a fault, the initial share does not matter.
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

/// Checks that the `share.min` values of each GPU's models add up to at most 100 %. Only counts
/// models for which the configuration gives `share.min` and a fixed GPU. `items` are the models in
/// the document.
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
            let names: Vec<_> = on_gpu.iter().map(|(model, _)| &model.name[..]).take(MAX_NAMED).collect();
            written(item).as_ref().unwrap_or(item).fault(format!(
                "the share.min of the models on GPU {gpu} ({}) add up to {sum}%, more than 100%; lower one or use another GPU",
                names.join(", ")
            ));
        }
    }
}

fn written<'a>(item: &Value<'a>) -> Option<Value<'a>> {
    item.entry("share")?.entry("min")
}
