//! The values of tensors in JSON.

use std::fmt;

use bytes::Bytes;
use serde::Serialize;
use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;
use shadowslice_shared::tensor::{self, Datatype};

/// Returns the maximum size in bytes of the tensor of these values.
pub(super) fn max_bytes(datatype: Datatype, values: &RawValue, elements: usize) -> usize {
    // A value and its separator take at least two characters.
    let (text, elements) = (values.get().len(), elements.min(values.get().len() / 2));
    datatype.size().map_or(elements * 4 + text, |size| elements * size)
}

/// Writes values into `bytes`, whose capacity is [`max_bytes`]. The values are flat or nested, row
/// by row. There must be `elements` values.
pub(super) fn encode(
    datatype: Datatype,
    values: &RawValue,
    elements: usize,
    bytes: Vec<u8>,
) -> Result<Bytes, String> {
    encode_with(datatype, values, (elements, bytes), |sink, reader| reader.deserialize_seq(sink))
}

/// Writes values into `bytes`, as [`encode`] does. A single value needs no array.
pub(super) fn encode_any(
    datatype: Datatype,
    values: &RawValue,
    elements: usize,
    bytes: Vec<u8>,
) -> Result<Bytes, String> {
    encode_with(datatype, values, (elements, bytes), |sink, reader| reader.deserialize_any(sink))
}

type TextReader<'de> = serde_json::Deserializer<serde_json::de::StrRead<'de>>;

fn encode_with<'de>(
    datatype: Datatype,
    values: &'de RawValue,
    (elements, bytes): (usize, Vec<u8>),
    read: impl FnOnce(&mut TensorEncoder, &mut TextReader<'de>) -> serde_json::Result<()>,
) -> Result<Bytes, String> {
    no_json_form(datatype)?;
    let mut sink = TensorEncoder { datatype, elements, count: 0, bytes };
    let mut reader = serde_json::Deserializer::from_str(values.get());
    read(&mut sink, &mut reader).map_err(|why| format!("invalid data: {why}"))?;
    if sink.count < elements {
        return Err(format!("expected {elements} elements in data, got {}", sink.count));
    }
    Ok(sink.bytes.into())
}

/// Fails if a datatype has no form in JSON.
pub(super) fn no_json_form(datatype: Datatype) -> Result<(), String> {
    match datatype {
        Datatype::Fp16 | Datatype::Bf16 => {
            Err(format!("{datatype} has no JSON form; use the binary tensor data extension"))
        }
        _ => Ok(()),
    }
}

struct TensorEncoder {
    datatype: Datatype,
    elements: usize,
    count: usize,
    bytes: Vec<u8>,
}

impl TensorEncoder {
    fn push<E: Error, const N: usize>(&mut self, bytes: [u8; N]) -> Result<(), E> {
        self.count_element()?;
        self.bytes.extend_from_slice(&bytes);
        Ok(())
    }

    fn count_element<E: Error>(&mut self) -> Result<(), E> {
        if self.count == self.elements {
            return Err(E::custom(format_args!("expected {} elements, got more", self.elements)));
        }
        self.count += 1;
        Ok(())
    }

    fn integer<E: Error>(&mut self, value: i128) -> Result<(), E> {
        let out = |_| E::custom(format_args!("{value} is out of range for {}", self.datatype));
        match self.datatype {
            Datatype::Uint8 => self.push(u8::try_from(value).map_err(out)?.to_le_bytes()),
            Datatype::Uint16 => self.push(u16::try_from(value).map_err(out)?.to_le_bytes()),
            Datatype::Uint32 => self.push(u32::try_from(value).map_err(out)?.to_le_bytes()),
            Datatype::Uint64 => self.push(u64::try_from(value).map_err(out)?.to_le_bytes()),
            Datatype::Int8 => self.push(i8::try_from(value).map_err(out)?.to_le_bytes()),
            Datatype::Int16 => self.push(i16::try_from(value).map_err(out)?.to_le_bytes()),
            Datatype::Int32 => self.push(i32::try_from(value).map_err(out)?.to_le_bytes()),
            Datatype::Int64 => self.push(i64::try_from(value).map_err(out)?.to_le_bytes()),
            Datatype::Fp32 | Datatype::Fp64 => self.float(value as f64),
            _ => Err(E::custom(format_args!("{value} is not a valid {}", self.datatype))),
        }
    }

    fn float<E: Error>(&mut self, value: f64) -> Result<(), E> {
        let single = value as f32;
        match self.datatype {
            Datatype::Fp64 => self.push(value.to_le_bytes()),
            Datatype::Fp32 if single.is_finite() => self.push(single.to_le_bytes()),
            Datatype::Fp32 => Err(E::custom(format_args!("{value:?} is out of range for FP32"))),
            _ => Err(E::custom(format_args!("{value:?} is not a valid {}", self.datatype))),
        }
    }
}

