//! A real GPU, with the share of its SMs that MPS gives this process.
//!
//! A worker uses two streams. The first stream copies the inputs of a batch while the previous
//! batch executes. The second stream executes batches and copies the answers back. On the second
//! stream, two events enclose each batch and measure its time. A callback at the end of each batch
//! makes [`CudaGpu::completions`] readable. A thread can therefore wait for the end of a batch and
//! for new batches at the same time.
#![allow(unsafe_code)] // This module calls CUDA's driver.

pub mod arena;
mod blocks;
pub mod buffer;
pub mod exclusion;
mod facts;
pub mod graph;
pub mod isolation;
mod open;
mod paced;
pub mod partition;
mod pause;
mod pieces;
pub mod pinned;
pub mod pinned_file;
pub mod region;
mod saved;

pub use facts::{GpuFacts, facts, initialise};

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;
use shadowslice_shared::batch::IN_FLIGHT;
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::units::Sms;

use exclusion::Exclusion;
use open::GpuOpenError;
use pause::RegisteredPause;
use pieces::CutSummary;
use shadowslice_shared::errors::chain;

/// A failed CUDA call, after which the context may be unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("CUDA failed to {operation}")]
pub struct CudaError {
    operation: &'static str,
    #[source]
    source: DriverError,
}

fn cuda_error(operation: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |source| CudaError { operation, source }
}

/// The GPU of this process, with its context and its streams.
#[derive(Debug)]
pub struct CudaGpu {
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    events: [BatchEvents; IN_FLIGHT],
    completions: EventFd,
    /// The address after the pinned part of the request slab, or 0. The driver refuses a copy that is
    /// only partly pinned.
    pinned_end: AtomicUsize,
    /// The worker's pause word, if the supervisor can pause this model.
    pause: OnceLock<RegisteredPause>,
    cuts: Mutex<CutSummary>,
    sms: Sms,
}

/// The events of one batch. [`CudaGpu`] has [`IN_FLIGHT`] of these sets, one for each batch that
/// can be in flight.
#[derive(Debug)]
struct BatchEvents {
    copied: CudaEvent,
    start: CudaEvent,
    end: CudaEvent,
}

/// The memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct CudaMemory {
    /// The memory that no process uses, in bytes.
    pub free: usize,
    pub total: usize,
}

/// A position in the sequence of work on the compute stream.
#[derive(Debug)]
pub struct StreamMark(CudaEvent);

impl CudaGpu {
    /// Opens the first GPU that the environment makes visible to this process.
    pub fn open() -> Result<Arc<Self>, BootRefusal> {
        let context = open::context().map_err(|why| match why {
            GpuOpenError::NoClient(_) => BootRefusal::NoClient(chain(&why)),
            why => BootRefusal::Setup(chain(&why)),
        })?;
        Self::with(context).map(Arc::new).map_err(|why| BootRefusal::Setup(chain(&why)))
    }

    fn with(context: Arc<CudaContext>) -> Result<Self, CudaError> {
        let _exclusion = Exclusion::of_setup();
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let sms = context.attribute(attribute).map_err(cuda_error("read the number of SMs"))?;
        let stream = || context.new_stream().map_err(cuda_error("create a stream"));
        let (compute, copies) = (stream()?, stream()?);
        let completions = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let system = DriverError(sys::CUresult::CUDA_ERROR_OPERATING_SYSTEM);
        let completions = completions.map_err(|_| cuda_error("create an event descriptor")(system))?;
        let events = [BatchEvents::new(&context)?, BatchEvents::new(&context)?];
        let sms = Sms(u32::try_from(sms).unwrap_or(0));
        let (pinned_end, pause, cuts) = (AtomicUsize::new(0), OnceLock::new(), Mutex::default());
        Ok(Self { context, compute, copies, events, completions, pinned_end, pause, cuts, sms })
    }

    /// Returns the number of SMs that MPS actually assigned to this process, as the driver reports
    /// it.
    pub fn sms(&self) -> Sms {
        self.sms
    }

