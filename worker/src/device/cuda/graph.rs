//! Work that is recorded once as CUDA graphs and then started with a few calls, on all SMs of the
//! process or on the SMs of a partition. A long recording consists of several [pieces](shadowslice_shared::pause).
//!
//! A kernel runs in the context of its graph node, whichever stream the graph is launched on. To
//! move a recording to a partition, this module therefore changes the context of its nodes.
//! Executables that were instantiated earlier from the recording do not change.

use std::mem::{MaybeUninit, zeroed};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use super::exclusion::Exclusion;
use super::partition::GreenContext;
use super::{CudaError, CudaGpu, cuda_error};

const KERNEL: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL as u32;
const MEMCPY: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY as u32;
const HOST: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_HOST as u32;
const MEMSET: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET as u32;
const EMPTY: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY as u32;
const MEM_ALLOC: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC as u32;
const MEM_FREE: u32 = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE as u32;

/// A recorded batch: one or more graphs, which the GPU executes one after the other. The memory that
/// the recorded work reads and writes must not move.
#[derive(Debug)]
pub struct Recording {
    pub(super) pieces: Vec<PieceGraph>,
}

/// A recording that is ready to start on the SMs of one partition or of the whole process.
#[derive(Debug)]
pub struct Executable {
    pub(super) pieces: Vec<PieceExecutable>,
    /// The partition, which must be dropped after the pieces.
    _partition: Option<Arc<GreenContext>>,
}

/// A CUDA graph of this process.
#[derive(Debug)]
pub(super) struct PieceGraph {
    pub(super) graph: sys::CUgraph,
    pub(super) context: Arc<CudaContext>,
}

/// A CUDA graph that can be launched.
#[derive(Debug)]
pub(super) struct PieceExecutable {
    executable: sys::CUgraphExec,
    context: Arc<CudaContext>,
}

// SAFETY: the driver lets any thread use a graph, if no two threads use it at the same time. A
// `PieceGraph` has one owner, and all calls that change the graph take it by `&mut`.
unsafe impl Send for PieceGraph {}
// SAFETY: as with `PieceGraph`, the driver lets any thread use an executable graph. Only the owner
// starts it.
unsafe impl Send for PieceExecutable {}

/// The reasons why a recording cannot move to a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// The recording contains a kernel of an older kind, which belongs to the context that loaded
    /// it.
    #[error("the recording has a kernel that is bound to its context")]
    BoundKernel,
    /// The recording allocates memory while it runs, so it can be instantiated only once.
    #[error("the recording allocates memory while it runs")]
    Allocates,
    #[error("the CUDA graph has a node of type {0}, which cannot move to a partition")]
    Node(u32),
    #[error("the driver cannot list the nodes of the CUDA graph")]
    Driver(#[source] DriverError),
}

impl CudaGpu {
    /// Records the work without executing it. Returns `None` if CUDA cannot record the work, or if the
    /// work calls functions of this process. Older versions of ONNX Runtime free buffers in such a
    /// function, so the second replay would use freed memory.
    pub fn record<E>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Option<Recording>, CudaError> {
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        self.compute.begin_capture(relaxed).map_err(cuda_error("record a batch"))?;
        let worked = work();
        // A forbidden operation ends the recording and makes this call fail. SAFETY: this value
        // owns the stream, and the call above started a recording on it.
        let graph = unsafe { result::stream::end_capture(self.compute.cu_stream()) };
        let graph = graph.ok().filter(|graph| !graph.is_null());
        let graph = graph.map(|graph| PieceGraph { graph, context: Arc::clone(&self.context) });
        let usable =
            graph.filter(|graph| worked.is_ok() && graph.types().is_ok_and(|types| !types.contains(&HOST)));
        Ok(usable.map(|graph| Recording { pieces: vec![graph] }))
    }

    /// Copies a recording that another library of this process has made.
    ///
    /// # Safety
    ///
    /// The handle must belong to an existing `CUgraph`, and no other code may change that graph
    /// during this call.
    pub unsafe fn copy_recording(&self, handle: usize) -> Result<Recording, CudaError> {
        let from = std::ptr::with_exposed_provenance_mut(handle);
        // SAFETY: the caller guarantees that `from` is valid.
        let copied = unsafe { clone_graph(from, &self.context) };
        Ok(Recording { pieces: vec![copied.map_err(cuda_error("copy a recorded graph"))?] })
    }

