//! The data about a host's driver and GPUs.

use std::fmt;

use shadowslice_config::CudaDevice;

#[derive(Debug, Clone, PartialEq)]
pub struct NvmlHost {
    pub driver: String,
    /// The newest CUDA version that the driver supports.
    pub cuda: CudaVersion,
    /// The GPUs by NVML's index, or the reason why NVML cannot query a GPU, for example a lost one.
    pub gpus: Vec<Result<Gpu, String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    pub major: u32,
    pub minor: u32,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Gpu {
    pub identity: Identity,
    /// The major and minor number of the compute capability.
    pub capability: (i32, i32),
    pub compute_mode: ComputeMode,
    pub mig: bool,
    pub usage: Usage,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The index of the GPU in NVML and `nvidia-smi`.
    pub index: u32,
    /// The UUID, which begins with `GPU-`.
    pub uuid: String,
    pub name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// The GPU accepts any number of processes.
    Default,
    /// The GPU accepts one process, which may be the MPS server.
    ExclusiveProcess,
    Prohibited,
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    pub memory: Memory,
    /// The part of the last sampling period in which any kernel ran, in percent. A kernel counts
    /// even if it uses few SMs. `None` if the GPU does not report this.
    pub utilisation_percent: Option<u32>,
    pub power: Power,
    /// The processes that compute on the GPU, without duplicates.
    pub processes: Vec<GpuProcess>,
}

/// A GPU's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub used: u64,
    /// The free memory. Memory that the driver reserves is neither used nor free.
    pub free: u64,
    pub total: u64,
}

/// The power figures of a GPU. Not every GPU reports all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Power {
    pub draw_mw: Option<u32>,
    pub limit_mw: Option<u32>,
    /// The energy since the driver was loaded, in mJ.
    pub energy_mj: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    pub pid: u32,
    /// The GPU memory of the process in bytes, or `None` if the driver does not report it.
    pub bytes: Option<u64>,
}

impl CudaVersion {
    /// Converts CUDA's version number: 13000 is 13.0.
    pub fn of(number: i32) -> Self {
        let number = number.unsigned_abs();
        Self { major: number / 1000, minor: number % 1000 / 10 }
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Identity {
    /// Returns true if `device` matches this GPU. As in CUDA, a prefix of the UUID is sufficient.
    pub fn is(&self, device: &CudaDevice) -> bool {
        match device {
            CudaDevice::Index(index) => self.index == *index,
            CudaDevice::Uuid(uuid) => {
                let own = self.uuid.get(..uuid.len());
                own.is_some_and(|own| own.eq_ignore_ascii_case(uuid))
            }
        }
    }
}

impl Usage {
    pub fn bytes_of(&self, pid: i32) -> Option<u64> {
        let process = self.processes.iter().find(|process| i32::try_from(process.pid) == Ok(pid));
        process.and_then(|process| process.bytes)
    }
}

/// Merges NVML's lists of processes, because an MPS client can be on both lists.
pub(super) fn each_once(listed: impl IntoIterator<Item = GpuProcess>) -> Vec<GpuProcess> {
    let mut found: Vec<GpuProcess> = Vec::new();
    for process in listed {
        match found.iter_mut().find(|known| known.pid == process.pid) {
            Some(known) => known.bytes = known.bytes.max(process.bytes),
            None => found.push(process),
        }
    }
    found
}
