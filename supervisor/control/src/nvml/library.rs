//! The calls of NVML.

use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::device::Device;
use nvml_wrapper::enum_wrappers::device::ComputeMode as NvmlComputeMode;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::event::EventSet;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use super::facts::{
    ComputeMode, CudaVersion, Gpu, GpuProcess, Identity, Memory, NvmlHost, Power, Usage, each_once,
};
use super::watch::{Driver, XidEvent, Xids};

/// The maximum number of attempts to list processes. A list can grow between count and listing.
const MAX_LIST_ATTEMPTS: u32 = 4;

#[derive(Debug, thiserror::Error)]
pub enum NvmlFault {
    #[error(
        "cannot load NVML, the library of NVIDIA's driver; install the driver; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    )]
    Load(#[source] NvmlError),
    #[error(
        "NVIDIA's driver is not loaded; load it (`modprobe nvidia`), or restart the host if it was just installed"
    )]
    NoDriver(#[source] NvmlError),
    #[error(
        "NVIDIA's driver and its library have different versions; after an update of the driver, restart the host"
    )]
    Mismatch(#[source] NvmlError),
    #[error("cannot initialise NVML; `nvidia-smi` may show why")]
    Start(#[source] NvmlError),
    #[error("NVML does not report {what}; `nvidia-smi` may show why")]
    Ask {
        what: &'static str,
        #[source]
        source: NvmlError,
    },
    #[error("NVML does not report the errors of GPU {uuid}; `dmesg` shows them as `Xid`")]
    Register {
        uuid: String,
        #[source]
        source: NvmlError,
    },
}

#[derive(Debug)]
pub struct NvmlLibrary {
    nvml: Nvml,
}

impl NvmlLibrary {
    pub fn open() -> Result<Self, NvmlFault> {
        let nvml = Nvml::init().map_err(|error| match error {
            NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_) => NvmlFault::Load(error),
            NvmlError::DriverNotLoaded => NvmlFault::NoDriver(error),
            NvmlError::LibRmVersionMismatch => NvmlFault::Mismatch(error),
            _ => NvmlFault::Start(error),
        })?;
        Ok(Self { nvml })
    }

    pub fn host(&self) -> Result<NvmlHost, NvmlFault> {
        let driver = queried("the driver's version", self.nvml.sys_driver_version())?;
        let cuda = queried("the CUDA version", self.nvml.sys_cuda_driver_version())?;
        let count = queried("the number of GPUs", self.nvml.device_count())?;
        let gpu = |index| self.gpu(index).map_err(|error| shadowslice_shared::errors::chain(&error));
        Ok(NvmlHost { driver, cuda: CudaVersion::of(cuda), gpus: (0..count).map(gpu).collect() })
    }

    fn gpu(&self, index: u32) -> Result<Gpu, NvmlFault> {
        let device = queried("a GPU's data", self.nvml.device_by_index(index))?;
        let capability = queried("a GPU's compute capability", device.cuda_compute_capability())?;
        Ok(Gpu {
            identity: identity(&device)?,
            capability: (capability.major, capability.minor),
            compute_mode: compute_mode(&device),
            mig: queried("a GPU's MIG mode", optional(device.mig_mode()))?
                .is_some_and(|mode| mode.current != 0),
            usage: usage(&device)?,
        })
    }

    fn device(&self, uuid: &str) -> Result<Device<'_>, NvmlError> {
        self.nvml.device_by_uuid(uuid)
    }
}

impl Driver for NvmlLibrary {
    fn identities(&self) -> Result<Vec<Identity>, NvmlFault> {
        let count = queried("the number of GPUs", self.nvml.device_count())?;
        let devices = (0..count).filter_map(|index| self.nvml.device_by_index(index).ok());
        devices.map(|device| identity(&device)).collect()
    }

    fn usage(&self, uuid: &str) -> Result<Usage, NvmlFault> {
        usage(&queried("a GPU's data", self.device(uuid))?)
    }

