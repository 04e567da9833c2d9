//! What is known of a host's driver and GPUs, as plain data.

use std::fmt;

use shadowslice_config::CudaDevice;

#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    pub driver: String,
    /// The newest CUDA that it supports.
    pub cuda: CudaVersion,
    /// Its GPUs by NVML's index; for a GPU that cannot be asked (a lost one, say), the reason.
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
    /// The major and minor number of its compute capability.
    pub capability: (i32, i32),
    pub compute_mode: ComputeMode,
    pub mig: bool,
    pub usage: Usage,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// NVML's index, which is that of `nvidia-smi`.
    pub index: u32,
    /// `GPU-...`.
    pub uuid: String,
    pub name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number.
    Default,
    /// One, which may be the MPS server.
    ExclusiveProcess,
    Prohibited,
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    pub memory: Memory,
    /// The part of the last moments in which any kernel ran, however few SMs it took. `None` where
    /// the GPU does not say.
    pub utilisation_percent: Option<u32>,
    pub power: Power,
    /// The processes that compute on it, each once.
    pub processes: Vec<GpuProcess>,
}

/// A GPU's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub used: u64,
    /// What the driver keeps for itself is neither used nor free.
    pub free: u64,
    pub total: u64,
}

/// Not every GPU tells all of these figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Power {
    pub draw_mw: Option<u32>,
    pub limit_mw: Option<u32>,
    /// Since its driver was loaded, in mJ.
    pub energy_mj: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    pub pid: u32,
    /// The memory that it has there, in bytes. `None` where the driver does not say.
    pub bytes: Option<u64>,
}

impl CudaVersion {
    /// From the number that CUDA writes: 13000 is 13.0.
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
    /// Whether the configuration means this GPU. A UUID may be cut short, as CUDA permits.
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

/// Merges NVML's lists of processes: an MPS client may be on both of them.
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
