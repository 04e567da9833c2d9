//! Copies between host memory and the GPU in pieces, for data that is not urgent for other models.
#![allow(unsafe_code)] // This module starts copies.

use std::collections::VecDeque;
use std::ffi::c_void;

use cudarc::driver::sys;

use super::{CudaError, CudaGpu, StreamMark, cuda_error};

/// The size of one copy in bytes. A copy of this size takes about 45 us.
const PIECE_BYTES: usize = 2 << 20;

/// The number of copies that are queued on the GPU at a time. Copies of other models wait behind them,
/// and fewer would leave the link idle between two copies.
const QUEUED_PIECES: usize = 3;

/// Copies on the compute stream of a model. Only a few pieces are queued at a time, so that the copies of
/// other models need not wait for all of them.
#[derive(Debug)]
pub(super) struct PacedCopies<'g> {
    gpu: &'g CudaGpu,
    queued: VecDeque<StreamMark>,
    /// The bytes that were queued since the last mark. A piece can consist of several small copies.
    unmarked: usize,
}

impl<'g> PacedCopies<'g> {
    pub(super) fn on(gpu: &'g CudaGpu) -> Self {
        Self { gpu, queued: VecDeque::with_capacity(QUEUED_PIECES), unmarked: 0 }
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
        self.unmarked += bytes;
        if self.unmarked < PIECE_BYTES {
            return Ok(());
        }
        self.unmarked = 0;
        self.queued.push_back(self.gpu.mark()?);
        if self.queued.len() >= QUEUED_PIECES
            && let Some(first) = self.queued.pop_front()
        {
            first.wait();
        }
        Ok(())
    }
}
