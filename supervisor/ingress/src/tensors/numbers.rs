//! The numbers in a tensor, in one type for all datatypes.

use half::{bf16, f16};
use shadowslice_shared::tensor::Datatype;

/// Returns the elements of a tensor of whole numbers, or `None` for another datatype.
pub(crate) fn integers(datatype: Datatype, data: &[u8]) -> Option<Vec<i128>> {
    Some(match datatype {
        Datatype::Uint8 => each(data, |bytes| u8::from_le_bytes(bytes).into()),
        Datatype::Uint16 => each(data, |bytes| u16::from_le_bytes(bytes).into()),
        Datatype::Uint32 => each(data, |bytes| u32::from_le_bytes(bytes).into()),
        Datatype::Uint64 => each(data, |bytes| u64::from_le_bytes(bytes).into()),
        Datatype::Int8 => each(data, |bytes| i8::from_le_bytes(bytes).into()),
        Datatype::Int16 => each(data, |bytes| i16::from_le_bytes(bytes).into()),
        Datatype::Int32 => each(data, |bytes| i32::from_le_bytes(bytes).into()),
        Datatype::Int64 => each(data, |bytes| i64::from_le_bytes(bytes).into()),
        _ => return None,
    })
}

/// Returns the elements of a tensor of floats in single precision, or `None` for another datatype.
pub(crate) fn floats(datatype: Datatype, data: &[u8]) -> Option<Vec<f32>> {
    Some(match datatype {
        Datatype::Fp16 => each(data, |bytes| f16::from_le_bytes(bytes).into()),
        Datatype::Bf16 => each(data, |bytes| bf16::from_le_bytes(bytes).into()),
        Datatype::Fp32 => each(data, f32::from_le_bytes),
        Datatype::Fp64 => each(data, |bytes| f64::from_le_bytes(bytes) as f32),
        _ => return None,
    })
}

fn each<T, const N: usize>(data: &[u8], number: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (elements, _) = data.as_chunks::<N>();
    elements.iter().map(|bytes| number(*bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_datatype_of_numbers_is_read() {
        assert_eq!(integers(Datatype::Int16, &[1, 0, 0xff, 0xff]), Some(vec![1, -1]));
        assert_eq!(integers(Datatype::Uint64, &[0xff; 8]), Some(vec![u64::MAX.into()]));
        assert_eq!(floats(Datatype::Fp16, &[0, 0x3c, 0, 0xc0]), Some(vec![1.0, -2.0]));
        assert_eq!(floats(Datatype::Bf16, &[0x80, 0x3f]), Some(vec![1.0]));
        assert_eq!(floats(Datatype::Fp64, &1.5_f64.to_le_bytes()), Some(vec![1.5]));
        assert_eq!((integers(Datatype::Fp32, &[]), floats(Datatype::Int8, &[])), (None, None));
    }
}