impl<'de> DeserializeSeed<'de> for &mut TensorEncoder {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut TensorEncoder {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of {} values, flat or nested", self.datatype)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<(), E> {
        match self.datatype {
            Datatype::Bool => self.push([u8::from(value)]),
            _ => Err(E::custom(format_args!("{value} is not a valid {}", self.datatype))),
        }
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<(), E> {
        self.integer(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<(), E> {
        self.integer(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<(), E> {
        self.float(value)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<(), E> {
        if self.datatype != Datatype::Bytes {
            return Err(E::custom(format_args!("a string is not a valid {}", self.datatype)));
        }
        self.count_element()?;
        tensor::push_byte_string(&mut self.bytes, value.as_bytes());
        Ok(())
    }

    /// Refuses `null`, which JavaScript writes for numbers that JSON does not support.
    fn visit_unit<E: Error>(self) -> Result<(), E> {
        let datatype = self.datatype;
        Err(match datatype {
            Datatype::Fp32 | Datatype::Fp64 => E::custom(format_args!(
                "null is not a valid {datatype}; send a tensor with NaN or Infinity as binary data"
            )),
            _ => E::custom(format_args!("null is not a valid {datatype}")),
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        while values.next_element_seed(&mut *self)?.is_some() {}
        Ok(())
    }
}

/// Returns the maximum length of the text for a tensor of `bytes` bytes.
pub(super) fn text_bytes(datatype: Datatype, bytes: usize) -> usize {
    let (value, characters) = match datatype {
        Datatype::Bool => (1, 6),
        Datatype::Uint8 | Datatype::Int8 => (1, 5),
        Datatype::Uint16 | Datatype::Int16 => (2, 7),
        Datatype::Uint32 | Datatype::Int32 => (4, 12),
        Datatype::Fp32 => (4, 20),
        Datatype::Uint64 | Datatype::Int64 => (8, 21),
        Datatype::Fp64 => (8, 26),
        // A control character is written as six.
        Datatype::Bytes => (1, 6),
        Datatype::Fp16 | Datatype::Bf16 => (2, 0),
    };
    bytes / value * characters
}

/// Appends the values to `json` as a flat array. Numbers that JSON does not support are written as
/// `NaN`, `Infinity` and `-Infinity`, as by Triton. Python's parsers read them.
pub(super) fn decode(datatype: Datatype, data: &[u8], json: &mut Vec<u8>) -> Result<(), String> {
    no_json_form(datatype)?;
    json.push(b'[');
    match datatype {
        Datatype::Bool => each(data, json, |[byte], json| write(json, &(byte != 0))),
        Datatype::Uint8 => each(data, json, |bytes, json| write(json, &u8::from_le_bytes(bytes))),
        Datatype::Uint16 => each(data, json, |bytes, json| write(json, &u16::from_le_bytes(bytes))),
        Datatype::Uint32 => each(data, json, |bytes, json| write(json, &u32::from_le_bytes(bytes))),
        Datatype::Uint64 => each(data, json, |bytes, json| write(json, &u64::from_le_bytes(bytes))),
        Datatype::Int8 => each(data, json, |bytes, json| write(json, &i8::from_le_bytes(bytes))),
        Datatype::Int16 => each(data, json, |bytes, json| write(json, &i16::from_le_bytes(bytes))),
        Datatype::Int32 => each(data, json, |bytes, json| write(json, &i32::from_le_bytes(bytes))),
        Datatype::Int64 => each(data, json, |bytes, json| write(json, &i64::from_le_bytes(bytes))),
        Datatype::Fp32 => each(data, json, |bytes, json| write_float(json, f32::from_le_bytes(bytes))),
        Datatype::Fp64 => each(data, json, |bytes, json| write_float(json, f64::from_le_bytes(bytes))),
        Datatype::Bytes => strings(data, json)?,
        Datatype::Fp16 | Datatype::Bf16 => {}
    }
    json.push(b']');
    Ok(())
}

fn each<const N: usize>(data: &[u8], json: &mut Vec<u8>, write: impl Fn([u8; N], &mut Vec<u8>)) {
    let (chunks, _) = data.as_chunks::<N>();
    for (place, chunk) in chunks.iter().enumerate() {
        if place > 0 {
            json.push(b',');
        }
        write(*chunk, json);
    }
}

/// Writes the shortest digits that are parsed as the same number. Infinities have the names of
/// JavaScript.
fn write_float(json: &mut Vec<u8>, value: impl Serialize + Copy + Into<f64>) {
    match value.into() {
        f64::INFINITY => json.extend_from_slice(b"Infinity"),
        f64::NEG_INFINITY => json.extend_from_slice(b"-Infinity"),
        wide if wide.is_nan() => json.extend_from_slice(b"NaN"),
        _ => write(json, &value),
    }
}

fn strings(data: &[u8], json: &mut Vec<u8>) -> Result<(), String> {
    let strings = tensor::byte_strings(data).ok_or("the lengths of the BYTES elements are wrong")?;
    write_strings(&strings, json)
}

/// Appends strings without brackets.
pub(super) fn write_strings(strings: &[&[u8]], json: &mut Vec<u8>) -> Result<(), String> {
    for (place, string) in strings.iter().enumerate() {
        let string = std::str::from_utf8(string)
            .map_err(|_| "the bytes are not UTF-8; request binary_data".to_owned())?;
        if place > 0 {
            json.push(b',');
        }
        write(json, string);
    }
    Ok(())
}

/// Appends a value to `json`.
pub(super) fn write(json: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    serde_json::to_writer(json, value).expect("writing a scalar to memory cannot fail");
}

#[cfg(test)]
#[path = "values_tests.rs"]
mod tests;
