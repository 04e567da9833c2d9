//! Floats in the encoding of tensors.

use half::{bf16, f16};
use shadowslice_shared::tensor::Datatype;

/// Returns the values as floats, or `None` if the datatype is not a floating-point type.
pub(super) fn floats(datatype: Datatype, bytes: &[u8]) -> Option<Vec<f64>> {
    fn all<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks::<N>().0.iter().map(|&chunk| value(chunk)).collect()
    }
    match datatype {
        Datatype::Fp16 => Some(all(bytes, |chunk| f16::from_le_bytes(chunk).to_f64())),
        Datatype::Bf16 => Some(all(bytes, |chunk| bf16::from_le_bytes(chunk).to_f64())),
        Datatype::Fp32 => Some(all(bytes, |chunk| f64::from(f32::from_le_bytes(chunk)))),
        Datatype::Fp64 => Some(all(bytes, f64::from_le_bytes)),
        _ => None,
    }
}

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
