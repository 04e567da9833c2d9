//! Converts an array to the values of a model's input. This module does no I/O.

use half::{bf16, f16};
use serde_json::Value;
use shadowslice_shared::boot::{InputValues, RowBytes};
use shadowslice_shared::tensor::{Datatype, TensorSpec, byte_strings, push_byte_string};

use super::{Array, ArrayFile, Elements};

/// The maximum number of rows that the warm-up takes from an array. No configuration can set a
/// larger batch.
const MAX_ROWS: usize = 1024;

impl ArrayFile {
    /// Returns the shape of `input` without the batch axis, and the input's values. If the model
    /// has a batch axis, each row of the array becomes a row of a batch.
    ///
    /// # Errors
    ///
    /// A message that says why the array does not fit the input.
    pub fn fit(&self, input: &TensorSpec, batched: bool) -> Result<(Vec<i64>, InputValues), String> {
        let array = self.array.as_ref().ok_or("the array's file is unusable")?;
        array.check_shape(input, batched)?;
        let bytes = array.bytes(input.datatype)?;
        let (rows, shape) = match array.shape() {
            [rows, shape @ ..] if batched => (usize::try_from(*rows).unwrap_or(1), shape),
            shape => (1, shape),
        };
        let rows = rows_of(&bytes, input.datatype, rows);
        Ok((shape.to_vec(), InputValues::Rows(rows.into())))
    }
}

impl Array {
    fn check_shape(&self, input: &TensorSpec, batched: bool) -> Result<(), String> {
        let fits = |(&expected, &got): (&i64, &i64)| expected < 0 || expected == got;
        if input.shape.len() == self.shape.len() && input.shape.iter().zip(&self.shape).all(fits) {
            return Ok(());
        }
        let batch = if batched { ", the first axis is the batch" } else { "" };
        Err(format!(
            "the input's shape is {:?} (-1: any size{batch}), but the array's shape is {:?}; reshape the array",
            input.shape, self.shape
        ))
    }

    /// Returns the array's elements as the bytes of a tensor of type `datatype`.
    fn bytes(&self, datatype: Datatype) -> Result<Vec<u8>, String> {
        if let Some(got) = self.datatype.filter(|&got| got != datatype) {
            return Err(format!("the input is {datatype}, but the array is {got}; convert the array"));
        }
        let values = match &self.elements {
            Elements::Bytes(bytes) => return Ok(bytes.clone()),
            Elements::Values(values) => values,
        };
        let mut bytes = Vec::with_capacity(values.len() * datatype.size().unwrap_or(8));
        for value in values {
            // The operator may have named the wrong file, and a text in that file may be a secret.
            let shown = || match value {
                Value::Number(_) | Value::Bool(_) | Value::Null => value.to_string(),
                _ => "text".to_owned(),
            };
            push(&mut bytes, datatype, value).ok_or_else(|| {
                format!("the input is {datatype}, but the array has {}; replace this value", shown())
            })?;
        }
        Ok(bytes)
    }
}

/// Appends a value's bytes. Returns `None` if the datatype cannot represent the value.
fn push(bytes: &mut Vec<u8>, datatype: Datatype, value: &Value) -> Option<()> {
    let whole = value.as_i64().map(i128::from).or(value.as_u64().map(i128::from));
    let whole = whole.or(value.as_bool().map(i128::from));
    let float = value.as_f64().or(value.as_bool().map(f64::from));
    match datatype {
        Datatype::Bytes => push_byte_string(bytes, value.as_str()?.as_bytes()),
        Datatype::Fp16 => bytes.extend(Some(f16::from_f64(float?)).filter(|f| f.is_finite())?.to_le_bytes()),
        Datatype::Bf16 => bytes.extend(Some(bf16::from_f64(float?)).filter(|f| f.is_finite())?.to_le_bytes()),
        Datatype::Fp32 => bytes.extend(Some(float? as f32).filter(|f| f.is_finite())?.to_le_bytes()),
        Datatype::Fp64 => bytes.extend(float?.to_le_bytes()),
        _ => {
            let size = datatype.size()?;
            let range = match datatype {
                Datatype::Bool => 0..=1,
                Datatype::Int8 | Datatype::Int16 | Datatype::Int32 | Datatype::Int64 => {
                    -1_i128 << (8 * size - 1)..=(1_i128 << (8 * size - 1)) - 1
                }
                _ => 0..=(1_i128 << (8 * size)) - 1,
            };
            bytes.extend(&whole.filter(|whole| range.contains(whole))?.to_le_bytes()[..size]);
        }
    }
    Some(())
}

