//! The memory of an emulated GPU. A profile states how much memory a worker takes. No memory is
//! allocated, but workers exchange weights as they do on a real GPU.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use shadowslice_shared::boot::DeviceMemory;
use shadowslice_shared::profile::ProcessMemory;
use shadowslice_shared::weights::{self, RegionContent};

/// The memory that a worker takes on an emulated GPU.
#[derive(Debug, Default)]
pub(super) struct EmulatedMemory {
    profile: ProcessMemory,
    /// The socket to the supervisor, which keeps the weights.
    supervisor: Option<OwnedFd>,
    /// The size in bytes of the weights that this worker allocated.
    brought: u64,
}

impl EmulatedMemory {
    /// Takes the memory that the profile states. If the supervisor already holds the weights, uses them.
    /// Otherwise, allocates the weights and sends them to the supervisor.
    pub(super) fn take(supervisor: Option<&OwnedFd>, profile: ProcessMemory) -> io::Result<Self> {
        let supervisor = supervisor.map(OwnedFd::try_clone).transpose()?;
        let mut memory = Self { profile, supervisor, brought: 0 };
        let content = memory.content();
        if let Some(supervisor) = memory.supervisor.as_ref().filter(|_| content.bytes > 0) {
            while let Some(region) = weights::receive(supervisor)? {
                if region.content == content {
                    return Ok(memory);
                }
            }
        }
        memory.bring()?;
        Ok(memory)
    }

    /// Allocates the weights, and sends them to the supervisor.
    pub(super) fn bring(&mut self) -> io::Result<()> {
        let content = self.content();
        self.brought = content.bytes;
        let Some(supervisor) = self.supervisor.as_ref().filter(|_| content.bytes > 0) else { return Ok(()) };
        let file = memfd_create("shadowslice-weights", MFdFlags::MFD_CLOEXEC)?;
        weights::send(supervisor, &content, file.as_fd())
    }

    fn content(&self) -> RegionContent {
        RegionContent { fingerprint: [0; 32], bytes: self.profile.weights }
    }

    pub(super) fn usage(&self) -> DeviceMemory {
        let ProcessMemory { weights, activations: scratch, .. } = self.profile;
        DeviceMemory { weights, brought: self.brought, scratch }
    }

    /// Returns the time in which the weights come back to the GPU.
    pub(super) fn wake_time(&self) -> Duration {
        self.profile.wake_time()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_worker_brings_weights() {
        let profile = ProcessMemory { context: 5, weights: 7, activations: 3 };
        let (ours, theirs) = weights::socket_pair().unwrap();
        let take = |socket, profile| EmulatedMemory::take(Some(socket), profile).unwrap();
        let mut first = take(&theirs, profile);
        assert_eq!(first.usage(), DeviceMemory { weights: 7, brought: 7, scratch: 3 });
        let kept = weights::receive(&ours).unwrap().unwrap();
        first.bring().unwrap();
        assert_eq!(weights::receive(&ours).unwrap().unwrap().content, kept.content, "after a wake");
        let (ours, theirs) = weights::socket_pair().unwrap();
        weights::send(&ours, &kept.content, kept.file.as_fd()).unwrap();
        assert_eq!(take(&theirs, profile).usage(), DeviceMemory { brought: 0, ..first.usage() });
        let larger = ProcessMemory { weights: 8, ..profile };
        weights::send(&ours, &kept.content, kept.file.as_fd()).unwrap();
        assert_eq!(take(&theirs, larger).usage().brought, 8, "other weights are not these");
    }
}
