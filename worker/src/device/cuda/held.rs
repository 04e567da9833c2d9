//! [Holds](shadowslice_shared::hold) of this worker's batches: the GPU reads the hold word before each piece,
//! and the worker ends holds that last too long.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use shadowslice_shared::hold::{HoldWord, MAX_HOLD};
use std::os::fd::AsFd;

use super::{CudaError, CudaGpu, cuda_error};

/// A hold word that the GPU can read.
#[derive(Debug)]
pub(super) struct RegisteredHold {
    word: Arc<HoldWord>,
    address: sys::CUdeviceptr,
    /// The hold that the last look found, or 0.
    seen: AtomicU32,
}

impl RegisteredHold {
    /// Returns `None` if the GPU cannot wait for the word, whose memory is registered with the driver.
    pub(super) fn of(word: &Arc<HoldWord>, gpu: &CudaGpu) -> Option<Self> {
        let start: *const AtomicU32 = word.word();
        let mut address = 0;
        // SAFETY: the memory is registered, and the driver fills in the address.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, start.cast_mut().cast(), 0) };
        found.result().ok()?;
        let hold = Self { word: Arc::clone(word), address, seen: AtomicU32::new(0) };
        // The word is still zero, so this wait ends at once.
        hold.delay(gpu).and_then(|()| gpu.synchronize()).ok().map(|()| hold)
    }

    /// Makes the compute stream wait until the word is zero.
    fn delay(&self, gpu: &CudaGpu) -> Result<(), CudaError> {
        let equal = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32;
        let stream = gpu.compute.cu_stream();
        // SAFETY: the address belongs to registered host memory, which stays mapped while the stream exists.
        let waits = unsafe { sys::cuStreamWaitValue32_v2(stream, self.address, 0, equal) };
        waits.result().map_err(cuda_error("wait for a value in host memory"))
    }

    /// Returns the memory of a word, and its size in bytes.
    pub(super) fn memory(word: &HoldWord) -> (NonNull<u8>, u64) {
        (NonNull::from(word.word()).cast(), shadowslice_shared::hold::HOLD_BYTES)
    }
}

impl CudaGpu {
    /// Makes the compute stream wait while the supervisor holds this worker.
    pub(super) fn wait_while_held(&self) -> Result<(), CudaError> {
        self.hold.get().map_or(Ok(()), |hold| hold.delay(self))
    }

    /// Returns how long a thread that waits for batches may wait until it looks for a hold that lasts too
    /// long.
    pub fn hold_look(&self) -> PollTimeout {
        self.hold.get().map_or(PollTimeout::NONE, |_| {
            PollTimeout::try_from(MAX_HOLD).expect("a few milliseconds fit into a timeout")
        })
    }

    /// Ends the current hold if it has lasted since the last look, which was [`MAX_HOLD`] ago.
    pub fn end_long_hold(&self) {
        let Some(hold) = self.hold.get() else { return };
        let number = hold.word.current().unwrap_or(0);
        if hold.seen.swap(number, Ordering::Relaxed) == number && number != 0 {
            hold.word.expire(number);
        }
    }

    /// Ends the current hold.
    pub(super) fn end_hold(&self) {
        if let Some(hold) = self.hold.get() {
            hold.word.release();
        }
    }

    /// Waits for the end of this slot's batch.
    pub fn finish(&self, slot: u8) -> Result<(), CudaError> {
        self.end(slot)?;
        while self.execution_time(slot)?.is_none() {
            let mut watched = [PollFd::new(self.completions.as_fd(), PollFlags::POLLIN)];
            match poll(&mut watched, self.hold_look()) {
                Ok(0) => self.end_long_hold(),
                Ok(_) | Err(Errno::EINTR) => self.clear_completions(),
                // Without the descriptor, holds are not bounded, but batches still end.
                Err(_) => self.synchronize()?,
            }
        }
        Ok(())
    }
}
