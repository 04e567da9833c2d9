//! The GPUs.

use shadowslice_shared::units::Sms;

use super::reader::{Fields, Value};
use super::types::{CudaDevice, GpuConfig, Partitioning};

const MAX_GPUS: usize = 64;

/// An H100's or H200's.
const DEFAULT_SMS: u32 = 132;

const MAX_SMS: u32 = 1024;

/// GPU 0 where the configuration gives none.
pub(super) fn gpus(root: &Fields<'_>) -> Vec<GpuConfig> {
    let Some(list) = root.get("gpus") else {
        return vec![GpuConfig::Cuda { device: CudaDevice::Index(0), partition: Partitioning::Mps }];
    };
    let Some(items) = list.items_up_to(MAX_GPUS, "GPUs") else { return Vec::new() };
    if list.is_list() && items.is_empty() {
        list.fault("no GPU; give `[{device: 0}]` or `[{device: emulated}]`, or remove the key");
    }
    let mut gpus: Vec<GpuConfig> = Vec::new();
    for item in &items {
        // A faulty GPU keeps its place, so that models refer to the GPUs that were meant.
        let gpu = gpu(item).unwrap_or(GpuConfig::Emulated { sms: Sms(DEFAULT_SMS) });
        if gpus.iter().any(|other| is_same(other, &gpu)) {
            item.fault("this GPU is in the list already; name each once and let models share it");
        }
        gpus.push(gpu);
    }
    gpus
}

fn gpu(item: &Value<'_>) -> Option<GpuConfig> {
    let fields = item.fields(&["device", "sms", "partition"]);
    let device = fields.required("device", "give a GPU's index or UUID, or `emulated`")?;
    if device.text()? == "emulated" {
        fields.forbidden(
            "partition",
            "an emulated GPU is always shared out; only a real one is told how; remove this",
        );
        let sms = fields.or("sms", DEFAULT_SMS, |value| value.whole(2..=MAX_SMS));
        return Some(GpuConfig::Emulated { sms: Sms(sms) });
    }
    fields.forbidden("sms", "only an emulated GPU is told its SMs; remove this");
    let words = [("mps", Partitioning::Mps), ("none", Partitioning::None)];
    let partition = fields.or("partition", Partitioning::Mps, |value| value.one_of(&words));
    device.parsed(cuda).map(|device| GpuConfig::Cuda { device, partition })
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
        "not a GPU; give its index, such as 0, its UUID, such as \"GPU-5a7c...\" of `nvidia-smi -L`, or `emulated`"
            .to_owned()
    })
}
