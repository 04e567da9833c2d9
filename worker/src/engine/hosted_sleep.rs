//! The sleep of a hosted model on the GPU. The host allocates its memory in the arena of the worker's thread.
//! While the model sleeps, the arena is released, and its content waits in host memory.
#![allow(unsafe_code)] // This module releases memory that recordings use.

use std::sync::Arc;

use shadowslice_shared::batch::SleepReply;
use shadowslice_shared::errors::chain;

use super::hosted::Hosted;
use crate::device::cuda::CudaGpu;
use crate::device::cuda::arena::{KeptContent, ThreadArena};

/// The proof that a hosted model computes the same after a wake.
#[derive(Debug)]
pub(super) enum HostedProof {
    /// The model has not slept yet.
    Unknown,
    /// The answers of the model differ in each run.
    Impossible,
    /// The outputs of the smallest recording before the last sleep, for the inputs that it contains. They
    /// are empty for a model without recordings.
    Outputs(Vec<Vec<u8>>),
}

impl Hosted {
    /// Returns the size of the memory that the model releases while it sleeps, in bytes.
    pub(super) fn releasable_bytes(&self) -> Result<u64, String> {
        self.sleeper().map(|(_, arena)| arena.bytes())
    }

    /// Releases the arena. All batches must have ended.
    pub(super) fn release_memory(&mut self, pin: bool) -> Result<SleepReply, String> {
        let (gpu, _) = self.sleeper()?;
        gpu.synchronize_context().map_err(|fault| chain(&fault))?;
        self.wake_proof = match self.wake_proof {
            // A step of streams changes their states, so its outputs cannot be compared.
            _ if self.streams => HostedProof::Impossible,
            HostedProof::Impossible => HostedProof::Impossible,
            HostedProof::Outputs(_) => HostedProof::Outputs(self.replay_smallest(gpu)?),
            HostedProof::Unknown => {
                let outputs = self.replay_smallest(gpu)?;
                let is_same = self.replay_smallest(gpu)? == outputs;
                if is_same { HostedProof::Outputs(outputs) } else { HostedProof::Impossible }
            }
        };
        let content = KeptContent::Addresses(self.host.arena_content()?);
        let (_, arena) = self.sleeper()?;
        let released = arena.bytes();
        // SAFETY: all work of the model has ended, and the worker runs no batch before the wake.
        let pinned = unsafe { arena.release(pin, &content) }.map_err(|fault| chain(&fault))?;
        Ok(SleepReply { released, pinned, ..SleepReply::default() })
    }

    /// Brings the memory back, and proves that the smallest recording computes the same as before. If this
    /// fails, the memory stays released.
    pub(super) fn restore_memory(&mut self) -> Result<(), String> {
        let (gpu, arena) = self.sleeper()?;
        arena.restore().and_then(|()| gpu.synchronize()).map_err(|fault| chain(&fault))?;
        let HostedProof::Outputs(before) = &self.wake_proof else { return Ok(()) };
        let computed = self.replay_smallest(gpu);
        if computed.as_ref() == Ok(before) {
            return Ok(());
        }
        gpu.synchronize().ok();
        // SAFETY: the batch of the proof has ended, and no other batch has started.
        unsafe { arena.release_again() };
        let differs = "after the wake, the model computes another answer than before";
        Err(computed.err().unwrap_or_else(|| differs.to_owned()))
    }

    /// Returns the GPU and the arena of a model that can sleep.
    fn sleeper(&self) -> Result<(&Arc<CudaGpu>, &ThreadArena), String> {
        let real = self.gpu.as_ref().zip(self.arena.as_deref());
        let real = real.ok_or_else(|| "the model is not on a CUDA GPU".to_owned())?;
        match real.1.bytes() {
            0 => Err("PyTorch has allocated no GPU memory for the model".to_owned()),
            _ => Ok(real),
        }
    }

    /// Returns the outputs of the smallest recording for the inputs that it contains. Returns nothing for a
    /// model without recordings.
    fn replay_smallest(&self, gpu: &CudaGpu) -> Result<Vec<Vec<u8>>, String> {
        let smallest = self.recorded.iter().min_by_key(|recorded| recorded.rows());
        let outputs = smallest.map_or(Ok(Vec::new()), |recorded| recorded.replay(gpu));
        outputs.map_err(|fault| chain(&fault))
    }
}