    /// Starts a batch. Before each piece, the GPU waits while the supervisor [pauses](shadowslice_shared::pause)
    /// this worker.
    pub fn replay(&self, executable: &Executable) -> Result<(), CudaError> {
        executable.pieces.iter().try_for_each(|piece| {
            self.wait_while_paused()?;
            self.launch(piece)
        })
    }

    pub(super) fn launch(&self, graph: &PieceExecutable) -> Result<(), CudaError> {
        // SAFETY: the graph and the stream belong to this process, and both exist during the call.
        let launched = unsafe { result::graph::launch(graph.executable, self.compute.cu_stream()) };
        launched.map_err(cuda_error("launch a recorded graph"))
    }
}

/// Copies a graph.
///
/// # Safety
///
/// The graph must exist, and no other code may change it during this call.
pub(super) unsafe fn clone_graph(
    from: sys::CUgraph,
    context: &Arc<CudaContext>,
) -> Result<PieceGraph, DriverError> {
    let mut graph = null_mut();
    // SAFETY: the caller guarantees that `from` is valid, and the driver fills in the other handle.
    unsafe { sys::cuGraphClone(&mut graph, from) }.result()?;
    Ok(PieceGraph { graph, context: Arc::clone(context) })
}

/// A stream that is only used to upload executables to the GPU.
#[derive(Debug)]
pub struct UploadStream(Arc<CudaStream>);

impl UploadStream {
    pub fn new(gpu: &CudaGpu) -> Result<Self, CudaError> {
        let _exclusion = Exclusion::of_setup();
        gpu.context.new_stream().map(Self).map_err(cuda_error("create a stream"))
    }
}

impl Recording {
    /// Returns an executable that runs on all SMs of the process.
    pub fn instantiate(&self) -> Result<Executable, CudaError> {
        self.instantiate_with(None)
    }

    /// Returns an executable that runs on the SMs of a partition. The executable is already
    /// uploaded, so its first start takes no longer than later starts. Call
    /// [`Recording::check_movable`] first. It must succeed.
    pub fn instantiate_on(
        &mut self,
        partition: &Arc<GreenContext>,
        uploads: &UploadStream,
    ) -> Result<Executable, CudaError> {
        let moved = self.pieces.iter_mut().try_for_each(|graph| graph.move_to(partition.context()));
        moved.map_err(cuda_error("move a recorded graph to a partition"))?;
        let executable = self.instantiate_with(Some(Arc::clone(partition)))?;
        let stream = uploads.0.cu_stream();
        let uploaded = executable.pieces.iter().try_for_each(|piece| {
            // SAFETY: the executable and the stream belong to this process, and both exist during the
            // call.
            unsafe { result::graph::upload(piece.executable, stream) }
        });
        uploaded.and_then(|()| uploads.0.synchronize()).map_err(cuda_error("upload a recorded graph"))?;
        Ok(executable)
    }

    fn instantiate_with(&self, partition: Option<Arc<GreenContext>>) -> Result<Executable, CudaError> {
        let pieces = self.pieces.iter().map(PieceGraph::instantiate).collect::<Result<_, _>>()?;
        Ok(Executable { pieces, _partition: partition })
    }

    pub fn check_movable(&self) -> Result<(), MoveError> {
        self.pieces.iter().try_for_each(PieceGraph::check_movable)
    }

    /// Returns the number of kernels in the recording, or `None` if the driver does not report it.
    pub fn kernels(&self) -> Option<u32> {
        let kernels =
            |graph: &PieceGraph| Some(graph.types().ok()?.into_iter().filter(|&kind| kind == KERNEL).count());
        u32::try_from(self.pieces.iter().map(kernels).sum::<Option<usize>>()?).ok()
    }
}

impl PieceGraph {
    pub(super) fn instantiate(&self) -> Result<PieceExecutable, CudaError> {
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        // SAFETY: this value owns the graph.
        let executable = unsafe { result::graph::instantiate(self.graph, flags) };
        let executable = executable.map_err(cuda_error("instantiate a recorded graph"))?;
        Ok(PieceExecutable { executable, context: Arc::clone(&self.context) })
    }

    fn check_movable(&self) -> Result<(), MoveError> {
        self.nodes().map_err(MoveError::Driver)?.into_iter().try_for_each(|node| {
            match type_of(node).map_err(MoveError::Driver)? {
                KERNEL => {
                    let kernel = kernel_of(node).map_err(MoveError::Driver)?;
                    if kernel.kern.is_null() { Err(MoveError::BoundKernel) } else { Ok(()) }
                }
                MEMCPY | MEMSET | EMPTY => Ok(()),
                MEM_ALLOC | MEM_FREE => Err(MoveError::Allocates),
                other => Err(MoveError::Node(other)),
            }
        })
    }

