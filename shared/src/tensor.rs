//! Tensors: their element types, the inputs and outputs that models declare, and the format of BYTES
//! tensors.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The type of a tensor's elements. The names come from the Open Inference Protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Datatype {
    /// A boolean of one byte, which is 0 or 1.
    Bool,
    /// An unsigned integer of 8 bits.
    Uint8,
    /// An unsigned integer of 16 bits.
    Uint16,
    /// An unsigned integer of 32 bits.
    Uint32,
    /// An unsigned integer of 64 bits.
    Uint64,
    /// A signed integer of 8 bits.
    Int8,
    /// A signed integer of 16 bits.
    Int16,
    /// A signed integer of 32 bits.
    Int32,
    /// A signed integer of 64 bits.
    Int64,
    /// A float of IEEE 754 half precision (16 bits).
    Fp16,
    /// A bfloat16: the upper 16 bits of an IEEE 754 single-precision float.
    Bf16,
    /// A float of IEEE 754 single precision (32 bits).
    Fp32,
    /// A float of IEEE 754 double precision (64 bits).
    Fp64,
    /// A byte string: the length as a little-endian `u32`, then the bytes.
    Bytes,
}

impl Datatype {
    /// All datatypes.
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

    /// Returns the size of an element in bytes. Returns `None` for [`Datatype::Bytes`], whose elements
    /// vary in length.
    pub const fn size(self) -> Option<usize> {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => Some(1),
            Self::Uint16 | Self::Int16 | Self::Fp16 | Self::Bf16 => Some(2),
            Self::Uint32 | Self::Int32 | Self::Fp32 => Some(4),
            Self::Uint64 | Self::Int64 | Self::Fp64 => Some(8),
            Self::Bytes => None,
        }
    }

    /// Returns the name in the Open Inference Protocol, for example "FP32".
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

/// The error for an unknown name of a datatype. It contains the name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown datatype {0:?}; use BOOL, UINT8..UINT64, INT8..INT64, FP16, BF16, FP32, FP64 or BYTES")]
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

/// The declaration of an input or output of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// The name of the input or output.
    pub name: String,
    /// The type of the elements.
    pub datatype: Datatype,
    /// The length of each axis, including the batch axis if the model has one. -1 stands for any
    /// length.
    pub shape: Vec<i64>,
}

/// Returns the number of elements in a tensor of this shape. Returns `None` if an axis is negative or
/// the product overflows.
pub fn elements(shape: &[i64]) -> Option<usize> {
    shape.iter().try_fold(1_usize, |product, &axis| product.checked_mul(usize::try_from(axis).ok()?))
}

/// Returns the elements of a BYTES tensor. Returns `None` if a length exceeds the number of bytes that
/// follow it.
pub fn byte_strings(bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut strings = Vec::new();
    each_byte_string(bytes, |string| strings.push(string)).then_some(strings)
}

/// Returns the number of elements in a BYTES tensor. Returns `None` if a length exceeds the number of
/// bytes that follow it.
pub fn count_byte_strings(bytes: &[u8]) -> Option<usize> {
    let mut count = 0;
    each_byte_string(bytes, |_| count += 1).then_some(count)
}

fn each_byte_string<'b>(mut bytes: &'b [u8], mut each: impl FnMut(&'b [u8])) -> bool {
    while !bytes.is_empty() {
        let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return false };
        // This cast is lossless, because all supported systems have addresses of at least 32 bits.
        let Some((string, rest)) = rest.split_at_checked(u32::from_le_bytes(*length) as usize) else {
            return false;
        };
        each(string);
        bytes = rest;
    }
    true
}

/// Appends an element to a BYTES tensor: its length, then its bytes.
///
/// # Panics
///
/// Panics if the string has 4 GiB or more. Slabs are smaller, so this does not happen.
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
