//! Shares: read per model, settled per GPU.

use shadowslice_shared::units::{Percent, Sms};

use super::reader::{Fields, Value};
use super::types::{Gpu, Share};
use super::units;

/// The SMs of a GPU that is not asked: an H100's or H200's.
const USUAL_SMS: u32 = 132;

/// The share that a model asks for.
pub(super) struct ShareSpec<'a> {
    /// The GPU's index.
    pub(super) gpu: usize,
    /// The model's name.
    pub(super) name: String,
    /// Where its share is written, or the model.
    pub(super) value: Value<'a>,
    initial: Option<Percent>,
    min: Percent,
    max: Percent,
}

/// Reads a model's share.
pub(super) fn wanted<'a>(
    model: &Fields<'a>,
    value: &Value<'a>,
    name: &str,
    gpu: usize,
    gpus: &[Gpu],
) -> ShareSpec<'a> {
    let fields = model.section("share", &["initial", "min", "max"]);
    let read = |key| fields.get(key).and_then(|value| value.parsed(units::percent));
    let (initial, min, max) = (read("initial"), read("min"), read("max"));
    let max = max.unwrap_or(Percent::WHOLE);
    let min = min.unwrap_or_else(|| default_min(gpus.get(gpu)).min(max));
    if min > max {
        fields.fault("min", format!("{min} is above max, {max}; lower it or raise max"));
    } else if let Some(initial) = initial.filter(|initial| !(min..=max).contains(initial)) {
        fields.fault(
            "initial",
            format!("{initial} is outside of min and max, {min} to {max}; choose one of these"),
        );
    }
    let value = fields.get("min").or_else(|| model.get("share")).unwrap_or_else(|| value.clone());
    ShareSpec { gpu, name: name.to_owned(), value, initial, min, max }
}

/// The smallest share that is worth one step of SMs.
fn default_min(gpu: Option<&Gpu>) -> Percent {
    let total = match gpu {
        Some(Gpu::Emulated { sms }) => sms.0,
        Some(Gpu::Cuda { .. }) | None => USUAL_SMS,
    };
    Percent::new((100 * Sms::STEP).div_ceil(total)).unwrap_or(Percent::WHOLE)
}

/// The shares of all models, in their order. Models without an initial share divide equally the
/// part that the other models on their GPU leave, each within its own `min` and `max`.
pub(super) fn settle(all: &[ShareSpec<'_>]) -> Vec<Share> {
    let share = |wanted: &ShareSpec<'_>| {
        let ShareSpec { min, max, initial, .. } = *wanted;
        // Where min and max are at fault, any share will do.
        let part = || equal_part(all, wanted.gpu).min(max).max(min);
        Share { initial: initial.unwrap_or_else(part), given: initial.is_some(), min, max }
    };
    all.iter().map(share).collect()
}

fn equal_part(all: &[ShareSpec<'_>], gpu: usize) -> Percent {
    let on_gpu = || all.iter().filter(|wanted| wanted.gpu == gpu);
    let given: u32 = on_gpu().filter_map(|wanted| wanted.initial).map(Percent::get).sum();
    let others =
        u32::try_from(on_gpu().filter(|wanted| wanted.initial.is_none()).count()).unwrap_or(u32::MAX);
    let part = 100_u32.saturating_sub(given) / others.max(1);
    Percent::new(part.max(1)).unwrap_or(Percent::WHOLE)
}

/// Minimal shares that do not fit on a GPU together are a fault.
pub(super) fn check_sums(all: &[ShareSpec<'_>], gpus: usize) {
    for gpu in 0..gpus {
        let on_gpu: Vec<_> = all.iter().filter(|wanted| wanted.gpu == gpu).collect();
        let sum: u32 = on_gpu.iter().map(|wanted| wanted.min.get()).sum();
        let mut before = 0;
        let over = on_gpu.iter().find(|wanted| {
            before += wanted.min.get();
            before > 100
        });
        if let Some(over) = over {
            let parts: Vec<_> =
                on_gpu.iter().take(MAX_NAMED).map(|w| format!("{} {}", w.name, w.min)).collect();
            let more = if on_gpu.len() > MAX_NAMED { ", ..." } else { "" };
            over.value.fault(format!(
                "the models on GPU {gpu} have share.min of {sum}% together ({}{more}) and 100% is all there is; lower one or use another GPU",
                parts.join(", ")
            ));
        }
    }
}

/// The most models that a message names.
const MAX_NAMED: usize = 5;
