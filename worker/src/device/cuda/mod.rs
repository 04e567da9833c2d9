//! A real GPU, at the share of it that MPS gives this process.
//!
//! Two streams: inputs travel on one while the batch before executes on the other, which also takes
//! the answers back. A batch's part of the second lies between two events, which time it, and a
//! callback at its end makes [`CudaGpu::completions`] readable, so that a thread can wait for it and
//! for further batches at once.
#![allow(unsafe_code)] // calls into CUDA's driver

pub mod buffer;
mod facts;
pub mod graph;
pub mod isolation;
mod open;
pub mod partition;
pub mod pinned;
pub mod region;

pub use facts::{GpuFacts, facts, initialise};

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};
use rustix::event::{EventfdFlags, eventfd};
use shadowslice_shared::batch::IN_FLIGHT;
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::units::Sms;

use shadowslice_shared::errors::chain;

/// The context may be beyond use afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("CUDA failed to {operation}")]
pub struct CudaFault {
    operation: &'static str,
    #[source]
    source: DriverError,
}

fn fault(operation: &'static str) -> impl Fn(DriverError) -> CudaFault {
    move |source| CudaFault { operation, source }
}

pub struct CudaGpu {
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    events: [BatchEvents; IN_FLIGHT],
    completions: OwnedFd,
    sms: Sms,
}

/// One for each batch that may be on the GPU at once.
struct BatchEvents {
    copied: CudaEvent,
    start: CudaEvent,
    end: CudaEvent,
}

/// The memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct GpuMemory {
    /// The bytes that no process uses.
    pub free: usize,
    pub total: usize,
}

/// A place in the work that was put on the compute stream.
#[derive(Debug)]
pub struct StreamMark(CudaEvent);

impl fmt::Debug for CudaGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaGpu").field("sms", &self.sms).finish_non_exhaustive()
    }
}

impl CudaGpu {
    /// The first GPU that the environment lets the process see.
    pub fn open() -> Result<Arc<Self>, BootRefusal> {
        let context = open::context().map_err(|why| BootRefusal::Setup(chain(&why)))?;
        Self::with(context).map(Arc::new).map_err(|why| BootRefusal::Setup(chain(&why)))
    }

