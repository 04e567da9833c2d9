//! The shapes of nested arrays in JSON.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;
use shadowslice_shared::tensor::{self, Datatype};

use super::json::MAX_AXES;
use super::values;

/// The number of characters of JSON for each row besides its values: two brackets and a comma.
const ROW_CHARACTERS: usize = 3;

/// Returns the shape of a value. The shape of a scalar is empty.
///
/// # Errors
///
/// Returns an error if two arrays at the same depth have different lengths.
pub(super) fn shape_of(value: &RawValue) -> Result<Vec<i64>, String> {
    let mut reader = ShapeReader { axes: Vec::new(), rank: None, depth: 0 };
    let mut json = serde_json::Deserializer::from_str(value.get());
    (&mut reader).deserialize(&mut json).map_err(|why| format!("invalid data: {why}"))?;
    if reader.rank.is_some_and(|rank| rank != reader.axes.len()) {
        return Err(format!("invalid data: {RAGGED}"));
    }
    let axes = reader.axes.into_iter().map(Option::unwrap_or_default);
    Ok(axes.map(|axis| i64::try_from(axis).unwrap_or(i64::MAX)).collect())
}

const RAGGED: &str = "the arrays must have equal lengths at each depth";

struct ShapeReader {
    /// The lengths of the arrays at each depth. `None` while the first array of a depth is read.
    axes: Vec<Option<usize>>,
    /// The depth of the scalars.
    rank: Option<usize>,
    depth: usize,
}

impl ShapeReader {
    fn scalar<E: Error>(&mut self) -> Result<(), E> {
        match *self.rank.get_or_insert(self.depth) {
            rank if rank == self.depth => Ok(()),
            _ => Err(E::custom(RAGGED)),
        }
    }
}

impl<'de> DeserializeSeed<'de> for &mut ShapeReader {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut ShapeReader {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value or an array of values")
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        self.scalar()
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        self.scalar()
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.scalar()
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        let depth = self.depth;
        if depth == self.axes.len() {
            if depth == MAX_AXES {
                return Err(A::Error::custom(format_args!("more than {MAX_AXES} nested arrays")));
            }
            self.axes.push(None);
        }
        self.depth += 1;
        let mut length = 0;
        while values.next_element_seed(&mut *self)?.is_some() {
            length += 1;
        }
        self.depth = depth;
        match *self.axes[depth].get_or_insert(length) {
            axis if axis == length => Ok(()),
            _ => Err(A::Error::custom(RAGGED)),
        }
    }
}

/// Returns the maximum number of brackets and commas that [`write`] adds to the values.
pub(super) fn bracket_bytes(shape: &[i64]) -> usize {
    let axes = shape.iter().map(|&axis| usize::try_from(axis).unwrap_or(usize::MAX));
    let rows = axes.scan(1_usize, |rows, axis| {
        let outer = *rows;
        *rows = rows.saturating_mul(axis);
        Some(outer)
    });
    rows.fold(0_usize, usize::saturating_add).saturating_mul(ROW_CHARACTERS)
}

/// Appends a tensor to `json`: a single element as a scalar, and more elements as arrays that are
/// nested like the shape.
pub(super) fn write(
    datatype: Datatype,
    shape: &[i64],
    data: &[u8],
    json: &mut Vec<u8>,
) -> Result<(), String> {
    values::no_json_form(datatype)?;
    let elements = tensor::elements(shape).ok_or("the shape of the output is invalid")?;
    if elements == 1 {
        let start = json.len();
        values::decode(datatype, data, json)?;
        json.pop();
        json.remove(start);
        return Ok(());
    }
    // A shape with a zero could have any number of empty arrays.
    let shape = if elements == 0 { &[] } else { shape };
    let width = shape.last().map_or(0, |&axis| usize::try_from(axis).unwrap_or(0));
    match datatype.size() {
        Some(size) => {
            let mut rows = data.chunks(size.saturating_mul(width).max(1));
            nest(shape, json, &mut |json| values::decode(datatype, rows.next().unwrap_or_default(), json))
        }
        None => {
            let strings = tensor::byte_strings(data).ok_or("the lengths of the BYTES elements are wrong")?;
            let mut rows = strings.chunks(width.max(1));
            nest(shape, json, &mut |json| {
                json.push(b'[');
                values::write_strings(rows.next().unwrap_or_default(), json)?;
                json.push(b']');
                Ok(())
            })
        }
    }
}

