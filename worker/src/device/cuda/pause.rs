//! [Pauses](shadowslice_shared::pause) of this worker's batches: the GPU reads the pause word before each piece,
//! and the worker ends pauses that last too long.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use shadowslice_shared::pause::{MAX_BATCH_PAUSE, PauseWord};
use std::os::fd::AsFd;

use super::{CudaError, CudaGpu, cuda_error};

/// A pause word that the GPU can read.
#[derive(Debug)]
pub(super) struct RegisteredPause {
    word: Arc<PauseWord>,
    address: sys::CUdeviceptr,
    /// The pause that the last look found, or 0.
    seen: AtomicU32,
}

impl RegisteredPause {
    /// Returns `None` if the GPU cannot wait for the word, whose memory is registered with the driver.
    pub(super) fn of(word: &Arc<PauseWord>, gpu: &CudaGpu) -> Option<Self> {
        let start: *const AtomicU32 = word.word();
        let mut address = 0;
        // SAFETY: the memory is registered, and the driver fills in the address.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, start.cast_mut().cast(), 0) };
        found.result().ok()?;
        let pause = Self { word: Arc::clone(word), address, seen: AtomicU32::new(0) };
        // The word is still zero, so this wait ends at once.
        pause.delay(gpu).and_then(|()| gpu.synchronize()).ok().map(|()| pause)
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
    pub(super) fn memory(word: &PauseWord) -> (NonNull<u8>, u64) {
        (NonNull::from(word.word()).cast(), shadowslice_shared::pause::PAUSE_BYTES)
    }
}

impl CudaGpu {
    /// Makes the compute stream wait while the supervisor pauses this worker.
    pub(super) fn wait_while_paused(&self) -> Result<(), CudaError> {
        self.pause.get().map_or(Ok(()), |pause| pause.delay(self))
    }

    /// Returns how long a thread that waits for batches may wait until it looks for a pause that lasts too
    /// long.
    pub fn pause_look(&self) -> PollTimeout {
        self.pause.get().map_or(PollTimeout::NONE, |_| {
            PollTimeout::try_from(MAX_BATCH_PAUSE).expect("a few milliseconds fit into a timeout")
        })
    }

    /// Ends the current pause if it has lasted since the last look, which was [`MAX_BATCH_PAUSE`] ago.
    pub fn end_long_pause(&self) {
        let Some(pause) = self.pause.get() else { return };
        let number = pause.word.current().unwrap_or(0);
        if pause.seen.swap(number, Ordering::Relaxed) == number && number != 0 {
            pause.word.expire(number);
        }
    }

    /// Ends the current pause.
    pub(super) fn end_pause(&self) {
        if let Some(pause) = self.pause.get() {
            pause.word.release();
        }
    }

    /// Waits for the end of this slot's batch.
    pub fn finish(&self, slot: u8) -> Result<(), CudaError> {
        self.end(slot)?;
        while self.execution_time(slot)?.is_none() {
            let mut watched = [PollFd::new(self.completions.as_fd(), PollFlags::POLLIN)];
            match poll(&mut watched, self.pause_look()) {
                Ok(0) => self.end_long_pause(),
                Ok(_) | Err(Errno::EINTR) => self.clear_completions(),
                // Without the descriptor, pauses are not bounded, but batches still end.
                Err(_) => self.synchronize()?,
            }
        }
        Ok(())
    }
}
