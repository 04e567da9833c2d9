//! Made-up inputs, which are identical in every worker of a model.

use serde::{Deserialize, Serialize};
use shadowslice_shared::boot::{ElementValue, InputValues};
use shadowslice_shared::tensor::{Datatype, push_byte_string};

use super::floats::push_float;

/// The made-up values of tensors that do not hold floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Fill {
    /// The values 0 and 1. Every vocabulary has tokens with these numbers, and nearly every table
    /// has rows with these indices.
    Bits,
    /// The value 1. Every model can divide by it.
    Ones,
    /// The value 0. It is a valid index even into a table with a single row.
    Zeros,
}

impl Fill {
    /// All kinds of values, in the order in which they are tried.
    pub(super) const ALL: [Self; 3] = [Self::Bits, Self::Ones, Self::Zeros];
}

/// The settings from which all workers of a model make up the same inputs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InputSettings {
    pub(super) fill: Fill,
    /// The length of the axes that neither the model nor the operator fixes.
    pub(super) open_axis: i64,
    /// The values of each input, or `None` for a made-up input. The operator supplies them, or the
    /// reference worker finds them in its search.
    pub(super) values: Vec<Option<InputValues>>,
}

impl InputSettings {
    /// Returns the first settings to try, with the operator's values.
    pub fn first(values: Vec<Option<InputValues>>) -> Self {
        Self { fill: Fill::ALL[0], open_axis: super::OPEN_AXES[0], values }
    }
}

/// The purpose for which values are drawn. The warm-up and the proof get different values, so a
/// result left in memory by the warm-up cannot pass for an answer in the proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Draw {
    WarmUp,
    Proof,
}

/// The parameters that determine the made-up values of one input of a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct InputDraw {
    /// The index of the input.
    pub(super) input: usize,
    pub(super) fill: Fill,
    pub(super) draw: Draw,
}

/// Returns made-up values. Floats are uniformly distributed from -1 to 1, and `fill` determines all
/// other values.
pub(super) fn tensor(
    datatype: Datatype,
    count: usize,
    size: u32,
    InputDraw { input, fill, draw }: InputDraw,
) -> Vec<u8> {
    let mut random = SplitMix64::of(size, draw, input);
    let mut bytes = Vec::with_capacity(count * datatype.size().unwrap_or(5));
    for _ in 0..count {
        let float = random.float();
        let bit = match fill {
            Fill::Bits => u8::from(float > 0.0),
            Fill::Ones => 1,
            Fill::Zeros => 0,
        };
        match datatype.size() {
            None => push_byte_string(&mut bytes, &[b'0' + bit]),
            Some(_) if push_float(&mut bytes, datatype, float) => {}
            Some(size) => bytes.extend(u64::from(bit).to_le_bytes().into_iter().take(size)),
        }
    }
    bytes
}

/// Returns values that the operator supplies. These are either rows, which repeat in order, or a
/// range, from which values are drawn.
pub(super) fn given(
    datatype: Datatype,
    count: usize,
    size: u32,
    InputDraw { input, draw, .. }: InputDraw,
    values: &InputValues,
) -> Vec<u8> {
    if let InputValues::Rows(rows) = values {
        // If the operator supplies several rows, the warm-up begins with another row than the
        // proof.
        let first = usize::from(draw == Draw::WarmUp);
        return rows
            .iter()
            .cycle()
            .skip(first)
            .take(size as usize)
            .flat_map(|row| row.iter())
            .copied()
            .collect();
    }
    let mut random = SplitMix64::of(size, draw, input);
    let mut bytes = Vec::with_capacity(count * datatype.size().unwrap_or(5));
    for at in 0..count {
        match values {
            InputValues::Rows(_) => {}
            InputValues::Listed(listed) => {
                let value = listed.get(at % listed.len().max(1));
                value.iter().for_each(|value| push(&mut bytes, datatype, value));
            }
            InputValues::Range { from, to } => {
                let drawn = from + (random.float() + 1.0) / 2.0 * (to - from);
                let is_float =
                    matches!(datatype, Datatype::Fp16 | Datatype::Bf16 | Datatype::Fp32 | Datatype::Fp64);
                let value = match is_float {
                    true => ElementValue::Number(drawn),
                    false => ElementValue::Whole(drawn.round() as i64),
                };
                push(&mut bytes, datatype, &value);
            }
        }
    }
    bytes
}

