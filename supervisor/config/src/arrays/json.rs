//! Reads JSON files: an array as nested lists, or the body of an inference request.

use std::sync::Arc;

use serde_json::Value;
use shadowslice_shared::tensor::Datatype;

use super::{Array, ArrayError, Arrays, Elements, count, unnamed};

/// The largest number of axes of an array.
const MAX_AXES: usize = 32;

/// The part of an Open Inference Protocol request that this module reads.
#[derive(serde::Deserialize)]
struct Body {
    inputs: Vec<Input>,
}

#[derive(serde::Deserialize)]
struct Input {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    data: Option<Value>,
}

/// Reads an array from nested lists, or the inputs of a request.
pub(super) fn read(file: &[u8]) -> Result<Arrays, ArrayError> {
    let document: Value = serde_json::from_slice(file).map_err(ArrayError::Json)?;
    if !document.is_object() {
        let shape = shape(&document, 0)?;
        count(&shape)?;
        let (datatype, elements) = (None, Elements::Values(flat(document)));
        return Ok(unnamed(Array { datatype, shape, elements }));
    }
    let Body { inputs } = serde_json::from_value(document).map_err(ArrayError::Json)?;
    let arrays = inputs.into_iter().map(|Input { name, datatype, shape, data }| {
        let Some(data) = data else { return Err(ArrayError::NoData(name)) };
        let datatype: Datatype = datatype.parse().map_err(|_| ArrayError::UnknownType(datatype))?;
        let values = flat(data);
        if count(&shape)? != values.len() {
            return Err(ArrayError::Count { name, shape, values: values.len() });
        }
        let elements = Elements::Values(values);
        Ok((name, Arc::new(Array { datatype: Some(datatype), shape, elements })))
    });
    arrays.collect()
}

/// Returns the shape of nested lists. All lists at the same depth must have the same length.
fn shape(value: &Value, depth: usize) -> Result<Vec<i64>, ArrayError> {
    let Value::Array(items) = value else { return Ok(Vec::new()) };
    if depth == MAX_AXES {
        return Err(ArrayError::Ragged);
    }
    let mut shapes = items.iter().map(|item| shape(item, depth + 1));
    let first = shapes.next().transpose()?.unwrap_or_default();
    for other in shapes {
        if other? != first {
            return Err(ArrayError::Ragged);
        }
    }
    Ok([vec![items.len() as i64], first].concat())
}

/// Returns the elements of nested lists.
fn flat(value: Value) -> Vec<Value> {
    match value {
        Value::Array(items) if items.iter().any(Value::is_array) => {
            items.into_iter().flat_map(flat).collect()
        }
        Value::Array(items) => items,
        element => vec![element],
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use shadowslice_shared::errors;

    use super::*;

    fn one(text: &str) -> Result<Array, String> {
        let arrays = read(text.as_bytes()).map_err(|error| errors::chain(&error))?;
        Ok(Array::clone(&arrays[""]))
    }

    #[test]
    fn nested_lists_give_the_axes_of_an_array() {
        let array = one(" [[1, 2.5, true], [\"a\", -1, false]]").unwrap();
        assert_eq!((array.datatype, array.shape()), (None, &[2, 3][..]));
        let Elements::Values(values) = &array.elements else { unreachable!("JSON has values") };
        assert_eq!(values[..], [json!(1), json!(2.5), json!(true), json!("a"), json!(-1), json!(false)]);
        assert_eq!(one("7").unwrap().shape(), [0_i64; 0]);
        assert_eq!(one("[[[7]]]").unwrap().shape(), [1, 1, 1]);
    }

    #[test]
    fn ragged_and_empty_arrays_are_refused() {
        for (text, why) in [
            ("[[1, 2], [3]]", "the lists have different lengths"),
            ("[[1], 2]", "the lists have different lengths"),
            ("[1, [2]]", "the lists have different lengths"),
            ("[[], [1]]", "the lists have different lengths"),
            ("[]", "is empty"),
            ("[[], []]", "is empty"),
            ("[NaN]", "line 1 column 2"),
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
        let read = |text: &str| read(text.as_bytes()).map_err(|error| errors::chain(&error));
        let text = r#"{"id": "7", "outputs": [{"name": "y"}], "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5], "parameters": {}},
            {"name": "s", "datatype": "BYTES", "shape": [1, 1], "data": [["Wien"]]}]}"#;
        let named = read(text).unwrap();
        assert_eq!((named["x"].datatype, named["x"].shape()), (Some(Datatype::Fp32), &[1, 2][..]));
        assert_eq!(named["s"].shape(), [1, 1]);
        for (input, why) in [
            (r#""name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1]"#, "[1, 2], but 1 values"),
            (r#""name": "x", "datatype": "FP32", "shape": [1]"#, "`x` has no `data`"),
            (r#""name": "x", "datatype": "FP31", "shape": [1], "data": [1]"#, "unsupported dtype `FP31`"),
            (r#""name": "x", "datatype": "FP32", "shape": [-1], "data": [1]"#, "is empty"),
            (r#""name": "x", "shape": [1], "data": [1]"#, "datatype"),
        ] {
            let error = read(&format!(r#"{{"inputs": [{{{input}}}]}}"#)).unwrap_err();
            assert!(error.contains(why), "{input}: {error}");
        }
        assert!(read(r#"{"x": [1]}"#).unwrap_err().contains("inputs"));
    }
}
