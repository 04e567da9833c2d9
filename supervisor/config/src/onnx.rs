//! Checks an ONNX model's file quickly, without loading the model. The check finds out whether the
//! file is a complete ONNX model, and which inputs and external files the model has. It skips all
//! tensor data.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use shadowslice_shared::tensor::Datatype;

/// The numbers of the fields that this check reads. They are defined in onnx.proto.
const MODEL_GRAPH: u64 = 7;
const GRAPH_INITIALIZER: u64 = 5;
const GRAPH_INPUT: u64 = 11;
const TENSOR_NAME: u64 = 8;
const TENSOR_EXTERNAL: u64 = 13;
const ENTRY_KEY: u64 = 1;
const ENTRY_VALUE: u64 = 2;
const VALUE_NAME: u64 = 1;
const VALUE_TYPE: u64 = 2;
const TYPE_TENSOR: u64 = 1;
const TENSOR_TYPE_ELEMENT: u64 = 1;
const TENSOR_TYPE_SHAPE: u64 = 2;
const SHAPE_AXIS: u64 = 1;
const AXIS_SIZE: u64 = 1;

/// The largest field number of `ModelProto`. A larger number means that the file is not an ONNX
/// model.
const MODEL_MOST: u64 = 26;

/// The wire types of fields in protocol buffers.
const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const BYTES: u64 = 2;
const FIXED_32: u64 = 5;

const MAX_NAME: u64 = 64 * 1024;

/// An input as the model's file declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OnnxInput {
    pub(super) name: String,
    /// The datatype, or `None` if requests cannot carry this type.
    pub(super) datatype: Option<Datatype>,
    /// The shape, with -1 for each free axis. `None` if the number of axes is unknown.
    pub(super) shape: Option<Vec<i64>>,
    /// True if the file has a default value for the input. In older versions of the format, every
    /// constant is also an input with a default value.
    pub(super) has_default: bool,
}

/// Returns the inputs of the model in a file.
pub(super) fn inputs(path: &Path) -> io::Result<Vec<OnnxInput>> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut head = Vec::new();
    (&mut file).take(64).read_to_end(&mut head)?;
    if let Some(instead) = instead(&head) {
        return Err(io::Error::other(instead));
    }
    file.seek(SeekFrom::Start(0))?;
    let mut walk = Walk { file: BufReader::new(file), at: 0 };
    let graph = walk.find_in_model(len)?.ok_or_else(|| not_onnx("the file has no graph"))?;
    walk.inputs(graph)
}

/// Returns the external files that store the model's tensors, as paths relative to the model's
/// folder.
pub(super) fn external_files(path: &Path) -> io::Result<BTreeSet<PathBuf>> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut walk = Walk { file: BufReader::new(file), at: 0 };
    let graph = walk.find_in_model(len)?.ok_or_else(|| not_onnx("the file has no graph"))?;
    walk.external_files(graph)
}

/// Recognises files that users often give instead of a model, and returns a message for the user.
fn instead(head: &[u8]) -> Option<&'static str> {
    let text = head.trim_ascii_start();
    let is = |start: &str| text.get(..start.len()).is_some_and(|s| s.eq_ignore_ascii_case(start.as_bytes()));
    if is("version https://git-lfs") {
        Some("this is a Git LFS pointer; run `git lfs pull`")
    } else if is("<!doctype") || is("<html") || is("<?xml") {
        Some("this is a web page and not an ONNX model; download the model again")
    } else {
        None
    }
}

fn not_onnx(why: &str) -> io::Error {
    io::Error::other(format!("this is not an ONNX model: {why}"))
}

/// Returns the datatype for a number of `TensorProto.DataType`.
fn datatype_of(number: u64) -> Option<Datatype> {
    match number {
        1 => Some(Datatype::Fp32),
        2 => Some(Datatype::Uint8),
        3 => Some(Datatype::Int8),
        4 => Some(Datatype::Uint16),
        5 => Some(Datatype::Int16),
        6 => Some(Datatype::Int32),
        7 => Some(Datatype::Int64),
        8 => Some(Datatype::Bytes),
        9 => Some(Datatype::Bool),
        10 => Some(Datatype::Fp16),
        11 => Some(Datatype::Fp64),
        12 => Some(Datatype::Uint32),
        13 => Some(Datatype::Uint64),
        16 => Some(Datatype::Bf16),
        _ => None,
    }
}

