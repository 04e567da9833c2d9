//! Work that was recorded once, and is started again at the cost of one call: on the SMs of the
//! whole process, or on those of a partition that it was moved to.
//!
//! A kernel runs where the context of its node lies, whichever stream the graph is put on. So a
//! recording is moved by giving its nodes another context; executables made from it before stay as
//! they were.

use std::fmt;
use std::mem::{MaybeUninit, zeroed};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use super::partition::GreenContext;
use super::{CudaFault, CudaGpu, fault};

const KERNEL: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL as u32;
const MEMCPY: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY as u32;
const MEMSET: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET as u32;
const EMPTY: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY as u32;
const MEM_ALLOC: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC as u32;
const MEM_FREE: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE as u32;

/// The memory that the work reads and writes must stay where it was.
pub struct Recording {
    graph: sys::CUgraph,
    context: Arc<CudaContext>,
}

pub struct Executable {
    executable: sys::CUgraphExec,
    context: Arc<CudaContext>,
    /// Dropped after the executable.
    _partition: Option<Arc<GreenContext>>,
}

// SAFETY: the driver lets any thread use a graph, as long as no two do at once: a `Recording` has
// one owner, and calls that change it take it by `&mut`.
unsafe impl Send for Recording {}
// SAFETY: as above; only its one owner starts it.
unsafe impl Send for Executable {}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").finish_non_exhaustive()
    }
}

impl fmt::Debug for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executable").finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// A kernel of an older kind, which belongs to the context that loaded it.
    #[error("a kernel in it is bound to its context")]
    BoundKernel,
    #[error("it has a node of type {0}, which cannot be moved")]
    Node(u32),
    #[error("the driver cannot tell what is in it")]
    Driver(#[source] DriverError),
}

impl CudaGpu {
    /// Nothing is executed; `None` if the work cannot be recorded.
    pub fn record<E>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Option<Recording>, CudaFault> {
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        self.compute.begin_capture(relaxed).map_err(fault("record a batch"))?;
        let worked = work();
        // An operation that may not be recorded ends the recording, and makes this fail.
        // SAFETY: the stream is ours, and recording since above.
        let graph = unsafe { result::stream::end_capture(self.compute.cu_stream()) };
        let graph = graph.ok().filter(|graph| !graph.is_null());
        let recording = graph.map(|graph| Recording { graph, context: Arc::clone(&self.context) });
        Ok(recording.filter(|_| worked.is_ok()))
    }

    /// A recording that a library of this process has made.
    ///
    /// # Safety
    ///
    /// The handle is that of a `CUgraph` which is alive, and which nothing changes meanwhile.
    pub unsafe fn copy_recording(&self, handle: usize) -> Result<Recording, CudaFault> {
        let (from, mut graph) = (std::ptr::with_exposed_provenance_mut(handle), null_mut());
        // SAFETY: the caller vouches for the handle, and the driver fills in the other one.
        let copied = unsafe { sys::cuGraphClone(&mut graph, from) }.result();
        copied.map_err(fault("take over what was recorded"))?;
        Ok(Recording { graph, context: Arc::clone(&self.context) })
    }

    pub fn replay(&self, executable: &Executable) -> Result<(), CudaFault> {
        // SAFETY: both are alive, and of this process.
        let launched = unsafe { result::graph::launch(executable.executable, self.compute.cu_stream()) };
        launched.map_err(fault("start recorded work"))
    }
}

/// A stream on which only recorded work goes to the GPU.
pub struct UploadStream(Arc<CudaStream>);

impl UploadStream {
    pub fn new(gpu: &CudaGpu) -> Result<Self, CudaFault> {
        gpu.context.new_stream().map(Self).map_err(fault("make a stream"))
    }
}

impl fmt::Debug for UploadStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UploadStream").finish_non_exhaustive()
    }
}

impl Recording {
    /// On all SMs of the process, where it was recorded.
    pub fn instantiate(&self) -> Result<Executable, CudaFault> {
        self.instantiate_with(None)
    }

    /// On the SMs of a partition, so that the first start takes no longer than later ones. The
    /// recording must be movable.
    pub fn instantiate_on(
        &mut self,
        partition: &Arc<GreenContext>,
        uploads: &UploadStream,
    ) -> Result<Executable, CudaFault> {
        self.move_to(partition.context()).map_err(fault("move recorded work to a partition"))?;
        let executable = self.instantiate_with(Some(Arc::clone(partition)))?;
        let stream = uploads.0.cu_stream();
        // SAFETY: both are alive, and of this process.
        let uploaded = unsafe { result::graph::upload(executable.executable, stream) };
        uploaded.and_then(|()| uploads.0.synchronize()).map_err(fault("bring recorded work to it"))?;
        Ok(executable)
    }

    fn instantiate_with(&self, partition: Option<Arc<GreenContext>>) -> Result<Executable, CudaFault> {
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        // SAFETY: the graph is ours and alive.
        let executable = unsafe { result::graph::instantiate(self.graph, flags) };
        let executable = executable.map_err(fault("make recorded work ready"))?;
        Ok(Executable { executable, context: Arc::clone(&self.context), _partition: partition })
    }

