//! Reads the key `gpus`.

use shadowslice_shared::units::Sms;

use super::keys::PARTITIONS;
use super::reader::Value;
use super::shares::USUAL_SMS;
use super::types::{CudaDevice, GpuConfig};

/// Reads the list of GPUs.
pub(super) fn gpus(list: &Value<'_>) -> Vec<GpuConfig> {
    let mut gpus: Vec<GpuConfig> = Vec::new();
    for item in &list.items() {
        // A placeholder replaces a faulty GPU, so that the other GPUs keep their indices.
        let gpu = gpu(item).unwrap_or(GpuConfig::Emulated { sms: Sms(USUAL_SMS), memory: None });
        if gpus.iter().any(|other| is_same(other, &gpu)) {
            item.fault("this GPU is already in the list; list each GPU once, as models share it");
        }
        gpus.push(gpu);
    }
    gpus
}

fn gpu(item: &Value<'_>) -> Option<GpuConfig> {
    let fields = item.fields();
    let device = fields.required("device", "give the index or UUID of a GPU, or `emulated`")?;
    let memory = item.entry("memory").and_then(|value| value.size());
    if device.text()? == "emulated" {
        fields.forbid(&["partition"], "only a real GPU has this; an emulated GPU always enforces shares");
        let sms = Sms(fields.read("sms", |value| value.whole()));
        return Some(GpuConfig::Emulated { sms, memory });
    }
    fields.forbid(&["sms"], "only an emulated GPU has this");
    let partition = fields.read("partition", |value| value.one_of(&PARTITIONS));
    device.parsed(cuda).map(|device| GpuConfig::Cuda { device, partition, memory })
}

fn is_same(one: &GpuConfig, other: &GpuConfig) -> bool {
    match (one, other) {
        (GpuConfig::Cuda { device, .. }, GpuConfig::Cuda { device: other, .. }) => device == other,
        _ => false,
    }
}

fn cuda(text: &str) -> Result<CudaDevice, String> {
    let is_uuid = |uuid: &str| !uuid.is_empty() && uuid.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
    if text.strip_prefix("GPU-").is_some_and(is_uuid) {
        return Ok(CudaDevice::Uuid(text.to_owned()));
    }
    let index = text.parse().ok().filter(|index| *index < 1024);
    index.map(CudaDevice::Index).ok_or_else(|| {
        format!(
            "invalid GPU `{text}`; use its index, for example 0, its UUID from `nvidia-smi -L`, for example \
             \"GPU-5a7c...\", or `emulated`"
        )
    })
}
