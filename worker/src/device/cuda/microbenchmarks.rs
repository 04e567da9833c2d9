//! The cost on this GPU of operations that a worker does not use yet: for `shadowslice-worker
//! --probe`.

use std::mem::MaybeUninit;
use std::process::Command;
use std::time::Instant;

use cudarc::driver::{DriverError, result, sys};
use shadowslice_shared::boot::{BootRefusal, SHARE_VARIABLE};
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::units::Percent;

use super::partition::SmGroups;
use super::{CudaFault, CudaGpu, fault, open};

/// How often each is done.
const TIMES: usize = 50;

/// Bytes of the memory that is shared with another process.
const SHARED_BYTES: usize = 64 << 20;

/// What a GPU is, as its driver says.
#[derive(Debug, serde::Serialize)]
pub struct Facts {
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
pub fn facts(gpu: &CudaGpu) -> Result<Facts, CudaFault> {
    let asked = fault("be asked what it is");
    let mps = gpu.context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
    let mut driver = 0;
    // SAFETY: it writes one number.
    unsafe { sys::cuDriverGetVersion(&mut driver) }.result().map_err(&asked)?;
    let (memory_free, memory_total) = gpu.memory()?;
    let bytes = gpu.context.uuid().map_err(&asked)?.bytes;
    Ok(Facts {
        sms: gpu.sms().0,
        mps: mps.unwrap_or(0) != 0,
        name: gpu.context.name().map_err(&asked)?,
        uuid: uuid(bytes.map(|byte| byte as u8)),
        driver,
        memory_total,
        memory_free,
        division: SmGroups::of(gpu).ok().map(|groups| groups.division().clone()),
    })
}

fn uuid(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Times of green contexts, in µs.
#[derive(Debug, serde::Serialize)]
pub struct GreenTimes {
    /// SMs of each half.
    pub sms: Vec<u32>,
    /// Making a context on half of the SMs, and a stream in it.
    pub create_us: Vec<f64>,
    /// A small piece of work on the stream of the one half, then, behind it, on that of the other.
    pub switch_us: Vec<f64>,
    /// The same two pieces on one stream.
    pub stay_us: Vec<f64>,
}

/// Makes green contexts on the two halves of the SMs, and moves work from one to the other.
pub fn green(gpu: &CudaGpu) -> Result<GreenTimes, CudaFault> {
    let failed = fault("be divided into green contexts");
    let undivided = |_| failed(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED));
    let groups = SmGroups::of(gpu).map_err(undivided)?;
    let half = Groups::first(groups.division().count() / 2);
    let rest = (0..groups.division().count()).filter(|&group| !half.contains(group)).collect();
    let mut create_us = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        let begun = Instant::now();
        groups.context(half)?.stream()?;
        create_us.push(us(begun));
    }
    let (first, second) = (groups.context(half)?, groups.context(rest)?);
    let (first, second) = (first.stream()?, second.stream()?);
    // SAFETY: allocated here, used by the work below only, freed after it.
    let place = unsafe { result::malloc_sync(4096) }.map_err(&failed)?;
    let event = gpu.context.new_event(None).map_err(&failed)?;
    let timed = |from: sys::CUstream, to: sys::CUstream| {
        let begun = Instant::now();
        // SAFETY: streams, event and memory live beyond this.
        unsafe {
            result::memset_d8_async(place, 1, 4096, from)?;
            result::event::record(event.cu_event(), from)?;
            result::stream::wait_event(to, event.cu_event(), sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)?;
            result::memset_d8_async(place, 2, 4096, to)?;
            result::stream::synchronize(to)?;
        }
        Ok::<f64, DriverError>(us(begun))
    };
    let repeat = |from, to| (0..TIMES).map(|_| timed(from, to)).collect::<Result<Vec<_>, _>>();
    let switch_us = repeat(first.raw(), second.raw()).map_err(&failed)?;
    let stay_us = repeat(first.raw(), first.raw()).map_err(&failed)?;
    // SAFETY: all work on it has been waited for.
    unsafe { result::free_sync(place) }.map_err(&failed)?;
    let sms = [half, rest].map(|groups_of| groups.division().sms(groups_of).0).to_vec();
    Ok(GreenTimes { sms, create_us, switch_us, stay_us })
}

/// Times of sharing memory between processes, in µs.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct IpcTimes {
    /// Opening another process's memory.
    pub open_us: Vec<f64>,
    /// Closing it again.
    pub close_us: Vec<f64>,
}

/// Has another process open memory of this process; returns what that process wrote.
pub fn share_memory(gpu: &CudaGpu, mut opener: Command) -> Result<std::io::Result<Vec<u8>>, CudaFault> {
    let failed = fault("share memory with another process");
    // SAFETY: allocated here, and freed after the other process has ended.
    let memory = unsafe { result::malloc_sync(SHARED_BYTES) }.map_err(&failed)?;
    let mut handle = MaybeUninit::<sys::CUipcMemHandle>::uninit();
    // SAFETY: the driver fills in the handle of memory that is ours.
    let handle = unsafe {
        sys::cuIpcGetMemHandle(handle.as_mut_ptr(), memory).result().map_err(&failed)?;
        handle.assume_init()
    };
    let hex: String = handle.reserved.iter().map(|&byte| format!("{:02x}", byte as u8)).collect();
    let output = opener.arg(hex).output();
    gpu.synchronize()?;
    // SAFETY: nothing else uses it any more.
    unsafe { result::free_sync(memory) }.map_err(&failed)?;
    Ok(output.map(|output| output.stdout))
}

/// Opens and closes the memory that a handle in hexadecimal stands for.
pub fn open_shared(handle: &[u8; 64]) -> Result<IpcTimes, CudaFault> {
    let failed = fault("open another process's memory");
    let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
    let (mut open_us, mut close_us) = (Vec::with_capacity(TIMES), Vec::with_capacity(TIMES));
    for _ in 0..TIMES {
        let mut memory = 0;
        let flag = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let begun = Instant::now();
        // SAFETY: the driver checks the handle, and fills in the address.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut memory, handle, flag) }.result().map_err(&failed)?;
        open_us.push(us(begun));
        let begun = Instant::now();
        // SAFETY: opened above, and not used.
        unsafe { sys::cuIpcCloseMemHandle(memory) }.result().map_err(&failed)?;
        close_us.push(us(begun));
    }
    Ok(IpcTimes { open_us, close_us })
}

/// Gives this process its share as late as possible: just before it first touches the GPU.
#[allow(clippy::disallowed_methods)] // that it can still be set is what is measured
pub fn set_share(share: Percent) {
    // SAFETY: threads of libraries are idle as nothing was computed yet, and none of ours runs.
    unsafe { std::env::set_var(SHARE_VARIABLE, share.get().to_string()) };
}

fn us(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e6
}