    fn xids<'a>(&'a self, uuids: &[String]) -> Result<Box<dyn Xids + 'a>, NvmlFault> {
        let mut set = queried("GPU errors", self.nvml.create_event_set())?;
        for uuid in uuids {
            let failed = |source| NvmlFault::Register { uuid: uuid.clone(), source };
            let device = self.device(uuid).map_err(failed)?;
            set = device
                .register_events(EventTypes::CRITICAL_XID_ERROR, set)
                .map_err(|error| failed(error.error))?;
        }
        Ok(Box::new(XidSubscription(set)))
    }
}

struct XidSubscription<'a>(EventSet<'a>);

impl Xids for XidSubscription<'_> {
    fn wait(&mut self, at_most: Duration) -> Result<Option<XidEvent>, NvmlFault> {
        let ms = u32::try_from(at_most.as_millis()).unwrap_or(u32::MAX);
        let event = match self.0.wait(ms) {
            Err(NvmlError::Timeout) => return Ok(None),
            event => queried("GPU errors", event)?,
        };
        let Some(xid) = event.event_data else { return Ok(None) };
        let xid = match xid {
            XidError::Value(xid) => xid,
            XidError::Unknown => 0,
        };
        Ok(Some(XidEvent { uuid: queried("the GPU of an error", event.device.uuid())?, xid }))
    }
}

/// Adds to an error the fact that NVML did not report.
fn queried<T>(what: &'static str, answer: Result<T, NvmlError>) -> Result<T, NvmlFault> {
    answer.map_err(|source| NvmlFault::Ask { what, source })
}

/// Returns `None` for a fact that this GPU does not support.
fn optional<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Err(NvmlError::NotSupported) => Ok(None),
        answer => answer.map(Some),
    }
}

fn identity(device: &Device<'_>) -> Result<Identity, NvmlFault> {
    Ok(Identity {
        index: queried("a GPU's index", device.index())?,
        uuid: queried("a GPU's UUID", device.uuid())?,
        name: queried("a GPU's name", device.name())?,
    })
}

fn compute_mode(device: &Device<'_>) -> ComputeMode {
    match device.compute_mode() {
        Ok(NvmlComputeMode::Default) => ComputeMode::Default,
        Ok(NvmlComputeMode::ExclusiveProcess) => ComputeMode::ExclusiveProcess,
        Ok(NvmlComputeMode::Prohibited) => ComputeMode::Prohibited,
        _ => ComputeMode::Unknown,
    }
}

fn usage(device: &Device<'_>) -> Result<Usage, NvmlFault> {
    let memory = queried("a GPU's memory", device.memory_info())?;
    let utilisation = queried("a GPU's utilisation", optional(device.utilization_rates()))?;
    let computing = listed(|| device.running_compute_processes())?;
    let clients = listed(|| device.mps_running_compute_processes())?;
    Ok(Usage {
        memory: Memory { used: memory.used, free: memory.free, total: memory.total },
        utilisation_percent: utilisation.map(|rates| rates.gpu),
        power: power(device),
        processes: each_once(computing.into_iter().chain(clients)),
    })
}

/// Returns the power figures, with `None` for a figure that cannot be read. No decision depends on
/// these figures.
fn power(device: &Device<'_>) -> Power {
    Power {
        draw_mw: device.power_usage().ok(),
        limit_mw: device.power_management_limit().ok(),
        energy_mj: device.total_energy_consumption().ok(),
    }
}

/// Returns a list of processes, which is empty if the GPU cannot list them.
fn listed(list: impl Fn() -> Result<Vec<ProcessInfo>, NvmlError>) -> Result<Vec<GpuProcess>, NvmlFault> {
    let grew = |answer: &Result<_, _>| matches!(answer, Err(NvmlError::InsufficientSize(_)));
    let mut answer = list();
    for _ in 1..MAX_LIST_ATTEMPTS {
        if !grew(&answer) {
            break;
        }
        answer = list();
    }
    let processes = queried("a GPU's processes", optional(answer))?.unwrap_or_default();
    let process = |info: ProcessInfo| GpuProcess {
        pid: info.pid,
        bytes: match info.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
    };
    Ok(processes.into_iter().map(process).collect())
}