/// Appends arrays. `row` appends the next array of the last axis.
fn nest(
    shape: &[i64],
    json: &mut Vec<u8>,
    row: &mut impl FnMut(&mut Vec<u8>) -> Result<(), String>,
) -> Result<(), String> {
    let [axis, inner @ ..] = shape else { return row(json) };
    if inner.is_empty() {
        return row(json);
    }
    json.push(b'[');
    for place in 0..*axis {
        if place > 0 {
            json.push(b',');
        }
        nest(inner, json, row)?;
    }
    json.push(b']');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(json: &str) -> Result<Vec<i64>, String> {
        shape_of(&RawValue::from_string(json.to_owned()).unwrap())
    }

    #[test]
    fn the_shape_follows_from_the_nesting() {
        for (json, expected) in [
            ("7", &[][..]),
            ("\"a\"", &[]),
            ("null", &[]),
            ("[]", &[0]),
            ("[1, 2]", &[2]),
            ("[[1], [2], [3]]", &[3, 1]),
            ("[[], []]", &[2, 0]),
            (r#"[[["a", "b"]]]"#, &[1, 1, 2]),
        ] {
            assert_eq!(shape(json).as_deref(), Ok(expected), "{json}");
        }
        for json in ["[[1], 2]", "[1, [2]]", "[[1, 2], [3]]", "[[], [1]]", "[1, []]", "[[[]], [1]]"] {
            assert!(shape(json).unwrap_err().contains("equal lengths"), "{json}");
        }
        assert!(shape("{}").unwrap_err().contains("a value or an array"));
        let deep = |depth: usize| shape(&format!("{}{}", "[".repeat(depth), "]".repeat(depth)));
        assert_eq!(deep(MAX_AXES).unwrap().len(), MAX_AXES);
        assert!(deep(MAX_AXES + 1).unwrap_err().contains("nested arrays"));
    }

    fn written(datatype: Datatype, shape: &[i64], data: &[u8]) -> String {
        let mut json = b"x".to_vec();
        write(datatype, shape, data, &mut json).unwrap();
        assert!(json.len() <= 1 + values::text_bytes(datatype, data.len()) + 2 + bracket_bytes(shape));
        String::from_utf8(json).unwrap()[1..].to_owned()
    }

    #[test]
    fn tensors_are_nested_like_their_shapes() {
        let bytes = [1, 2, 3, 4, 5, 6];
        for (shape, expected) in [
            (&[6][..], "[1,2,3,4,5,6]"),
            (&[2, 3], "[[1,2,3],[4,5,6]]"),
            (&[3, 1, 2], "[[[1,2]],[[3,4]],[[5,6]]]"),
            (&[6, 1], "[[1],[2],[3],[4],[5],[6]]"),
        ] {
            assert_eq!(written(Datatype::Uint8, shape, &bytes), expected, "{shape:?}");
        }
        assert_eq!(written(Datatype::Uint8, &[1, 1], &[7]), "7");
        assert_eq!(written(Datatype::Uint8, &[], &[7]), "7");
        assert_eq!(written(Datatype::Uint8, &[1 << 40, 0], &[]), "[]");
        let mut strings = Vec::new();
        ["a", "", "é\n", "b"].iter().for_each(|text| tensor::push_byte_string(&mut strings, text.as_bytes()));
        assert_eq!(written(Datatype::Bytes, &[2, 2], &strings), r#"[["a",""],["é\n","b"]]"#);
        assert_eq!(written(Datatype::Bytes, &[1, 1], &strings[..5]), "\"a\"");
        assert!(write(Datatype::Fp16, &[1], &[0, 0], &mut Vec::new()).unwrap_err().contains("no JSON form"));
    }
}
