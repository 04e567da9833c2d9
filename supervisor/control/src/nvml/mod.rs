//! Queries of real GPUs through NVML, the library of NVIDIA's driver. NVML opens no CUDA context.

mod facts;
mod library;
mod watch;
mod xid;

pub use facts::{ComputeMode, CudaVersion, Gpu, GpuProcess, Identity, Memory, NvmlHost, Power, Usage};
pub use library::{NvmlFault, NvmlLibrary};
pub use watch::{Driver, Reading, Readings, Watch, XidEvent, Xids};

#[cfg(test)]
mod tests;
