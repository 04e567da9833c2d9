//! Floats in the encoding of tensors.

use half::{bf16, f16};
use shadowslice_shared::tensor::Datatype;

/// Appends a value in the encoding of a floating-point type. Returns false for other types.
pub(super) fn push_float(bytes: &mut Vec<u8>, datatype: Datatype, value: f64) -> bool {
    match datatype {
        Datatype::Fp16 => bytes.extend(f16::from_f64(value).to_le_bytes()),
        Datatype::Bf16 => bytes.extend(bf16::from_f64(value).to_le_bytes()),
        Datatype::Fp32 => bytes.extend((value as f32).to_le_bytes()),
        Datatype::Fp64 => bytes.extend(value.to_le_bytes()),
        _ => return false,
    }
    true
}