    pub fn capability(&self) -> Option<(i32, i32)> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        };
        let attribute = |which| self.context.attribute(which).ok();
        attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
            .zip(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR))
    }

    /// Returns the stream's handle for the CUDA runtime. The handle is valid while `self` exists.
    pub fn compute_stream(&self) -> *mut () {
        self.compute.cu_stream().cast()
    }

    /// Returns a descriptor that becomes readable when a batch has ended.
    pub fn completions(&self) -> BorrowedFd<'_> {
        self.completions.as_fd()
    }

    /// Makes [`CudaGpu::completions`] readable although no batch has ended.
    pub fn wake(&self) {
        wake(&self.completions);
    }

    /// Binds the context to this thread, so that the thread can call the driver.
    pub fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(cuda_error("bind the context to a thread"))
    }

    /// Clears the signal of [`CudaGpu::completions`]. The caller then checks which batches have
    /// ended.
    pub fn clear_completions(&self) {
        // If no signal is set, the read fails, and no action is needed.
        self.completions.read().ok();
    }

    /// Starts a copy of an input to the GPU, and returns without waiting for the copy.
    ///
    /// # Safety
    ///
    /// The bytes must not change until the batch has ended. The memory at `to` must be large
    /// enough, and no other batch may use that memory until this batch has ended.
    pub unsafe fn copy_in(&self, from: &[u8], to: NonNull<u8>) -> Result<(), CudaError> {
        let pinned = self.pinned_end.load(Ordering::Relaxed).saturating_sub(from.as_ptr().addr());
        let (first, second) = from.split_at(pinned.min(from.len()));
        let mut to = to.as_ptr() as u64;
        for part in [first, second].into_iter().filter(|part| !part.is_empty()) {
            // SAFETY: the caller guarantees that both addresses are valid.
            let copied = unsafe { result::memcpy_htod_async(to, part, self.copies.cu_stream()) };
            copied.map_err(cuda_error("copy an input"))?;
            to += part.len() as u64;
        }
        Ok(())
    }

    /// Starts the batch of this slot. The copies of its inputs may still be in progress. All work
    /// that is queued on the compute stream after this call belongs to this batch.
    pub fn start(&self, slot: u8) -> Result<(), CudaError> {
        let events = &self.events[usize::from(slot) % IN_FLIGHT];
        events.copied.record(&self.copies).map_err(cuda_error("record the end of a copy"))?;
        self.compute.wait(&events.copied).map_err(cuda_error("wait for a copy"))?;
        events.start.record(&self.compute).map_err(cuda_error("record the start of a batch"))
    }

    /// Queues a copy of an answer from the GPU. The copy begins once the answer has been computed.
    /// Returns without waiting for the copy.
    ///
    /// # Safety
    ///
    /// The memory at `from` on the GPU must have `len` bytes. The compute stream may free that
    /// memory after this call. The memory at `to` must have the same size, and nothing else may use
    /// it until the batch has ended.
    pub unsafe fn copy_out(&self, from: NonNull<u8>, to: NonNull<u8>, len: usize) -> Result<(), CudaError> {
        if len == 0 {
            return Ok(());
        }
        let (to, from) = (to.as_ptr().cast(), from.as_ptr() as u64);
        // SAFETY: the caller guarantees that both addresses are valid.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, len, self.compute.cu_stream()) };
        copied.result().map_err(cuda_error("copy an answer"))
    }

    /// Marks the end of this slot's batch. All work of the batch must already be on the stream.
    pub fn end(&self, slot: u8) -> Result<(), CudaError> {
        let events = &self.events[usize::from(slot) % IN_FLIGHT];
        events.end.record(&self.compute).map_err(cuda_error("record the end of a batch"))?;
        let file = self.completions.as_fd().as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: the callback only writes to the eventfd, which is closed after all work on the
        // stream has ended.
        let launched = unsafe {
            result::stream::launch_host_function(self.compute.cu_stream(), signal_completion, file)
        };
        launched.map_err(cuda_error("add a callback to the stream"))
    }

    /// Returns the time that this slot's batch took, or `None` if the batch is still executing.
    pub fn execution_time(&self, slot: u8) -> Result<Option<Duration>, CudaError> {
        let events = &self.events[usize::from(slot) % IN_FLIGHT];
        if !events.end.try_is_complete().map_err(cuda_error("query the end of a batch"))? {
            return Ok(None);
        }
        let ms = events.start.elapsed_ms(&events.end).map_err(cuda_error("time a batch"))?;
        Ok(Some(Duration::from_secs_f32(ms.max(0.0) / 1e3)))
    }

    /// Returns a mark that comes after all work that is already on the compute stream.
    pub fn mark(&self) -> Result<StreamMark, CudaError> {
        self.compute.record_event(None).map(StreamMark).map_err(cuda_error("record an event"))
    }

    /// Waits until the GPU has finished all batches and copies of this model.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let finished = self.copies.synchronize().and_then(|()| self.compute.synchronize());
        finished.map_err(cuda_error("finish its work"))
    }

    /// Waits as [`Self::synchronize`] does, unless this thread records a batch. A recording executes no work.
    fn synchronize_unless_recording(&self) {
        let recording = self.compute.capture_status();
        if recording.is_ok_and(|status| status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE) {
            // If this fails, the context is unusable, and the GPU executes no work.
            self.synchronize().ok();
        }
    }

    /// Waits until the GPU has finished all work of the process.
    pub fn synchronize_context(&self) -> Result<(), CudaError> {
        let _exclusion = Exclusion::of_setup();
        self.context.synchronize().map_err(cuda_error("finish the work of the process"))
    }

    pub fn memory(&self) -> Result<CudaMemory, CudaError> {
        let (free, total) = self.context.mem_get_info().map_err(cuda_error("read the size of the memory"))?;
        Ok(CudaMemory { free, total })
    }
}

impl StreamMark {
    /// Waits until the GPU has finished all work before the mark. If the context is lost, returns
    /// early, because the GPU then runs none of that work.
    pub fn wait(self) {
        self.0.synchronize().ok();
    }
}

impl Drop for CudaGpu {
    /// Waits until the GPU has finished all work. Under MPS, a process that exits while one of its
    /// kernels executes can disturb other processes on the GPU.
    fn drop(&mut self) {
        // If this call fails, the context is unusable, and the GPU executes none of this process's
        // work.
        self.synchronize().ok();
    }
}

impl BatchEvents {
    fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let event = |flags| context.new_event(Some(flags)).map_err(cuda_error("create an event"));
        Ok(Self {
            copied: event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?,
            start: event(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
            end: event(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
        })
    }
}

/// Signals the end of a batch. This function runs on one of CUDA's threads, which are not allowed
/// to call CUDA.
unsafe extern "C" fn signal_completion(file: *mut std::ffi::c_void) {
    let file = file.addr() as i32;
    // SAFETY: the eventfd is open while the stream exists.
    wake(unsafe { BorrowedFd::borrow_raw(file) });
}

fn wake(file: impl AsFd) {
    // The error is ignored: if the eventfd's counter is full, the write fails, but the descriptor
    // is already readable.
    nix::unistd::write(file, &1_u64.to_ne_bytes()).ok();
}
