//! Rows of extreme values, which must not change the answers to the other rows of their batch.

use half::{bf16, f16};
use shadowslice_shared::tensor::Datatype;

use super::made_up::Fill;

/// The factor for floats, which are of size 1 in made-up rows.
const FACTOR: f64 = 1e4;

/// The factor for half precision, whose largest value is 65,504.
const HALF_FACTOR: f64 = 100.0;

/// The extreme integer. It fits every integer datatype, and exceeds most lengths and small tables.
const INTEGER: u8 = 100;

/// The values that are extreme in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extreme {
    /// Extreme floats. Integers become 1, if the others are 0 or 1.
    Floats,
    /// Large integers.
    Integers,
}

/// Returns a tensor's bytes with extreme values. Integers change only if they were made up with
/// `fill`, because given ones may have a meaning. Strings never change.
pub(super) fn extreme(which: Extreme, datatype: Datatype, bytes: &[u8], fill: Option<Fill>) -> Vec<u8> {
    let integer = match (which, fill) {
        (Extreme::Floats, Some(Fill::Bits)) => Some(1),
        (Extreme::Integers, Some(_)) if datatype != Datatype::Bool => Some(INTEGER),
        _ => None,
    };
    let scaled = which == Extreme::Floats;
    match datatype {
        Datatype::Fp16 if scaled => {
            each(bytes, |value| f16::from_f64(f16::from_le_bytes(value).to_f64() * HALF_FACTOR).to_le_bytes())
        }
        Datatype::Bf16 if scaled => {
            each(bytes, |value| bf16::from_f64(bf16::from_le_bytes(value).to_f64() * FACTOR).to_le_bytes())
        }
        Datatype::Fp32 if scaled => {
            each(bytes, |value| (f32::from_le_bytes(value) * FACTOR as f32).to_le_bytes())
        }
        Datatype::Fp64 if scaled => each(bytes, |value| (f64::from_le_bytes(value) * FACTOR).to_le_bytes()),
        Datatype::Fp16 | Datatype::Bf16 | Datatype::Fp32 | Datatype::Fp64 | Datatype::Bytes => bytes.to_vec(),
        _ => match (integer, datatype.size()) {
            (Some(integer), Some(size)) => {
                (0..bytes.len()).map(|at| if at % size == 0 { integer } else { 0 }).collect()
            }
            _ => bytes.to_vec(),
        },
    }
}

fn each<const N: usize>(bytes: &[u8], change: impl Fn([u8; N]) -> [u8; N]) -> Vec<u8> {
    bytes.as_chunks().0.iter().flat_map(|value| change(*value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_grow_and_integers_that_were_made_up_become_large() {
        let of = |which, datatype, bytes: &[u8], fill| extreme(which, datatype, bytes, fill);
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        assert_eq!(
            of(Extreme::Floats, Datatype::Fp32, &1.5_f32.to_le_bytes(), None),
            15_000_f32.to_le_bytes()
        );
        assert_eq!(of(Extreme::Floats, Datatype::Fp16, &half(-0.5), None), half(-50.0));
        assert_eq!(of(Extreme::Integers, Datatype::Fp16, &half(-0.5), None), half(-0.5));
        let bits = Some(Fill::Bits);
        assert_eq!(of(Extreme::Floats, Datatype::Int16, &[0, 0, 1, 0], bits), [1, 0, 1, 0]);
        assert_eq!(of(Extreme::Integers, Datatype::Int16, &[0, 0, 1, 0], bits), [100, 0, 100, 0]);
        assert_eq!(of(Extreme::Integers, Datatype::Bool, &[0, 1], bits), [0, 1]);
        assert_eq!(of(Extreme::Floats, Datatype::Int16, &[0, 0], Some(Fill::Zeros)), [0, 0]);
        for which in [Extreme::Floats, Extreme::Integers] {
            assert_eq!(of(which, Datatype::Int16, &[7, 0], None), [7, 0], "the operator gave it");
            assert_eq!(of(which, Datatype::Bytes, &[1, 0, 0, 0, 65], bits), [1, 0, 0, 0, 65]);
        }
    }
}