fn truncated() -> io::Error {
    io::Error::other("the file is truncated, or not an ONNX model; copy it again")
}

#[derive(Clone, Copy)]
struct Field {
    number: u64,
    kind: u64,
    /// The field's value if the field is a [`VARINT`].
    value: u64,
    /// The offset of the end of the field's value.
    end: u64,
}

struct Walk {
    file: BufReader<File>,
    at: u64,
}

impl Walk {
    /// Returns the range of the graph. Visits every field of the file, and fails if the file is
    /// incomplete.
    fn find_in_model(&mut self, len: u64) -> io::Result<Option<(u64, u64)>> {
        let mut graph = None;
        while self.at < len {
            let field = self.field(len)?;
            if field.number == 0 || field.number > MODEL_MOST {
                return Err(not_onnx("the bytes are not a valid protocol buffer"));
            }
            if field.number == MODEL_GRAPH && field.kind == BYTES {
                graph = Some((self.at, field.end));
            }
            self.go_to(field.end)?;
        }
        Ok(graph)
    }

    /// Visits the fields up to the offset `end`, in order.
    fn each(
        &mut self,
        end: u64,
        mut visit: impl FnMut(&mut Self, Field) -> io::Result<()>,
    ) -> io::Result<()> {
        while self.at < end {
            let field = self.field(end)?;
            visit(self, field)?;
            self.go_to(field.end)?;
        }
        Ok(())
    }

    fn inputs(&mut self, (start, end): (u64, u64)) -> io::Result<Vec<OnnxInput>> {
        self.go_to(start)?;
        let (mut inputs, mut constants) = (Vec::new(), BTreeSet::new());
        self.each(end, |walk, field| {
            match (field.number, field.kind) {
                (GRAPH_INPUT, BYTES) => inputs.extend(walk.input(field.end)?),
                (GRAPH_INITIALIZER, BYTES) => {
                    // An unreadable tensor is ignored here, because the worker reports it.
                    constants.extend(walk.text_in(field.end, TENSOR_NAME).ok().flatten());
                }
                _ => {}
            }
            Ok(())
        })?;
        for input in &mut inputs {
            input.has_default = constants.contains(&input.name);
        }
        Ok(inputs)
    }

    fn input(&mut self, end: u64) -> io::Result<Option<OnnxInput>> {
        let (mut name, mut datatype, mut shape) = (None, None, None);
        self.each(end, |walk, field| {
            match (field.number, field.kind) {
                (VALUE_NAME, BYTES) => name = Some(walk.text(field.end)?),
                // If the parser cannot read a type, the type counts as unknown.
                (VALUE_TYPE, BYTES) => (datatype, shape) = walk.value_type(field.end).unwrap_or_default(),
                _ => {}
            }
            Ok(())
        })?;
        Ok(name.map(|name| OnnxInput { name, datatype, shape, has_default: false }))
    }

    fn value_type(&mut self, end: u64) -> io::Result<(Option<Datatype>, Option<Vec<i64>>)> {
        let mut found = (None, None);
        self.each(end, |walk, field| {
            if (field.number, field.kind) == (TYPE_TENSOR, BYTES) {
                found = walk.tensor_type(field.end)?;
            }
            Ok(())
        })?;
        Ok(found)
    }

    fn tensor_type(&mut self, end: u64) -> io::Result<(Option<Datatype>, Option<Vec<i64>>)> {
        let (mut datatype, mut shape) = (None, None);
        self.each(end, |walk, field| {
            match (field.number, field.kind) {
                (TENSOR_TYPE_ELEMENT, VARINT) => datatype = datatype_of(field.value),
                (TENSOR_TYPE_SHAPE, BYTES) => shape = Some(walk.shape(field.end)?),
                _ => {}
            }
            Ok(())
        })?;
        Ok((datatype, shape))
    }

