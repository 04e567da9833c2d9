//! The memory of an emulated GPU. A profile states how much memory a worker takes. No memory is
//! allocated, but workers exchange weights as they do on a real GPU.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::memfd::{MFdFlags, memfd_create};
use shadowslice_shared::boot::DeviceMemory;
use shadowslice_shared::profile::ProcessMemory;
use shadowslice_shared::weights::{self, RegionContent};

/// Returns the memory that the profile states. `brought` is the size of the weights that this
/// worker allocated. It is 0 if the supervisor, at the other end of this socket, already holds the
/// weights. Otherwise, this worker sends them to the supervisor.
pub(super) fn take(supervisor: Option<&OwnedFd>, profile: &ProcessMemory) -> io::Result<DeviceMemory> {
    let ProcessMemory { weights: bytes, activations: scratch, .. } = *profile;
    let mut memory = DeviceMemory { weights: bytes, brought: bytes, scratch };
    let Some(supervisor) = supervisor.filter(|_| bytes > 0) else { return Ok(memory) };
    let content = RegionContent { fingerprint: [0; 32], bytes };
    while let Some(region) = weights::receive(supervisor)? {
        if region.content == content {
            memory.brought = 0;
            return Ok(memory);
        }
    }
    let file = memfd_create("shadowslice-weights", MFdFlags::MFD_CLOEXEC)?;
    weights::send(supervisor, &content, file.as_fd())?;
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_worker_brings_weights() {
        let profile = ProcessMemory { context: 5, weights: 7, activations: 3 };
        let (ours, theirs) = weights::socket_pair().unwrap();
        let first = take(Some(&theirs), &profile).unwrap();
        assert_eq!(first, DeviceMemory { weights: 7, brought: 7, scratch: 3 });
        let kept = weights::receive(&ours).unwrap().unwrap();
        let (ours, theirs) = weights::socket_pair().unwrap();
        weights::send(&ours, &kept.content, kept.file.as_fd()).unwrap();
        assert_eq!(take(Some(&theirs), &profile).unwrap(), DeviceMemory { brought: 0, ..first });
        let larger = ProcessMemory { weights: 8, ..profile };
        weights::send(&ours, &kept.content, kept.file.as_fd()).unwrap();
        assert_eq!(take(Some(&theirs), &larger).unwrap().brought, 8, "other weights are not these");
    }
}
