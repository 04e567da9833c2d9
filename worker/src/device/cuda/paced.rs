//! Copies between host memory and the GPU in pieces, for data that is not urgent for other models.
#![allow(unsafe_code)] // This module starts copies.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::{CudaError, CudaGpu, cuda_error};

/// The size of a piece in bytes. A copy of this size takes about 45 us.
const PIECE_BYTES: usize = 2 << 20;

/// Copies on the compute stream of a model. Each piece is queued only when the previous piece has ended.
/// A stream that always has a copy queued would keep the copies of other models waiting until all of its
/// copies have ended (seen on an H200 under MPS).
#[derive(Debug)]
pub(super) struct PacedCopies<'g> {
    gpu: &'g CudaGpu,
    /// The bytes that were queued since the last wait. A piece can consist of several small copies.
    queued: usize,
}

impl<'g> PacedCopies<'g> {
    pub(super) fn on(gpu: &'g CudaGpu) -> Self {
        Self { gpu, queued: 0 }
    }

    /// Copies bytes to the GPU. Waits until most of the copies have ended.
    ///
    /// # Safety
    ///
    /// Both addresses must be valid for this number of bytes until the stream has executed the copies.
    pub(super) unsafe fn copy_in(
        &mut self,
        from: *const c_void,
        bytes: usize,
        to: sys::CUdeviceptr,
    ) -> Result<(), CudaError> {
        for begin in (0..bytes).step_by(PIECE_BYTES) {
            let piece = PIECE_BYTES.min(bytes - begin);
            let stream = self.gpu.compute.cu_stream();
            // SAFETY: the caller guarantees that both addresses are valid.
            let copied =
                unsafe { sys::cuMemcpyHtoDAsync_v2(to + begin as u64, from.byte_add(begin), piece, stream) };
            copied.result().map_err(cuda_error("copy to the GPU"))?;
            self.pace(piece)?;
        }
        Ok(())
    }

    /// Copies bytes from the GPU. Waits until most of the copies have ended.
    ///
    /// # Safety
    ///
    /// Both addresses must be valid for this number of bytes until the stream has executed the copies.
    pub(super) unsafe fn copy_out(
        &mut self,
        from: sys::CUdeviceptr,
        bytes: usize,
        to: *mut c_void,
    ) -> Result<(), CudaError> {
        for begin in (0..bytes).step_by(PIECE_BYTES) {
            let piece = PIECE_BYTES.min(bytes - begin);
            let stream = self.gpu.compute.cu_stream();
            // SAFETY: the caller guarantees that both addresses are valid.
            let copied =
                unsafe { sys::cuMemcpyDtoHAsync_v2(to.byte_add(begin), from + begin as u64, piece, stream) };
            copied.result().map_err(cuda_error("copy from the GPU"))?;
            self.pace(piece)?;
        }
        Ok(())
    }

    fn pace(&mut self, bytes: usize) -> Result<(), CudaError> {
        self.queued += bytes;
        if self.queued >= PIECE_BYTES {
            self.queued = 0;
            self.gpu.mark()?.wait();
        }
        Ok(())
    }
}
