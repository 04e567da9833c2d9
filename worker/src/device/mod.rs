//! The device that a worker runs on. The device determines the worker's SMs and the end of each
//! batch.

pub mod cuda;
pub mod emulated;
mod emulated_memory;
pub mod timeline;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::boot::{Assignment, BootRefusal, DeviceMemory, DeviceSpec, WorkerPurpose};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::profile::{Profile, StartTimes};
use shadowslice_shared::units::Sms;

use crate::clock::now_ns;
use cuda::CudaGpu;
use emulated::EmulatedGpu;

/// The device on which a worker runs.
#[derive(Debug)]
pub enum ComputeDevice {
    /// The host's CPU, which only computes reference answers and adds no emulated time.
    Host,
    Emulated(Box<EmulatedGpu>),
    Cuda(Arc<CudaGpu>),
}

/// A batch that is executing on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the batch ends with `finish`"]
pub struct StartedBatch {
    /// The start on the device's timeline, in ns since boot.
    at_ns: u64,
    /// The time at which the computation began, in ns since boot.
    seen_ns: u64,
    rows: u32,
}

impl ComputeDevice {
    pub fn open(assignment: &Assignment, pool: Option<OwnedFd>) -> Result<Self, BootRefusal> {
        match (assignment.purpose, assignment.device) {
            (WorkerPurpose::Reference, _) => Ok(Self::Host),
            (_, DeviceSpec::Emulated { sms, seat }) => {
                let execution = assignment.profile.as_ref().map(|profile| profile.execution.clone());
                let division = assignment.partition.as_ref().map(|partition| partition.division.clone());
                let gpu = EmulatedGpu::open(sms, division, seat, pool, execution);
                gpu.map(|gpu| Self::Emulated(Box::new(gpu)))
            }
            (_, DeviceSpec::Cuda) => CudaGpu::open().map(Self::Cuda),
        }
    }

    /// Returns the number of SMs that the device actually assigned to this worker; 0 on the host.
    pub fn sms(&self) -> Sms {
        match self {
            Self::Host => Sms(0),
            Self::Emulated(gpu) => gpu.sms(),
            Self::Cuda(gpu) => gpu.sms(),
        }
    }

    /// Returns the free memory in bytes, or 0 if the device is not a real GPU.
    pub fn free_memory(&self) -> u64 {
        let free = self.gpu().and_then(|gpu| gpu.memory().ok()).map(|memory| memory.free as u64);
        free.unwrap_or(0)
    }

    /// Takes the memory that an emulated GPU's profile states. `weights` is the socket over which
    /// workers and supervisor exchange the model's weights.
    pub fn take_memory(
        &mut self,
        profile: Option<&Profile>,
        weights: Option<&OwnedFd>,
    ) -> Result<DeviceMemory, BootRefusal> {
        match (self, profile) {
            (Self::Emulated(gpu), Some(profile)) => {
                gpu.take_memory(weights, profile.memory).map_err(|error| {
                    BootRefusal::Setup(format!("cannot exchange weights with the supervisor: {error}"))
                })
            }
            _ => Ok(DeviceMemory::default()),
        }
    }

    /// Returns the emulated GPU, or `None` on another device.
    pub fn emulated(&mut self) -> Option<&mut EmulatedGpu> {
        match self {
            Self::Host | Self::Cuda(_) => None,
            Self::Emulated(gpu) => Some(gpu),
        }
    }

    /// Returns the number of pieces of a batch of `rows` rows, which is the largest, or the reason why
    /// batches are not cut.
    pub fn pieces(&self, rows: u32) -> Result<u32, String> {
        match self {
            Self::Host => Err("the host's CPU runs the batches".to_owned()),
            Self::Emulated(gpu) => gpu.pieces(rows),
            Self::Cuda(gpu) => gpu.pieces(),
        }
    }

    pub fn gpu(&self) -> Option<&Arc<CudaGpu>> {
        match self {
            Self::Host | Self::Emulated(_) => None,
            Self::Cuda(gpu) => Some(gpu),
        }
    }

    /// Returns the minimum duration of each phase of a worker start on this device.
    pub fn start_times(&self, profile: Option<&Profile>) -> StartTimes {
        match self {
            Self::Host | Self::Cuda(_) => StartTimes::default(),
            Self::Emulated(_) => profile.map(|profile| profile.start).unwrap_or_default(),
        }
    }

    pub fn start(&mut self, rows: u32, groups: Groups, sent_ns: u64) -> StartedBatch {
        match self {
            Self::Host | Self::Cuda(_) => {
                let now = now_ns();
                StartedBatch { at_ns: now, seen_ns: now, rows }
            }
            Self::Emulated(gpu) => gpu.start(rows, groups, sent_ns),
        }
    }

    /// Ends a batch whose answer has been computed, and returns the batch's duration.
    pub fn finish(&mut self, started: StartedBatch) -> Duration {
        match self {
            Self::Host | Self::Cuda(_) => Duration::from_nanos(now_ns().saturating_sub(started.at_ns)),
            Self::Emulated(gpu) => gpu.finish(started),
        }
    }

    /// Releases the SMs until the next batch, so that other workers can use them.
    pub fn idle(&mut self) {
        match self {
            Self::Host | Self::Cuda(_) => {}
            Self::Emulated(gpu) => gpu.leave(),
        }
    }
}