/// Appends a value. Integers that do not fit into the datatype are truncated, as in C.
fn push(bytes: &mut Vec<u8>, datatype: Datatype, value: &ElementValue) {
    let (whole, number) = match value {
        ElementValue::Whole(whole) => (*whole, *whole as f64),
        ElementValue::Number(number) => (*number as i64, *number),
        ElementValue::Text(text) => return push_byte_string(bytes, text.as_bytes()),
    };
    if !push_float(bytes, datatype, number) {
        bytes.extend(whole.to_le_bytes().into_iter().take(datatype.size().unwrap_or(0)));
    }
}

/// The SplitMix64 generator of Steele, Lea and Flood. It is fast, and its values are random enough
/// that every weight influences the answers.
struct SplitMix64(u64);

impl SplitMix64 {
    fn of(size: u32, draw: Draw, input: usize) -> Self {
        let draw = match draw {
            Draw::Proof => 0,
            Draw::WarmUp => 1 << 31,
        };
        Self((u64::from(size) << 32) ^ draw ^ input as u64)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn float(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::boot::RowBytes;

    use super::*;
    use shadowslice_shared::tensor::byte_strings;

    fn input_draw(input: usize, fill: Fill, draw: Draw) -> InputDraw {
        InputDraw { input, fill, draw }
    }

    #[test]
    fn the_generator_is_the_published_one() {
        let mut random = SplitMix64(1_234_567);
        assert_eq!([random.next(), random.next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }

    #[test]
    fn given_values_come_in_turn_or_from_their_range() {
        let given = |datatype, values| given(datatype, 3, 1, input_draw(0, Fill::Bits, Draw::Proof), &values);
        let listed = |values: &[i64]| {
            InputValues::Listed(values.iter().map(|&value| ElementValue::Whole(value)).collect())
        };
        assert_eq!(given(Datatype::Int16, listed(&[-1, 300])), [255, 255, 44, 1, 255, 255]);
        assert_eq!(given(Datatype::Fp32, listed(&[2])), [2.0_f32; 3].map(f32::to_le_bytes).concat());
        let range = given(Datatype::Uint8, InputValues::Range { from: 7.0, to: 9.0 });
        assert!(range.len() == 3 && range.iter().all(|value| (7..=9).contains(value)), "{range:?}");
        let rows = InputValues::Rows([[1, 2], [3, 4]].map(RowBytes::from).into());
        let of = |draw, size| super::given(Datatype::Int8, 0, size, input_draw(0, Fill::Bits, draw), &rows);
        assert_eq!([of(Draw::Proof, 3), of(Draw::WarmUp, 3)], [[1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3, 4]]);
        assert_eq!(of(Draw::WarmUp, 1), [3, 4]);
        let text = InputValues::Listed(vec![ElementValue::Text("Wien".to_owned())]);
        assert_eq!(byte_strings(&given(Datatype::Bytes, text)).unwrap(), [b"Wien"; 3]);
    }

    #[test]
    fn every_datatype_has_its_bytes_and_bits_of_both_kinds() {
        for datatype in Datatype::ALL {
            let bytes = tensor(datatype, 64, 8, input_draw(1, Fill::Bits, Draw::Proof));
            match datatype.size() {
                Some(size) => assert_eq!(bytes.len(), 64 * size, "{datatype}"),
                None => assert_eq!(byte_strings(&bytes).unwrap().len(), 64),
            }
        }
        let booleans = tensor(Datatype::Bool, 64, 8, input_draw(1, Fill::Bits, Draw::Proof));
        assert!(booleans.contains(&0) && booleans.contains(&1) && booleans.iter().all(|&bit| bit < 2));
        assert_eq!(tensor(Datatype::Int8, 3, 8, input_draw(1, Fill::Ones, Draw::Proof)), [1, 1, 1]);
        assert_eq!(tensor(Datatype::Int8, 3, 8, input_draw(1, Fill::Zeros, Draw::Proof)), [0, 0, 0]);
        let floats = |size, input, draw| tensor(Datatype::Fp32, 4, size, input_draw(input, Fill::Bits, draw));
        let proof = floats(8, 1, Draw::Proof);
        for other in [floats(8, 2, Draw::Proof), floats(4, 1, Draw::Proof), floats(8, 1, Draw::WarmUp)] {
            assert_ne!(proof, other);
        }
    }
}
