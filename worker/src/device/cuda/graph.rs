//! A piece of work that was recorded once, and is started again at the cost of one call.

use std::fmt;

use cudarc::driver::{CudaGraph, sys};

use super::{CudaFault, CudaGpu, fault};

/// Recorded work. What it reads and writes must stay where it was.
pub struct Graph(CudaGraph);

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}

impl CudaGpu {
    /// Records what `work` puts on the compute stream, without executing it; `None` if that cannot be recorded.
    pub fn record<E>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Option<Graph>, CudaFault> {
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        self.compute.begin_capture(relaxed).map_err(fault("record a batch"))?;
        let worked = work();
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        // What was not allowed in a recording ends it, and makes this fail.
        let graph = self.compute.end_capture(flags).ok().flatten();
        Ok(graph.filter(|_| worked.is_ok()).map(Graph))
    }

    /// Puts recorded work on the compute stream.
    pub fn replay(&self, graph: &Graph) -> Result<(), CudaFault> {
        graph.0.launch().map_err(fault("start recorded work"))
    }
}
