//! Copies between the GPU and the slabs.
#![allow(unsafe_code)] // This module copies between the GPU and the slab.

use std::ptr::NonNull;

use shadowslice_shared::batch::{BatchOutput, RunFailure};

use super::cuda_failure;
use crate::answer::AnswerSlot;
use crate::device::cuda::{CudaError, CudaGpu};
use crate::inputs::Inputs;

/// Queues the copies of an input's parts to the GPU, one after the other.
///
/// # Safety
///
/// The memory at `place` must be large enough, and only the batch of these parts may use it. The
/// parts must not change until the batch is answered.
pub(super) unsafe fn bring<'p>(
    parts: impl Iterator<Item = &'p [u8]>,
    place: NonNull<u8>,
    gpu: &CudaGpu,
) -> Result<(), CudaError> {
    let mut done = 0;
    for part in parts {
        // SAFETY: the caller guarantees both.
        unsafe { gpu.copy_in(part, place.add(done)) }?;
        done += part.len();
    }
    Ok(())
}

/// Queues the copies of an output on the compute stream. Each row has `row` bytes. The rows of each
/// request are copied into that request's part of the answer.
///
/// # Safety
///
/// The output must lie at `start` on the GPU and have at least as many rows as the batch. Only the
/// compute stream may write or free that memory.
pub(super) unsafe fn fetch(
    shape: &[i64],
    row: usize,
    start: NonNull<u8>,
    inputs: &Inputs<'_>,
    gpu: &CudaGpu,
    slot: &mut AnswerSlot<'_>,
) -> Result<BatchOutput, RunFailure> {
    let mut done = 0;
    let parts = (0..inputs.requests()).map(|request| {
        let len = row * inputs.rows_of(request) as usize;
        let (extent, place) = slot.reserve(len as u64);
        if let Some(place) = place {
            // SAFETY: the caller guarantees that the output is valid. The stream copies the output
            // before it writes to that memory or frees it. The part in the slot belongs to this
            // batch until the worker has answered the batch.
            unsafe { gpu.copy_out(start.add(done), place, len) }.map_err(|fault| cuda_failure(&fault))?;
        }
        done += len;
        Ok(extent)
    });
    let parts = parts.collect::<Result<_, RunFailure>>()?;
    Ok(BatchOutput { shape: shape.to_vec(), parts })
}