    /// Reads a shape. An axis without a size, or with a name instead of a size, is free.
    fn shape(&mut self, end: u64) -> io::Result<Vec<i64>> {
        let mut axes = Vec::new();
        self.each(end, |walk, field| {
            if (field.number, field.kind) != (SHAPE_AXIS, BYTES) {
                return Ok(());
            }
            let mut size = -1;
            walk.each(field.end, |_, field| {
                if (field.number, field.kind) == (AXIS_SIZE, VARINT) {
                    size = i64::try_from(field.value).ok().filter(|size| *size > 0).unwrap_or(-1);
                }
                Ok(())
            })?;
            axes.push(size);
            Ok(())
        })?;
        Ok(axes)
    }

    fn external_files(&mut self, (start, end): (u64, u64)) -> io::Result<BTreeSet<PathBuf>> {
        self.go_to(start)?;
        let mut files = BTreeSet::new();
        while self.at < end {
            let tensor = self.field(end)?;
            while tensor.number == GRAPH_INITIALIZER && tensor.kind == BYTES && self.at < tensor.end {
                let property = self.field(tensor.end)?;
                if property.number == TENSOR_EXTERNAL && property.kind == BYTES {
                    files.extend(self.location(property.end)?.map(PathBuf::from));
                }
                self.go_to(property.end)?;
            }
            self.go_to(tensor.end)?;
        }
        Ok(files)
    }

    /// Reads a property of an external tensor. Returns its value if the property's name is
    /// `location`.
    fn location(&mut self, end: u64) -> io::Result<Option<String>> {
        let (mut is_location, mut value) = (false, None);
        while self.at < end {
            let field = self.field(end)?;
            match field.number {
                ENTRY_KEY if field.kind == BYTES => is_location = self.text(field.end)? == "location",
                ENTRY_VALUE if field.kind == BYTES => value = Some(self.text(field.end)?),
                _ => {}
            }
            self.go_to(field.end)?;
        }
        Ok(value.filter(|_| is_location))
    }

    /// Returns the text up to the offset `end`. Cuts off a text that is too long.
    fn text(&mut self, end: u64) -> io::Result<String> {
        let len = (end - self.at).min(MAX_NAME);
        let mut text = Vec::new();
        self.at += u64::try_from((&mut self.file).take(len).read_to_end(&mut text)?).unwrap_or(len);
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Returns the text in the field with this number.
    fn text_in(&mut self, end: u64, number: u64) -> io::Result<Option<String>> {
        let mut text = None;
        self.each(end, |walk, field| {
            if (field.number, field.kind) == (number, BYTES) {
                text = Some(walk.text(field.end)?);
            }
            Ok(())
        })?;
        Ok(text)
    }

    /// Reads the start of the field at the current offset. The field must not extend past `end`.
    fn field(&mut self, end: u64) -> io::Result<Field> {
        let key = self.varint()?;
        let (number, kind) = (key >> 3, key & 7);
        let mut value = 0;
        let bytes = match kind {
            VARINT => {
                value = self.varint()?;
                0
            }
            FIXED_64 => 8,
            BYTES => self.varint()?,
            FIXED_32 => 4,
            _ => return Err(not_onnx("the bytes are not a valid protocol buffer")),
        };
        match self.at.checked_add(bytes) {
            Some(found) if found <= end => Ok(Field { number, kind, value, end: found }),
            _ => Err(truncated()),
        }
    }

    fn varint(&mut self) -> io::Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = *self.file.fill_buf()?.first().ok_or_else(truncated)?;
            self.file.consume(1);
            self.at += 1;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(not_onnx("the bytes are not a valid protocol buffer"))
    }

