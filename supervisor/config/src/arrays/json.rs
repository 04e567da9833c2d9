//! Reads JSON files: an array as nested lists, or the body of an inference request.

use std::fmt;
use std::sync::Arc;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};
use shadowslice_shared::boot::ElementValue;
use shadowslice_shared::tensor::Datatype;

use super::{Array, ArrayError, Arrays, Elements, count};

/// The largest number of axes of an array.
const MAX_AXES: usize = 32;

/// The part of an Open Inference Protocol request that this module reads.
#[derive(serde::Deserialize)]
#[serde(expecting = "a request with `inputs`")]
struct Body {
    inputs: Vec<Input>,
}

#[derive(serde::Deserialize)]
#[serde(expecting = "an input with `name`, `datatype`, `shape` and `data`")]
struct Input {
    name: String,
    datatype: DatatypeName,
    shape: Vec<i64>,
    data: Option<Nested>,
}

/// A datatype that serde deserializes from the datatype's name.
struct DatatypeName(Datatype);

impl<'de> Deserialize<'de> for DatatypeName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map(Self).map_err(Error::custom)
    }
}

/// Reads an array from nested lists, or the inputs of a request.
pub(super) fn read(file: &[u8]) -> Result<Arrays, ArrayError> {
    let is_request = file.trim_ascii_start().first() == Some(&b'{');
    if !is_request {
        let Nested { axes, values } = serde_json::from_slice(file).map_err(ArrayError::Json)?;
        let shape: Vec<i64> = axes.into_iter().map(|axis| axis.unwrap_or(0)).collect();
        count(&shape)?;
        return Ok(Arrays::One(Arc::new(Array {
            datatype: None,
            shape,
            elements: Elements::Values(values),
        })));
    }
    let Body { inputs } = serde_json::from_slice(file).map_err(ArrayError::Json)?;
    let arrays = inputs.into_iter().map(|Input { name, datatype: DatatypeName(datatype), shape, data }| {
        let Some(Nested { values, .. }) = data else { return Err(ArrayError::NoData(name)) };
        if count(&shape)? != values.len() {
            return Err(ArrayError::Count { name, shape, values: values.len() });
        }
        let elements = Elements::Values(values);
        Ok((name, Arc::new(Array { datatype: Some(datatype), shape, elements })))
    });
    arrays.collect::<Result<_, _>>().map(Arrays::Named)
}

/// An array that is written as nested lists. All lists at the same depth have the same length.
#[derive(Debug, Default)]
struct Nested {
    /// The length of each axis. A length is `None` until the first list at that depth has ended.
    axes: Vec<Option<i64>>,
    values: Vec<ElementValue>,
}

impl<'de> Deserialize<'de> for Nested {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut nested = Self::default();
        Level { nested: &mut nested, depth: 0 }.deserialize(deserializer)?;
        Ok(nested)
    }
}

struct Level<'n> {
    nested: &'n mut Nested,
    depth: usize,
}