    fn types(&self) -> Result<Vec<u32>, DriverError> {
        self.nodes()?.into_iter().map(type_of).collect()
    }

    fn move_to(&mut self, context: sys::CUcontext) -> Result<(), DriverError> {
        self.nodes()?.into_iter().try_for_each(|node| match type_of(node)? {
            KERNEL => {
                let mut kernel = kernel_of(node)?;
                // A function belongs to one context. If a function is set, the driver ignores the
                // new context.
                kernel.func = null_mut();
                kernel.ctx = context;
                // SAFETY: the node belongs to this graph, and the node owns its arguments.
                unsafe { sys::cuGraphKernelNodeSetParams_v2(node, &kernel) }.result()
            }
            // The driver may also use SMs for memory sets and copies, so these nodes move to the
            // partition too.
            MEMSET => move_memset(node, context),
            MEMCPY => move_memcpy(node, context),
            _ => Ok(()),
        })
    }

    pub(super) fn nodes(&self) -> Result<Vec<sys::CUgraphNode>, DriverError> {
        let mut count = 0;
        // SAFETY: with a null pointer, the call writes only the number of nodes.
        unsafe { sys::cuGraphGetNodes(self.graph, null_mut(), &mut count) }.result()?;
        let mut nodes = vec![null_mut(); count];
        // SAFETY: the buffer has room for the nodes counted above, and no code adds nodes between
        // the two calls.
        unsafe { sys::cuGraphGetNodes(self.graph, nodes.as_mut_ptr(), &mut count) }.result()?;
        nodes.truncate(count);
        Ok(nodes)
    }
}

/// Returns the node's type as a number, because the driver may have node types that the bindings do
/// not define.
fn type_of(node: sys::CUgraphNode) -> Result<u32, DriverError> {
    let mut kind = u32::MAX;
    // SAFETY: the node exists, and the driver writes one number of this size.
    unsafe { sys::cuGraphNodeGetType(node, (&raw mut kind).cast()) }.result()?;
    Ok(kind)
}

fn kernel_of(node: sys::CUgraphNode) -> Result<sys::CUDA_KERNEL_NODE_PARAMS, DriverError> {
    let mut params = MaybeUninit::uninit();
    // SAFETY: the node exists and is a kernel node. The driver fills in all parameters.
    unsafe {
        sys::cuGraphKernelNodeGetParams_v2(node, params.as_mut_ptr()).result()?;
        Ok(params.assume_init())
    }
}

fn move_memset(node: sys::CUgraphNode, ctx: sys::CUcontext) -> Result<(), DriverError> {
    let mut fill = MaybeUninit::uninit();
    // SAFETY: the node exists and is a memory-set node. The driver fills in all parameters.
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
    // SAFETY: the node exists and is a copy node. The driver fills in all parameters.
    let copy = unsafe {
        sys::cuGraphMemcpyNodeGetParams(node, copy.as_mut_ptr()).result()?;
        copy.assume_init()
    };
    let memcpy = sys::CUDA_MEMCPY_NODE_PARAMS { flags: 0, reserved: 0, copyCtx: context, copyParams: copy };
    set_params(node, sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY, |params| params.memcpy = memcpy)
}

/// Sets a node's parameters. All parameters are zero except for those that `fill_in` writes.
fn set_params(
    node: sys::CUgraphNode,
    kind: sys::CUgraphNodeType,
    fill_in: impl FnOnce(&mut sys::CUgraphNodeParams_st__bindgen_ty_1),
) -> Result<(), DriverError> {
    // SAFETY: the parameters are plain data, for which zeros are valid. Reserved fields must be
    // zero.
    let mut params: sys::CUgraphNodeParams = unsafe { zeroed() };
    params.type_ = kind;
    fill_in(&mut params.__bindgen_anon_1);
    // SAFETY: the node has this type, and only its context changes.
    unsafe { sys::cuGraphNodeSetParams(node, &mut params) }.result()
}

impl Drop for PieceGraph {
    fn drop(&mut self) {
        // If the context is unusable, the driver has already freed everything in it.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: this value owns the graph, and executables made from the graph do not need
            // it. If the call fails, the graph is freed when the process exits.
            unsafe { result::graph::destroy(self.graph) }.ok();
        }
    }
}

impl Drop for PieceExecutable {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: this value owns the executable. The driver first waits for a run in progress.
            // If the call fails, the executable is freed when the process exits.
            unsafe { result::graph::exec_destroy(self.executable) }.ok();
        }
    }
}
