//! Rows with changed or extreme values. Such a row must not change the answers to the other rows of
//! its batch.

use shadowslice_shared::compare::floats;
use shadowslice_shared::tensor::{Datatype, byte_strings, push_byte_string};

use super::floats::push_float;
use super::made_up::Fill;

/// The factor by which extreme floats exceed made-up floats, whose magnitude is at most 1.
const FACTOR: f64 = 1e4;

/// The factor for half precision. It is lower, because the largest half-precision number is 65,504.
const HALF_FACTOR: f64 = 100.0;

/// The extreme integer. It fits into every integer datatype. It exceeds most lengths, and it is out
/// of range for small tables.
const INTEGER: u8 = 100;

/// The kind of values that are made extreme in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extreme {
    /// Extreme floats. If the fill is [`Fill::Bits`], integers become 1.
    Floats,
    /// Extreme integers and strings.
    Integers,
}

/// Returns a tensor's bytes with extreme values. Changes integers and strings only if they were
/// made up with `fill`, because supplied values may have a meaning.
pub(super) fn extreme(which: Extreme, datatype: Datatype, bytes: &[u8], fill: Option<Fill>) -> Vec<u8> {
    let integer = match (which, fill) {
        (Extreme::Floats, Some(Fill::Bits)) => Some(1),
        (Extreme::Integers, Some(_)) if datatype != Datatype::Bool => Some(INTEGER),
        _ => None,
    };
    if let Some(values) = floats(datatype, bytes) {
        let factor = match (which, datatype) {
            (Extreme::Integers, _) => return bytes.to_vec(),
            (Extreme::Floats, Datatype::Fp16) => HALF_FACTOR,
            (Extreme::Floats, _) => FACTOR,
        };
        let mut scaled = Vec::with_capacity(bytes.len());
        values.iter().for_each(|value| _ = push_float(&mut scaled, datatype, value * factor));
        return scaled;
    }
    match (integer, datatype.size()) {
        (Some(integer), Some(size)) => {
            (0..bytes.len()).map(|at| if at % size == 0 { integer } else { 0 }).collect()
        }
        (Some(integer), None) if which == Extreme::Integers => {
            each_string(bytes, |_| integer.to_string().into_bytes())
        }
        _ => bytes.to_vec(),
    }
}

/// Returns a tensor's bytes, in which every string and integer differs from the given one. If
/// `bits` is true, the given values are 0 or 1, and so are the returned values. Floats do not
/// change.
pub(super) fn neighbour(datatype: Datatype, bytes: &[u8], bits: bool) -> Vec<u8> {
    match datatype {
        Datatype::Fp16 | Datatype::Bf16 | Datatype::Fp32 | Datatype::Fp64 => bytes.to_vec(),
        Datatype::Bytes => each_string(bytes, |text| match (bits, text) {
            (true, b"0") => b"1".to_vec(),
            (true, _) => b"0".to_vec(),
            (false, text) => [text, b"1"].concat(),
        }),
        Datatype::Bool => bytes.iter().map(|value| 1 - value.min(&1)).collect(),
        _ => {
            let size = datatype.size().unwrap_or(1);
            // Flipping the lowest bit gives a neighbouring value, which fits into the datatype.
            let changed = |(at, &value): (usize, &u8)| if at % size == 0 { value ^ 1 } else { value };
            bytes.iter().enumerate().map(changed).collect()
        }
    }
}

fn each_string(bytes: &[u8], change: impl Fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
    let mut changed = Vec::with_capacity(bytes.len());
    let strings = byte_strings(bytes).unwrap_or_default();
    strings.iter().for_each(|text| push_byte_string(&mut changed, &change(text)));
    changed
}

#[cfg(test)]
mod tests {
    use half::f16;

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
            assert_eq!(of(which, Datatype::Bytes, &[1, 0, 0, 0, 65], None), [1, 0, 0, 0, 65]);
        }
        let text = of(Extreme::Integers, Datatype::Bytes, &[1, 0, 0, 0, 48], bits);
        assert_eq!(text, [3, 0, 0, 0, 49, 48, 48]);
    }

    #[test]
    fn a_neighbour_differs_in_each_value_but_floats() {
        assert_eq!(neighbour(Datatype::Int16, &[1, 0, 4, 2], false), [0, 0, 5, 2]);
        assert_eq!(neighbour(Datatype::Bool, &[1, 0], true), [0, 1]);
        assert_eq!(neighbour(Datatype::Bytes, &[1, 0, 0, 0, 48], true), [1, 0, 0, 0, 49]);
        assert_eq!(neighbour(Datatype::Bytes, &[1, 0, 0, 0, 65], false), [2, 0, 0, 0, 65, 49]);
        assert_eq!(neighbour(Datatype::Fp32, &[1, 2, 3, 4], true), [1, 2, 3, 4]);
    }
}
