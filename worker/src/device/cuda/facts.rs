//! The properties of a GPU, for `shadowslice-worker --probe`.

use cudarc::driver::{result, sys};
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::groups::Division;

use super::partition::SmGroups;
use super::{CudaError, CudaGpu, cuda_error, open};

/// The properties of a GPU, as the driver reports them.
#[derive(Debug, serde::Serialize)]
pub struct GpuFacts {
    /// The number of SMs that this process may use.
    pub sms: u32,
    /// True if this process is a client of MPS.
    pub mps: bool,
    pub name: String,
    /// The GPU's UUID, in the format of NVIDIA's tools.
    pub uuid: String,
    /// The CUDA version that the driver supports, for example 13000 for 13.0.
    pub driver: i32,
    /// The size of the GPU's memory, in bytes.
    pub memory_total: usize,
    /// The free GPU memory in bytes, measured while this process has a context.
    pub memory_free: usize,
    /// The division of the SMs into groups, or `None` if the driver cannot divide them.
    pub division: Option<Division>,
}

/// Initialises the driver without creating a context. A failure of `cuInit` is ignored, because
/// [`CudaGpu::open`] reports the same failure.
pub fn initialise() -> Result<(), BootRefusal> {
    open::load_driver().map_err(|why| BootRefusal::Setup(why.to_string()))?;
    result::init().ok();
    Ok(())
}

/// Reads the properties of the GPU.
pub fn facts(gpu: &CudaGpu) -> Result<GpuFacts, CudaError> {
    let failed = cuda_error("read the GPU's properties");
    let mps = gpu.context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
    let mut driver = 0;
    // SAFETY: the call only writes one number.
    unsafe { sys::cuDriverGetVersion(&mut driver) }.result().map_err(&failed)?;
    let memory = gpu.memory()?;
    let bytes = gpu.context.uuid().map_err(&failed)?.bytes;
    Ok(GpuFacts {
        sms: gpu.sms().0,
        mps: mps.unwrap_or(0) != 0,
        name: gpu.context.name().map_err(&failed)?,
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
