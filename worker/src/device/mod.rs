//! What a worker runs on: how many SMs it was given, and when a batch is through.

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

#[derive(Debug)]
pub enum Device {
    /// Computes reference answers, and adds no time.
    Host,
    Emulated(EmulatedGpu),
    Cuda(Arc<CudaGpu>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the batch is through when it was handed to `finish`"]
pub struct Started {
    /// On the device's timeline.
    at_ns: u64,
    /// By the clock, when its answer began to be computed.
    seen_ns: u64,
    rows: u32,
}

impl Device {
    pub fn open(assignment: &Assignment, pool: Option<OwnedFd>) -> Result<Self, BootRefusal> {
        match (assignment.purpose, assignment.device) {
            (WorkerPurpose::Reference, _) => Ok(Self::Host),
            (_, DeviceSpec::Emulated { sms, seat }) => {
                let execution = assignment.profile.as_ref().map(|profile| profile.execution.clone());
                let division = assignment.partition.as_ref().map(|partition| partition.division.clone());
                EmulatedGpu::open((sms, division), seat, pool, execution).map(Self::Emulated)
            }
            (_, DeviceSpec::Cuda) => CudaGpu::open().map(Self::Cuda),
        }
    }

    /// The SMs that the device really gave; none on the host.
    pub fn sms(&self) -> Sms {
        match self {
            Self::Host => Sms(0),
            Self::Emulated(gpu) => gpu.sms(),
            Self::Cuda(gpu) => gpu.sms(),
        }
    }

    /// Bytes; 0 where the device is no real GPU.
    pub fn free_memory(&self) -> u64 {
        let free = self.gpu().and_then(|gpu| gpu.memory().ok()).map(|(free, _)| free as u64);
        free.unwrap_or(0)
    }

    /// As an emulated GPU's profile says. `weights`: the socket over which a model's weights come
    /// and go.
    pub fn take_memory(
        &self,
        profile: Option<&Profile>,
        weights: Option<&OwnedFd>,
    ) -> Result<DeviceMemory, BootRefusal> {
        match (self, profile) {
            (Self::Emulated(_), Some(profile)) => emulated_memory::take(weights, &profile.memory)
                .map_err(|error| BootRefusal::Setup(format!("weights cannot be passed on: {error}"))),
            _ => Ok(DeviceMemory::default()),
        }
    }

    pub fn gpu(&self) -> Option<&Arc<CudaGpu>> {
        match self {
            Self::Host | Self::Emulated(_) => None,
            Self::Cuda(gpu) => Some(gpu),
        }
    }

    /// The least times that starting takes on this device.
    pub fn start_times(&self, profile: Option<&Profile>) -> StartTimes {
        match self {
            Self::Host | Self::Cuda(_) => StartTimes::default(),
            Self::Emulated(_) => profile.map(|profile| profile.start).unwrap_or_default(),
        }
    }

    pub fn start(&mut self, rows: u32, groups: Groups, sent_ns: u64) -> Started {
        match self {
            Self::Host | Self::Cuda(_) => {
                let now = now_ns();
                Started { at_ns: now, seen_ns: now, rows }
            }
            Self::Emulated(gpu) => gpu.start(rows, groups, sent_ns),
        }
    }

    /// Returns how long the batch executed. Its answer has been computed already.
    pub fn finish(&mut self, started: Started) -> Duration {
        match self {
            Self::Host | Self::Cuda(_) => Duration::from_nanos(now_ns().saturating_sub(started.at_ns)),
            Self::Emulated(gpu) => gpu.finish(started),
        }
    }

    /// No further batch is there: the SMs are left to others.
    pub fn idle(&mut self) {
        match self {
            Self::Host | Self::Cuda(_) => {}
            Self::Emulated(gpu) => gpu.leave(),
        }
    }
}
