//! Tensors: element types and the shapes that models declare.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Named as in the Open Inference Protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Datatype {
    /// One byte, 0 or 1.
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    /// IEEE 754 half precision.
    Fp16,
    Bf16,
    Fp32,
    Fp64,
    /// Each element is its length as a little-endian `u32`, then its bytes.
    Bytes,
}

impl Datatype {
    pub const ALL: [Self; 14] = [
        Self::Bool,
        Self::Uint8,
        Self::Uint16,
        Self::Uint32,
        Self::Uint64,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::Fp16,
        Self::Bf16,
        Self::Fp32,
        Self::Fp64,
        Self::Bytes,
    ];

    /// In bytes; `None` for [`Datatype::Bytes`], which has elements of different lengths.
    pub const fn size(self) -> Option<usize> {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => Some(1),
            Self::Uint16 | Self::Int16 | Self::Fp16 | Self::Bf16 => Some(2),
            Self::Uint32 | Self::Int32 | Self::Fp32 => Some(4),
            Self::Uint64 | Self::Int64 | Self::Fp64 => Some(8),
            Self::Bytes => None,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Uint8 => "UINT8",
            Self::Uint16 => "UINT16",
            Self::Uint32 => "UINT32",
            Self::Uint64 => "UINT64",
            Self::Int8 => "INT8",
            Self::Int16 => "INT16",
            Self::Int32 => "INT32",
            Self::Int64 => "INT64",
            Self::Fp16 => "FP16",
            Self::Bf16 => "BF16",
            Self::Fp32 => "FP32",
            Self::Fp64 => "FP64",
            Self::Bytes => "BYTES",
        }
    }
}

impl fmt::Display for Datatype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a datatype; use BOOL, UINT8..UINT64, INT8..INT64, FP16, BF16, FP32, FP64 or BYTES")]
pub struct UnknownDatatype(pub String);

impl FromStr for Datatype {
    type Err = UnknownDatatype;

    fn from_str(name: &str) -> Result<Self, UnknownDatatype> {
        Self::ALL
            .into_iter()
            .find(|datatype| datatype.name() == name)
            .ok_or_else(|| UnknownDatatype(name.to_owned()))
    }
}

/// An input or output as the model declares it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    pub name: String,
    pub datatype: Datatype,
    /// The batch axis included where there is one; -1 where any size is allowed.
    pub shape: Vec<i64>,
}

/// `None` if an axis is negative or the product does not fit.
pub fn elements(shape: &[i64]) -> Option<usize> {
    shape.iter().try_fold(1_usize, |product, &axis| product.checked_mul(usize::try_from(axis).ok()?))
}

/// The elements of a BYTES tensor; `None` where a length is wrong.
pub fn byte_strings(bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut strings = Vec::new();
    each_byte_string(bytes, |string| strings.push(string)).then_some(strings)
}

/// How many they are.
pub fn count_byte_strings(bytes: &[u8]) -> Option<usize> {
    let mut count = 0;
    each_byte_string(bytes, |_| count += 1).then_some(count)
}

fn each_byte_string<'b>(mut bytes: &'b [u8], mut each: impl FnMut(&'b [u8])) -> bool {
    while !bytes.is_empty() {
        let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return false };
        // No system here has smaller addresses.
        let Some((string, rest)) = rest.split_at_checked(u32::from_le_bytes(*length) as usize) else {
            return false;
        };
        each(string);
        bytes = rest;
    }
    true
}

/// Strings of 4 GiB or more do not occur: slabs are smaller.
pub fn push_byte_string(bytes: &mut Vec<u8>, string: &[u8]) {
    let length = u32::try_from(string.len()).expect("a request or answer is smaller than 4 GiB");
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(string);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_strings_come_back_and_lying_lengths_do_not() {
        let mut bytes = Vec::new();
        push_byte_string(&mut bytes, b"one");
        push_byte_string(&mut bytes, b"");
        assert_eq!(byte_strings(&bytes), Some(vec![&b"one"[..], b""]));
        assert_eq!(count_byte_strings(&bytes), Some(2));
        bytes[0] = 200;
        assert_eq!(byte_strings(&bytes), None);
        assert_eq!(byte_strings(&[1, 0]), None);
    }

    #[test]
    fn element_counts_do_not_overflow() {
        assert_eq!(elements(&[2, 3, 0]), Some(0));
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[-1, 3]), None);
        assert_eq!(elements(&[i64::MAX, i64::MAX]), None);
    }
}
