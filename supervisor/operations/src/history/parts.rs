//! Divides a GPU's SMs among its models, for a chart whose parts add up to the whole GPU.

use crate::status::{GpuStatus, ModelStatus};
use shadowslice_datapath::pipeline::{BatchSms, divide};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::Sms;

/// Returns the number of SMs that each model would get if all models were busy, as for batches that execute
/// at the same time ([`divide`]).
pub(super) fn even_parts(gpu: &GpuStatus, models: &[&ModelStatus]) -> Vec<f64> {
    let whole = [gpu.sms];
    let sizes: Vec<Sms> = gpu.groups.as_deref().unwrap_or(&whole).iter().copied().map(Sms).collect();
    let batches: Vec<BatchSms> = models.iter().map(|model| batch(gpu, model)).collect();
    divide(&sizes, &batches)
}

/// Returns the SMs that a batch of the model could use. A share without groups is not bound to particular
/// SMs. A model without workers uses none.
fn batch(gpu: &GpuStatus, model: &ModelStatus) -> BatchSms {
    let groups = model.groups.as_ref().and_then(|groups| groups.parse::<Groups>().ok());
    let share = match groups {
        _ if model.workers.is_empty() => 0.0,
        Some(_) => f64::from(gpu.sms),
        None => f64::from(gpu.sms) * f64::from(model.share_percent.min(100)) / 100.0,
    };
    BatchSms { groups: groups.unwrap_or(Groups::WHOLE), share }
}