impl Level<'_> {
    fn push<E: Error>(self, value: ElementValue) -> Result<(), E> {
        let axes = self.nested.axes.len();
        if self.depth != axes {
            return Err(E::custom(format_args!("a value is in {} lists, but others in {axes}", self.depth)));
        }
        self.nested.values.push(value);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Level<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Level<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("numbers, texts, true or false, in lists")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<(), E> {
        self.push(ElementValue::Whole(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<(), E> {
        self.push(ElementValue::Whole(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<(), E> {
        let whole = i64::try_from(value);
        let whole = whole.map_err(|_| E::custom(format_args!("{value} is too large; use a .npy file")))?;
        self.push(ElementValue::Whole(whole))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<(), E> {
        self.push(ElementValue::Number(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<(), E> {
        self.push(ElementValue::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Self { nested, depth } = self;
        if depth == nested.axes.len() {
            if !nested.values.is_empty() {
                return Err(A::Error::custom("a list is beside values"));
            }
            if depth == MAX_AXES {
                return Err(A::Error::custom(format_args!("more than {MAX_AXES} axes")));
            }
            nested.axes.push(None);
        }
        let mut length = 0_i64;
        while items.next_element_seed(Level { nested, depth: depth + 1 })?.is_some() {
            length += 1;
        }
        let axis = nested.axes[depth].get_or_insert(length);
        if *axis != length {
            return Err(A::Error::custom(format_args!("a list has {length} items, but others {axis}")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::errors;

    use super::*;

    fn one(text: &str) -> Result<Array, String> {
        match read(text.as_bytes()).map_err(|error| errors::chain(&error))? {
            Arrays::One(array) => Ok(Array::clone(&array)),
            Arrays::Named(named) => Err(format!("{named:?}")),
        }
    }

    #[test]
    fn nested_lists_give_the_axes_of_an_array() {
        let array = one(" [[1, 2.5, true], [\"a\", -1, false]]").unwrap();
        assert_eq!((array.datatype, array.shape()), (None, &[2, 3][..]));
        let Elements::Values(values) = &array.elements else { unreachable!("JSON has values") };
        assert_eq!(
            values[1..4],
            [ElementValue::Number(2.5), ElementValue::Whole(1), ElementValue::Text("a".to_owned())]
        );
        assert_eq!(one("7").unwrap().shape(), [0_i64; 0]);
        assert_eq!(one("[[[7]]]").unwrap().shape(), [1, 1, 1]);
    }

    #[test]
    fn ragged_and_empty_arrays_are_refused() {
        for (text, why) in [
            ("[[1, 2], [3]]", "a list has 1 items, but others 2"),
            ("[[1], 2]", "a value is in 1 lists, but others in 2"),
            ("[1, [2]]", "a list is beside values"),
            ("[[], [1]]", "a list has 1 items, but others 0"),
            ("[]", "is empty"),
            ("[[], []]", "is empty"),
            ("[null]", "invalid type"),
            ("[NaN]", "line 1 column 2"),
            ("[18446744073709551615]", "use a .npy file"),
            ("", "EOF"),
            ("[1] [2]", "trailing"),
        ] {
            let error = one(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        let deep = format!("{}1{}", "[".repeat(33), "]".repeat(33));
        assert!(one(&deep).unwrap_err().contains("more than 32 axes"));
        assert!(one(&"[".repeat(100_000)).is_err());
    }

    #[test]
    fn a_request_gives_named_inputs() {
        let read = |text: &str| match read(text.as_bytes()) {
            Ok(Arrays::Named(named)) => Ok(named),
            Ok(Arrays::One(array)) => Err(format!("{array:?}")),
            Err(error) => Err(errors::chain(&error)),
        };
        let text = r#"{"id": "7", "outputs": [{"name": "y"}], "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5], "parameters": {}},
            {"name": "s", "datatype": "BYTES", "shape": [1, 1], "data": [["Wien"]]}]}"#;
        let named = read(text).unwrap();
        assert_eq!((named["x"].datatype, named["x"].shape()), (Some(Datatype::Fp32), &[1, 2][..]));
        assert_eq!(named["s"].shape(), [1, 1]);
        for (input, why) in [
            (r#""name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1]"#, "[1, 2], but 1 values"),
            (r#""name": "x", "datatype": "FP32", "shape": [1]"#, "`x` has no `data`"),
            (r#""name": "x", "datatype": "FP31", "shape": [1], "data": [1]"#, "unknown datatype"),
            (r#""name": "x", "datatype": "FP32", "shape": [-1], "data": [1]"#, "is empty"),
            (r#""name": "x", "shape": [1], "data": [1]"#, "datatype"),
        ] {
            let error = read(&format!(r#"{{"inputs": [{{{input}}}]}}"#)).unwrap_err();
            assert!(error.contains(why), "{input}: {error}");
        }
        assert!(read(r#"{"x": [1]}"#).unwrap_err().contains("inputs"));
    }
}