/// Splits a tensor into rows, and returns at most the first [`MAX_ROWS`] rows.
fn rows_of(bytes: &[u8], datatype: Datatype, rows: usize) -> Vec<RowBytes> {
    let used = rows.min(MAX_ROWS);
    if datatype.size().is_some() {
        return bytes.chunks_exact((bytes.len() / rows).max(1)).take(used).map(RowBytes::from).collect();
    }
    let texts = byte_strings(bytes).unwrap_or_default();
    let row = |texts: &[&[u8]]| {
        let mut bytes = Vec::new();
        texts.iter().for_each(|text| push_byte_string(&mut bytes, text));
        RowBytes::from(bytes)
    };
    texts.chunks_exact((texts.len() / rows).max(1)).take(used).map(row).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    fn file(datatype: Option<Datatype>, shape: &[i64], elements: Elements) -> ArrayFile {
        let array = Arc::new(Array { datatype, shape: shape.to_vec(), elements });
        ArrayFile { path: "x.npy".into(), array: Some(array) }
    }

    fn spec(datatype: Datatype, shape: &[i64]) -> TensorSpec {
        TensorSpec { name: "x".to_owned(), datatype, shape: shape.to_vec() }
    }

    fn values(values: Vec<Value>, datatype: Datatype) -> Result<Vec<u8>, String> {
        let array = Array { datatype: None, shape: vec![], elements: Elements::Values(values) };
        array.bytes(datatype)
    }

    #[test]
    fn rows_follow_the_first_axis_if_that_is_the_batch() {
        let file = file(Some(Datatype::Int16), &[2, 1], Elements::Bytes(vec![1, 2, 3, 4]));
        let rows = |rows: &[&[u8]]| InputValues::Rows(rows.iter().map(|row| RowBytes::from(*row)).collect());
        let input = spec(Datatype::Int16, &[-1, 1]);
        assert_eq!(file.fit(&input, true), Ok((vec![1], rows(&[&[1, 2], &[3, 4]]))));
        assert_eq!(file.fit(&input, false), Ok((vec![2, 1], rows(&[&[1, 2, 3, 4]]))));
        let texts = Array::of_texts(vec![2, 1], [b"a".to_vec(), b"bc".to_vec()].into_iter());
        let texts = ArrayFile { path: "x.npy".into(), array: Some(Arc::new(texts)) };
        let split = rows(&[b"\x01\0\0\0a", b"\x02\0\0\0bc"]);
        assert_eq!(texts.fit(&spec(Datatype::Bytes, &[-1, -1]), true), Ok((vec![1], split)));
    }

    #[test]
    fn rows_beyond_the_largest_batch_are_dropped() {
        assert_eq!(rows_of(&[7; 3000], Datatype::Int8, 3000).len(), MAX_ROWS);
    }

    #[test]
    fn a_mismatch_shows_what_the_input_expects() {
        let file = file(Some(Datatype::Fp64), &[3, 4], Elements::Bytes(vec![0; 96]));
        let error = |input, batched| file.fit(&input, batched).unwrap_err();
        assert_eq!(
            error(spec(Datatype::Fp64, &[-1, 5]), true),
            "the input's shape is [-1, 5] (-1: any size, the first axis is the batch), but the array's shape is [3, 4]; reshape the array"
        );
        assert!(error(spec(Datatype::Fp64, &[4]), false).contains("[4] (-1: any size), but"));
        let error = error(spec(Datatype::Fp32, &[-1, 4]), true);
        assert_eq!(error, "the input is FP32, but the array is FP64; convert the array");
    }

    #[test]
    fn values_without_a_type_must_be_those_of_the_input() {
        let bytes = |value: Value, datatype| values(vec![value], datatype);
        assert_eq!(bytes(json!(-128), Datatype::Int8), Ok(vec![0x80]));
        assert_eq!(bytes(json!(127), Datatype::Int8), Ok(vec![0x7f]));
        let fits = |value: Value, datatype| values(vec![value], datatype).is_ok();
        assert!(!fits(json!(128), Datatype::Int8) && !fits(json!(-129), Datatype::Int8));
        assert!(fits(json!(255), Datatype::Uint8) && !fits(json!(256), Datatype::Uint8));
        assert!(fits(json!(u32::MAX), Datatype::Uint32) && !fits(json!(1_u64 << 32), Datatype::Uint32));
        assert!(fits(json!(u64::MAX), Datatype::Uint64) && !fits(json!(-1), Datatype::Uint64));
        assert!(fits(json!(i64::MIN), Datatype::Int64) && !fits(json!(u64::MAX), Datatype::Int64));
        assert!(fits(json!(1), Datatype::Bool) && fits(json!(true), Datatype::Bool));
        assert!(!fits(json!(2), Datatype::Bool) && fits(json!(2), Datatype::Fp16));
        assert_eq!(bytes(json!(0.5), Datatype::Fp32), Ok(0.5_f32.to_le_bytes().to_vec()));
        assert_eq!(bytes(json!(0.5), Datatype::Bf16), Ok(bf16::from_f64(0.5).to_le_bytes().to_vec()));
        assert!(!fits(json!(1e39), Datatype::Fp32) && !fits(json!(0.5), Datatype::Int32));
        assert!(!fits(json!(null), Datatype::Fp32) && !fits(json!(7), Datatype::Bytes));
        for secret in [json!("hunter2"), json!({"hunter2": 1})] {
            let error = bytes(secret, Datatype::Int64).unwrap_err();
            assert_eq!(error, "the input is INT64, but the array has text; replace this value");
        }
    }
}
