//! Partitions of the GPU inside this process: green contexts, each on some of the groups of SMs.
//!
//! NVIDIA does not document the order of the groups. Shadowslice therefore tests each GPU
//! (`shadowslice-worker --probe partitions`) before it relies on the order being the same in all
//! processes.

use std::collections::BTreeMap;
use std::fmt;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};
use parking_lot::Mutex;
use shadowslice_shared::groups::{Division, GROUP_SMS, Groups, MAX_GROUPS};
use shadowslice_shared::units::Sms;

use super::exclusion::Exclusion;
use super::{CudaError, CudaGpu, cuda_error};

/// The GPU's SMs, divided into groups.
#[derive(Clone)]
pub struct SmGroups {
    resources: Vec<sys::CUdevResource>,
    division: Division,
    context: Arc<CudaContext>,
}

/// A context whose work runs on the SMs of some groups.
#[derive(Debug)]
pub struct GreenContext {
    green: sys::CUgreenCtx,
    context: sys::CUcontext,
}

// SAFETY: this type holds descriptions of SMs, which no code changes, and a shared handle of the
// context, which any thread can use.
unsafe impl Send for SmGroups {}
// SAFETY: the driver lets several threads use a green context at the same time, and lets any thread
// destroy it.
unsafe impl Send for GreenContext {}
// SAFETY: the reasons for `Send` apply here too.
unsafe impl Sync for GreenContext {}

impl fmt::Debug for SmGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmGroups").field("division", &self.division).finish_non_exhaustive()
    }
}

/// The reasons why the GPU's SMs cannot be divided.
#[derive(Debug, thiserror::Error)]
pub enum DivisionError {
    /// The driver is too old, or an MPS percentage limits this process.
    #[error("the driver does not divide the GPU's SMs, which needs CUDA 12.4 or later and a share of 100 %")]
    Driver(#[source] DriverError),
    #[error("the GPU has too few SMs to divide: {0}")]
    TooFew(Sms),
}

impl SmGroups {
    pub fn of(gpu: &CudaGpu) -> Result<Self, DivisionError> {
        let resources = split(gpu).map_err(DivisionError::Driver)?;
        // SAFETY: the resources have the type SM, for which the field `smCount` is valid.
        let sizes = resources.iter().map(|group| Sms(unsafe { group.__bindgen_anon_1.sm.smCount }));
        let division = Division::new(sizes.collect()).ok_or(DivisionError::TooFew(gpu.sms()))?;
        Ok(Self { resources, division, context: Arc::clone(&gpu.context) })
    }

    pub fn division(&self) -> &Division {
        &self.division
    }

    /// Returns the process's context on these groups, and creates it at the first call. The process
    /// keeps each context, because driver 580 does not free the 4 MiB of a destroyed context.
    pub fn context(&self, groups: Groups) -> Result<Arc<GreenContext>, CudaError> {
        static CONTEXTS: Mutex<BTreeMap<Groups, Arc<GreenContext>>> = Mutex::new(BTreeMap::new());
        let mut contexts = CONTEXTS.lock();
        if let Some(context) = contexts.get(&groups) {
            return Ok(Arc::clone(context));
        }
        let context = Arc::new(self.create_context(groups)?);
        contexts.insert(groups, Arc::clone(&context));
        Ok(context)
    }

    fn create_context(&self, groups: Groups) -> Result<GreenContext, CudaError> {
        let _exclusion = Exclusion::of_setup();
        let failed = cuda_error("create a partition");
        self.context.bind_to_thread().map_err(&failed)?;
        let among = self.resources.iter().enumerate().filter(|(group, _)| groups.contains(*group));
        let mut resources: Vec<_> = among.map(|(_, resource)| *resource).collect();
        let count = u32::try_from(resources.len()).expect("a handful of groups");
        let (mut description, mut green, mut context) = (null_mut(), null_mut(), null_mut());
        let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: the resources come from one division of the GPU. Each handle pointer refers to a
        // local variable, which the driver fills in.
        unsafe {
            sys::cuDevResourceGenerateDesc(&mut description, resources.as_mut_ptr(), count)
                .result()
                .map_err(&failed)?;
            sys::cuGreenCtxCreate(&mut green, description, self.context.cu_device(), flags)
                .result()
                .map_err(&failed)?;
        }
        // SAFETY: `cuGreenCtxCreate` succeeded above, so `green` is valid.
        let known = unsafe { sys::cuCtxFromGreenCtx(&mut context, green) }.result();
        let green = GreenContext { green, context };
        known.map(|()| green).map_err(failed)
    }
}

/// Splits the GPU into groups. The remaining SMs form the last group.
fn split(gpu: &CudaGpu) -> Result<Vec<sys::CUdevResource>, DriverError> {
    let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
    let mut count = u32::try_from(MAX_GROUPS).expect("a small number");
    // SAFETY: the resources are plain data, for which zeros are valid. The driver fills them in
    // below.
    let (mut all, mut rest): (sys::CUdevResource, sys::CUdevResource) = unsafe { (zeroed(), zeroed()) };
    // SAFETY: zeros are valid here too.
    let mut groups: Vec<sys::CUdevResource> = (0..count).map(|_| unsafe { zeroed() }).collect();
    // SAFETY: each pointer refers to a local resource or number, and `groups` has enough elements
    // for the number of groups that the call requests.
    unsafe {
        sys::cuDeviceGetDevResource(gpu.context.cu_device(), &mut all, kind).result()?;
        sys::cuDevSmResourceSplitByCount(groups.as_mut_ptr(), &mut count, &all, &mut rest, 0, GROUP_SMS)
            .result()?;
    }
    groups.truncate(count as usize);
    // SAFETY: resources of the type SM have the field `smCount`. If no SMs remain, `rest` does not
    // have that type, and the field is not read.
    let left_over = rest.type_ == kind && unsafe { rest.__bindgen_anon_1.sm.smCount } > 0;
    groups.extend(left_over.then_some(rest));
    Ok(groups)
}

impl GreenContext {
    pub(super) fn context(&self) -> sys::CUcontext {
        self.context
    }
}

/// A stream whose work runs on the SMs of a partition.
#[derive(Debug)]
pub struct PartitionStream {
    stream: sys::CUstream,
    context: Arc<GreenContext>,
}

// SAFETY: the driver lets any thread use a stream.
unsafe impl Send for PartitionStream {}

impl SmGroups {
    /// Creates a stream in the context on these groups.
    pub fn stream(&self, groups: Groups) -> Result<PartitionStream, CudaError> {
        let (context, mut stream) = (self.context(groups)?, null_mut());
        let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context exists, and the driver fills in the handle.
        let made = unsafe { sys::cuGreenCtxStreamCreate(&mut stream, context.green, non_blocking, 0) };
        made.result().map_err(cuda_error("create a stream in a partition"))?;
        Ok(PartitionStream { stream, context })
    }
}

impl PartitionStream {
    pub(super) fn raw(&self) -> sys::CUstream {
        self.stream
    }

    /// Returns the stream's handle for the CUDA runtime.
    pub fn handle(&self) -> usize {
        self.stream.expose_provenance()
    }

    pub fn context(&self) -> &Arc<GreenContext> {
        &self.context
    }
}

impl Drop for PartitionStream {
    fn drop(&mut self) {
        // SAFETY: this value owns the stream, and its context still exists. If the call fails, the
        // stream is freed when the process exits.
        unsafe { result::stream::destroy(self.stream) }.ok();
    }
}