    fn with(context: Arc<CudaContext>) -> Result<Self, CudaFault> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let sms = context.attribute(attribute).map_err(fault("be asked for its SMs"))?;
        let stream = || context.new_stream().map_err(fault("make a stream"));
        let (compute, copies) = (stream()?, stream()?);
        let completions = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let system = DriverError(sys::CUresult::CUDA_ERROR_OPERATING_SYSTEM);
        let completions = completions.map_err(|_| fault("make an event file")(system))?;
        let events = [BatchEvents::new(&context)?, BatchEvents::new(&context)?];
        let sms = Sms(u32::try_from(sms).unwrap_or(0));
        Ok(Self { context, compute, copies, events, completions, sms })
    }

    /// Those that MPS really gave, as the device says.
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

    /// As CUDA's runtime knows it; it lives as long as `self`.
    pub fn compute_stream(&self) -> *mut () {
        self.compute.cu_stream().cast()
    }

    /// Readable when a batch is through.
    pub fn completions(&self) -> BorrowedFd<'_> {
        self.completions.as_fd()
    }

    /// Makes [`CudaGpu::completions`] readable though no batch is through.
    pub fn wake(&self) {
        wake(&self.completions);
    }

    /// Lets this thread call the driver.
    pub fn bind(&self) -> Result<(), CudaFault> {
        self.context.bind_to_thread().map_err(fault("be used by another thread"))
    }

    /// Clears the signal of [`CudaGpu::completions`]; then the caller looks which batches are through.
    pub fn clear_completions(&self) {
        // A read fails if there is no signal, which is as good.
        rustix::io::read(&self.completions, &mut [0; 8]).ok();
    }

    /// Without waiting.
    ///
    /// # Safety
    ///
    /// Until the batch is through the bytes stay as they are. The address has room for them, and
    /// nothing on the GPU uses it meanwhile.
    pub unsafe fn copy_in(&self, from: &[u8], to: NonNull<u8>) -> Result<(), CudaFault> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller vouches for both sides.
        let copied = unsafe { result::memcpy_htod_async(to.as_ptr() as u64, from, self.copies.cu_stream()) };
        copied.map_err(fault("copy an input"))
    }

    /// Work from here on belongs to the batch of this slot; its inputs are under way.
    pub fn start(&self, slot: u8) -> Result<(), CudaFault> {
        let events = &self.events[usize::from(slot) % IN_FLIGHT];
        events.copied.record(&self.copies).map_err(fault("mark the end of a copy"))?;
        self.compute.wait(&events.copied).map_err(fault("wait for a copy"))?;
        events.start.record(&self.compute).map_err(fault("mark the start of a batch"))
    }

    /// Once the answer is computed, without waiting.
    ///
    /// # Safety
    ///
    /// There are `len` bytes at `from` on the GPU, which may be freed on the compute stream from
    /// now on. `to` has room for as many, and nothing else uses it until the batch is through.
    pub unsafe fn copy_out(&self, from: NonNull<u8>, to: NonNull<u8>, len: usize) -> Result<(), CudaFault> {
        if len == 0 {
            return Ok(());
        }
        let (to, from) = (to.as_ptr().cast(), from.as_ptr() as u64);
        // SAFETY: the caller vouches for both sides.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, len, self.compute.cu_stream()) };
        copied.result().map_err(fault("copy an answer"))
    }

    /// All of the batch of this slot has been put on the stream.
    pub fn end(&self, slot: u8) -> Result<(), CudaFault> {
        let events = &self.events[usize::from(slot) % IN_FLIGHT];
        events.end.record(&self.compute).map_err(fault("mark the end of a batch"))?;
        let file = self.completions.as_fd().as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: the callback only writes to the event file, closed after the stream ended.
        let launched = unsafe {
            result::stream::launch_host_function(self.compute.cu_stream(), signal_completion, file)
        };
        launched.map_err(fault("announce the end of a batch"))
    }

    /// `None` while the batch executes.
    pub fn execution_time(&self, slot: u8) -> Result<Option<Duration>, CudaFault> {
        let events = &self.events[usize::from(slot) % IN_FLIGHT];
        if !events.end.try_is_complete().map_err(fault("say whether a batch is through"))? {
            return Ok(None);
        }
        let ms = events.start.elapsed_ms(&events.end).map_err(fault("time a batch"))?;
        Ok(Some(Duration::from_secs_f32(ms.max(0.0) / 1e3)))
    }

    /// Behind all that was put on the compute stream so far.
    pub fn mark(&self) -> Result<StreamMark, CudaFault> {
        self.compute.record_event(None).map(StreamMark).map_err(fault("mark what it has to do"))
    }

    pub fn synchronize(&self) -> Result<(), CudaFault> {
        self.context.synchronize().map_err(fault("go on"))
    }

    pub fn memory(&self) -> Result<GpuMemory, CudaFault> {
        let (free, total) = self.context.mem_get_info().map_err(fault("be asked for its memory"))?;
        Ok(GpuMemory { free, total })
    }
}

impl StreamMark {
    /// Returns when the GPU is through with all before the mark, or is lost and runs nothing of it
    /// any more.
    pub fn wait(self) {
        self.0.synchronize().ok();
    }
}

impl Drop for CudaGpu {
    /// A process must not leave the GPU in mid-kernel: under MPS that can harm its neighbours.
    fn drop(&mut self) {
        // If that fails, the context is beyond use and nothing executes.
        self.context.synchronize().ok();
    }
}

impl BatchEvents {
    fn new(context: &Arc<CudaContext>) -> Result<Self, CudaFault> {
        let event = |flags| context.new_event(Some(flags)).map_err(fault("make an event"));
        Ok(Self {
            copied: event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?,
            start: event(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
            end: event(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
        })
    }
}

/// Runs on a thread of CUDA's, which must not call CUDA.
unsafe extern "C" fn signal_completion(file: *mut std::ffi::c_void) {
    let file = file.addr() as i32;
    // SAFETY: the event file is open as long as the stream is.
    wake(unsafe { BorrowedFd::borrow_raw(file) });
}

fn wake(file: impl AsFd) {
    // A write fails if the counter is full, and then the file is readable already.
    rustix::io::write(file, &1_u64.to_ne_bytes()).ok();
}
