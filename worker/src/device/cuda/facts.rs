//! What the driver says of a GPU: for `shadowslice-worker --probe`.

use cudarc::driver::{result, sys};
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::groups::Division;

use super::partition::SmGroups;
use super::{CudaFault, CudaGpu, fault, open};

/// What a GPU is, as its driver says.
#[derive(Debug, serde::Serialize)]
pub struct GpuFacts {
    /// SMs that this process may use.
    pub sms: u32,
    /// Whether this process is a client of MPS.
    pub mps: bool,
    /// Its name.
    pub name: String,
    /// Its UUID, as the driver's tools write it.
    pub uuid: String,
    /// The CUDA version of the driver: 13000 is 13.0.
    pub driver: i32,
    /// Bytes of its memory.
    pub memory_total: usize,
    /// Bytes that are free, with this process's context.
    pub memory_free: usize,
    /// How its SMs divide into groups; `None` where they do not.
    pub division: Option<Division>,
}

/// Initialises the driver, without a context. If it cannot be, opening the GPU will say why.
pub fn initialise() -> Result<(), BootRefusal> {
    open::load_driver().map_err(|why| BootRefusal::Setup(why.to_string()))?;
    result::init().ok();
    Ok(())
}

/// Asks the driver.
pub fn facts(gpu: &CudaGpu) -> Result<GpuFacts, CudaFault> {
    let asked = fault("be asked what it is");
    let mps = gpu.context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
    let mut driver = 0;
    // SAFETY: it writes one number.
    unsafe { sys::cuDriverGetVersion(&mut driver) }.result().map_err(&asked)?;
    let memory = gpu.memory()?;
    let bytes = gpu.context.uuid().map_err(&asked)?.bytes;
    Ok(GpuFacts {
        sms: gpu.sms().0,
        mps: mps.unwrap_or(0) != 0,
        name: gpu.context.name().map_err(&asked)?,
        uuid: uuid(bytes.map(|byte| byte as u8)),
        driver,
        memory_total: memory.total,
        memory_free: memory.free,
        division: SmGroups::of(gpu).ok().map(|groups| groups.division().clone()),
    })
}

fn uuid(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
