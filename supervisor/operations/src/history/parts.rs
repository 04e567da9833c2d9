//! Divides a GPU's SMs among its models, for a chart whose parts add up to the whole GPU.

use crate::status::{GpuStatus, ModelStatus};
use shadowslice_shared::groups::Groups;

/// Returns the number of SMs that each model would get if all models were busy. SMs that several
/// models can use are divided evenly. A share without groups is not bound to particular SMs, so the
/// share counts as a fraction of every SM.
pub(super) fn even_parts(gpu: &GpuStatus, models: &[&ModelStatus]) -> Vec<f64> {
    let whole = [gpu.sms];
    let sizes = gpu.groups.as_deref().unwrap_or(&whole);
    let mut parts = vec![0.0; models.len()];
    for (group, &sms) in sizes.iter().enumerate() {
        let uses: Vec<_> = models.iter().map(|model| use_of(model, group)).collect();
        let crowd = uses.iter().sum::<f64>().max(1.0);
        parts.iter_mut().zip(&uses).for_each(|(part, used)| *part += f64::from(sms) * used / crowd);
    }
    parts
}

/// Returns the fraction of a group's SMs that the model can use.
fn use_of(model: &ModelStatus, group: usize) -> f64 {
    if model.workers.is_empty() {
        return 0.0;
    }
    match model.groups.as_ref().and_then(|groups| groups.parse::<Groups>().ok()) {
        Some(groups) => f64::from(groups.contains(group)),
        None => f64::from(model.share_percent.min(100)) / 100.0,
    }
}
