//! Tensors of ONNX Runtime in memory that ONNX Runtime does not own.
#![allow(unsafe_code)] // This module creates tensors in such memory.

use std::ptr::{NonNull, null_mut};

use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::session::SessionInputValue;
use ort::value::{DynValue, TensorElementType};
use ort::{AsPointer, ortsys};
use shadowslice_shared::batch::RunFailure;
use shadowslice_shared::tensor::Datatype;

use super::{element_type, run_failure};

/// Creates a tensor in existing memory.
///
/// # Safety
///
/// There must be `bytes` bytes at `start`, in memory of this kind, and they must outlive the tensor.
pub(super) unsafe fn at(
    memory: &MemoryInfo<'static>,
    start: NonNull<u8>,
    bytes: usize,
    shape: &[i64],
    element: TensorElementType,
) -> ort::Result<DynValue> {
    let (start, mut value) = (start.as_ptr().cast(), null_mut());
    // SAFETY: the caller guarantees that the memory is valid. ONNX Runtime returns an error if the
    // size does not fit the shape.
    ortsys![unsafe CreateTensorWithDataAsOrtValue(memory.ptr(), start, bytes, shape.as_ptr(), shape.len(), element.into(), &mut value)?];
    let value = NonNull::new(value).expect("the call above created the value");
    // SAFETY: the value is a tensor and has no other owner. `ort` requires an allocator, but uses
    // the allocator only for tensors that `ort` creates itself.
    Ok(unsafe { DynValue::from_ptr(value, Some(&Allocator::default())) })
}

/// Returns a tensor of numbers or booleans for the inputs of a run. A run only reads its inputs.
pub(super) fn of_bytes<'b>(
    datatype: Datatype,
    shape: &[i64],
    bytes: &'b [u8],
) -> Result<SessionInputValue<'b>, RunFailure> {
    let on_host = MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Device, MemoryType::Default);
    let on_host = on_host.map_err(|fault| run_failure(&fault))?;
    // SAFETY: the bytes outlive the result, which keeps the tensor.
    let tensor =
        unsafe { at(&on_host, NonNull::from(bytes).cast(), bytes.len(), shape, element_type(datatype)) };
    Ok(tensor.map_err(|fault| run_failure(&fault))?.into())
}