    pub fn check_movable(&self) -> Result<(), MoveError> {
        self.nodes().map_err(MoveError::Driver)?.into_iter().try_for_each(|node| {
            match type_of(node).map_err(MoveError::Driver)? {
                KERNEL => {
                    let kernel = kernel_of(node).map_err(MoveError::Driver)?;
                    if kernel.kern.is_null() { Err(MoveError::BoundKernel) } else { Ok(()) }
                }
                MEMCPY | MEMSET | EMPTY | MEM_ALLOC | MEM_FREE => Ok(()),
                other => Err(MoveError::Node(other)),
            }
        })
    }

    /// Returns the number of kernels; `None` if the driver does not say.
    pub fn kernels(&self) -> Option<u32> {
        let types: Result<Vec<u32>, _> = self.nodes().ok()?.into_iter().map(type_of).collect();
        u32::try_from(types.ok()?.into_iter().filter(|&kind| kind == KERNEL).count()).ok()
    }

    fn move_to(&mut self, context: sys::CUcontext) -> Result<(), DriverError> {
        self.nodes()?.into_iter().try_for_each(|node| match type_of(node)? {
            KERNEL => {
                let mut kernel = kernel_of(node)?;
                // A function belongs to a context, so the other context would be ignored.
                kernel.func = null_mut();
                kernel.ctx = context;
                // SAFETY: the node is this graph's, and its arguments are those that it has.
                unsafe { sys::cuGraphKernelNodeSetParams_v2(node, &kernel) }.result()
            }
            // The driver may use SMs for fills and copies, too.
            MEMSET => move_memset(node, context),
            MEMCPY => move_memcpy(node, context),
            _ => Ok(()),
        })
    }

    fn nodes(&self) -> Result<Vec<sys::CUgraphNode>, DriverError> {
        let mut count = 0;
        // SAFETY: without room for nodes, their number is written.
        unsafe { sys::cuGraphGetNodes(self.graph, null_mut(), &mut count) }.result()?;
        let mut nodes = vec![null_mut(); count];
        // SAFETY: there is room for as many as were just counted, and no node is added.
        unsafe { sys::cuGraphGetNodes(self.graph, nodes.as_mut_ptr(), &mut count) }.result()?;
        nodes.truncate(count);
        Ok(nodes)
    }
}

/// A number: a driver may know more types than its bindings.
fn type_of(node: sys::CUgraphNode) -> Result<u32, DriverError> {
    let mut kind = u32::MAX;
    // SAFETY: the node is alive, and the driver writes one number of this size.
    unsafe { sys::cuGraphNodeGetType(node, (&raw mut kind).cast()) }.result()?;
    Ok(kind)
}

fn kernel_of(node: sys::CUgraphNode) -> Result<sys::CUDA_KERNEL_NODE_PARAMS, DriverError> {
    let mut params = MaybeUninit::uninit();
    // SAFETY: the node is alive and a kernel's; the driver fills all of it in.
    unsafe {
        sys::cuGraphKernelNodeGetParams_v2(node, params.as_mut_ptr()).result()?;
        Ok(params.assume_init())
    }
}

fn move_memset(node: sys::CUgraphNode, ctx: sys::CUcontext) -> Result<(), DriverError> {
    let mut fill = MaybeUninit::uninit();
    // SAFETY: the node is alive and a fill's; the driver describes all of it.
    let fill: sys::CUDA_MEMSET_NODE_PARAMS = unsafe {
        sys::cuGraphMemsetNodeGetParams(node, fill.as_mut_ptr()).result()?;
        fill.assume_init()
    };
    let sys::CUDA_MEMSET_NODE_PARAMS { dst, pitch, value, elementSize, width, height } = fill;
    let memset = sys::CUDA_MEMSET_NODE_PARAMS_v2 { dst, pitch, value, elementSize, width, height, ctx };
    set_params(node, sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET, |params| params.memset = memset)
}

fn move_memcpy(node: sys::CUgraphNode, context: sys::CUcontext) -> Result<(), DriverError> {
    let mut copy = MaybeUninit::uninit();
    // SAFETY: the node is alive and a copy's; the driver describes all of it.
    let copy = unsafe {
        sys::cuGraphMemcpyNodeGetParams(node, copy.as_mut_ptr()).result()?;
        copy.assume_init()
    };
    let memcpy = sys::CUDA_MEMCPY_NODE_PARAMS { flags: 0, reserved: 0, copyCtx: context, copyParams: copy };
    set_params(node, sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY, |params| params.memcpy = memcpy)
}

/// `fill_in` writes over zeros.
fn set_params(
    node: sys::CUgraphNode,
    kind: sys::CUgraphNodeType,
    fill_in: impl FnOnce(&mut sys::CUgraphNodeParams_st__bindgen_ty_1),
) -> Result<(), DriverError> {
    // SAFETY: plain data, for which zeros are a value; what is reserved must be zero.
    let mut params: sys::CUgraphNodeParams = unsafe { zeroed() };
    params.type_ = kind;
    fill_in(&mut params.__bindgen_anon_1);
    // SAFETY: the node is of this type, and does what it did, elsewhere.
    unsafe { sys::cuGraphNodeSetParams(node, &mut params) }.result()
}

impl Drop for Recording {
    fn drop(&mut self) {
        // If the context is beyond use, all of it is gone.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: ours, and used no more; executables made from it do not need it.
            unsafe { result::graph::destroy(self.graph) }.ok();
        }
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: ours, and started no more; a run that is under way ends first.
            unsafe { result::graph::exec_destroy(self.executable) }.ok();
        }
    }
}
