//! Tensors of strings. ONNX Runtime accepts any sequence of bytes as a string. `ort` instead
//! requires UTF-8 and ends strings at the first NUL byte, so this module calls ONNX Runtime
//! directly.
#![allow(unsafe_code)] // This module calls ONNX Runtime directly.

use std::ptr::null_mut;

use ort::memory::Allocator;
use ort::session::SessionInputValue;
use ort::value::{DynTensor, DynValue, TensorElementType};
use ort::{AsPointer, ortsys};
use shadowslice_shared::batch::RunFailure;
use shadowslice_shared::tensor::{byte_strings, elements, push_byte_string};

use super::run_failure;
use crate::inputs::Inputs;

pub(super) fn tensor(
    shape: Vec<i64>,
    inputs: &Inputs<'_>,
    input: usize,
) -> Result<SessionInputValue<'static>, RunFailure> {
    let name = &inputs.specs()[input].name;
    let row = elements(inputs.row_shape(input)).expect("`Inputs` checked the shape");
    let mut tensor = DynTensor::new(&Allocator::default(), TensorElementType::String, shape)
        .map_err(|fault| run_failure(&fault))?;
    let mut index = 0;
    for request in 0..inputs.requests() {
        let strings = byte_strings(inputs.part(request, input))
            .filter(|strings| strings.len() == row * inputs.rows_of(request) as usize)
            .ok_or_else(|| {
                RunFailure::BadBatch(format!(
                    "the number of strings in input `{name}` does not match its shape"
                ))
            })?;
        for string in strings {
            set(&mut tensor, index, string).map_err(|fault| run_failure(&fault))?;
            index += 1;
        }
    }
    Ok(tensor.into())
}

fn set(tensor: &mut DynTensor, index: usize, string: &[u8]) -> ort::Result<()> {
    let mut place = null_mut();
    // SAFETY: the tensor holds strings, and ONNX Runtime itself checks the index.
    ortsys![unsafe GetResizedStringTensorElementBuffer(tensor.ptr_mut(), index, string.len(), &mut place)?];
    // SAFETY: the call above allocated this number of bytes, and nothing else uses that memory.
    unsafe { std::ptr::copy_nonoverlapping(string.as_ptr(), place.cast::<u8>(), string.len()) };
    Ok(())
}

/// The strings of an output.
#[derive(Debug)]
pub(super) struct Strings {
    bytes: Vec<u8>,
    /// The offset in `bytes` at which each string ends.
    ends: Vec<usize>,
}

impl Strings {
    pub(super) fn of(value: &DynValue, count: usize) -> ort::Result<Self> {
        let mut len = 0;
        // SAFETY: if the value does not hold strings, the call returns an error.
        ortsys![unsafe GetStringTensorDataLength(value.ptr(), &mut len)?];
        let (mut bytes, mut starts) = (vec![0; len], vec![0; count]);
        // SAFETY: both buffers have the sizes that are passed to the call.
        ortsys![unsafe GetStringTensorContent(value.ptr(), bytes.as_mut_ptr().cast(), len, starts.as_mut_ptr(), count)?];
        let ends = starts.into_iter().skip(1).chain((count > 0).then_some(len)).collect();
        Ok(Self { bytes, ends })
    }

    pub(super) fn encode(&self, first: usize, count: usize, into: &mut Vec<u8>) {
        let mut start = first.checked_sub(1).map_or(0, |before| self.ends[before]);
        for &end in &self.ends[first..first + count] {
            push_byte_string(into, &self.bytes[start..end]);
            start = end;
        }
    }
}