    fn go_to(&mut self, place: u64) -> io::Result<()> {
        let by = i64::try_from(i128::from(place) - i128::from(self.at)).map_err(io::Error::other)?;
        self.file.seek_relative(by)?;
        self.at = place;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an encoded protobuf field of bytes.
    fn field(number: u8, value: &[u8]) -> Vec<u8> {
        let len = u8::try_from(value.len()).unwrap();
        [&[number << 3 | 2, len][..], value].concat()
    }

    fn model() -> Vec<u8> {
        let input = |name: &str| field(11, &[field(1, name.as_bytes()), field(2, b"")].concat());
        let graph = [field(5, &[7; 100]), input("ids"), field(12, b""), input("mask")].concat();
        [&[8, 9][..], &field(2, b"pytorch"), &field(7, &graph), &field(8, b"")].concat()
    }

    fn found(bytes: &[u8]) -> Result<Vec<String>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let inputs = inputs(file.path()).map_err(|error| error.to_string())?;
        Ok(inputs.into_iter().map(|input| input.name).collect())
    }

    #[test]
    fn inputs_are_named_in_their_order() {
        assert_eq!(found(&model()).unwrap(), ["ids", "mask"]);
    }

    #[test]
    fn inputs_have_their_types_their_shapes_and_defaults() {
        let declared = |name: &str, element: u8, axes: &[&[u8]]| {
            let axes: Vec<u8> = axes.iter().flat_map(|axis| field(1, axis)).collect();
            let tensor = [&[8, element][..], &field(2, &axes)].concat();
            field(11, &[field(2, &field(1, &tensor)), field(1, name.as_bytes())].concat())
        };
        let inputs_of = |graph: &[Vec<u8>]| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), field(7, &graph.concat())).unwrap();
            inputs(file.path()).unwrap()
        };
        let unknown = field(11, &[field(1, b"any"), field(2, &field(1, &[8, 1]))].concat());
        let found = inputs_of(&[
            declared("ids", 7, &[&field(2, b"batch"), &[8, 3], b""]),
            field(5, &[field(9, b"bytes"), field(8, b"scale")].concat()),
            declared("scale", 1, &[]),
            declared("odd", 15, &[]),
            unknown,
        ]);
        let input = |name: &str, datatype, shape, has_default| OnnxInput {
            name: name.to_owned(),
            datatype,
            shape,
            has_default,
        };
        assert_eq!(
            found,
            [
                input("ids", Some(Datatype::Int64), Some(vec![-1, 3, -1]), false),
                input("scale", Some(Datatype::Fp32), Some(vec![]), true),
                input("odd", None, Some(vec![]), false),
                input("any", Some(Datatype::Fp32), None, false),
            ]
        );
    }

    #[test]
    fn files_of_external_tensors_are_found_once_each() {
        let property = |key: &str, value: &str| {
            field(13, &[field(1, key.as_bytes()), field(2, value.as_bytes())].concat())
        };
        let tensor = |file: &str| field(5, &[property("location", file), field(13, b"")].concat());
        let graph = [tensor("m"), field(5, b""), tensor("sub/n"), tensor("m")].concat();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), field(7, &graph)).unwrap();
        let found: Vec<PathBuf> = external_files(file.path()).unwrap().into_iter().collect();
        assert_eq!(found, ["m", "sub/n"].map(PathBuf::from));
        std::fs::write(file.path(), field(7, &field(11, b""))).unwrap();
        assert!(external_files(file.path()).unwrap().is_empty());
    }

    #[test]
    fn incomplete_and_other_files_are_recognised() {
        let whole = model();
        for end in 1..whole.len() {
            // If a file is cut off between two fields, the check cannot detect that the rest is
            // missing.
            let cut = found(&whole[..end]);
            let between = [2, 11, whole.len() - 2].contains(&end);
            assert!(between || cut.is_err(), "{end}: {cut:?}");
        }
        for (bytes, why) in [
            (&whole[..40], "truncated"),
            (&whole[..11], "no graph"),
            (b"<!DOCTYPE html><html>404", "web page"),
            (b"\n <html><body>", "web page"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a", "git lfs pull"),
            (b"some other text", "not an ONNX model"),
            (b"PK\x03\x04", "not an ONNX model"),
            (&[0xff; 20], "not an ONNX model"),
        ] {
            let error = found(bytes).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
