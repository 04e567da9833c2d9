//! Checks an ONNX model's file quickly, without loading the model. The check finds out whether the
//! file is a complete ONNX model, and which inputs and external files the model has.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use shadowslice_shared::boot::EchoTensor;
use shadowslice_shared::onnx::{self, AxisProto, GraphHeader, ModelHeader, ValueInfoProto};
use shadowslice_shared::tensor::{Datatype, TensorSpec};

/// The largest part of a file that the check reads, in bytes. It skips the data of tensors, so even
/// large models need only some MB.
const MAX_READ: u64 = 256 << 20;

/// The inputs and the external files of a model.
#[derive(Debug, Default)]
pub(super) struct OnnxFile {
    pub(super) inputs: Vec<OnnxInput>,
    /// The files with data of the model's tensors, as paths relative to the model's folder.
    pub(super) external_files: BTreeSet<PathBuf>,
}

/// An input as the model's file or `tensors` declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OnnxInput {
    pub(super) name: String,
    /// The datatype, or `None` if requests cannot carry this type.
    pub(super) datatype: Option<Datatype>,
    /// The shape, with -1 for each free axis. `None` if the number of axes is unknown.
    pub(super) shape: Option<Vec<i64>>,
    /// True if `shape` does not include the batch axis.
    pub(super) is_row: bool,
    /// True if the file has a default value for the input. In older versions of the format, every
    /// constant is also an input with a default value.
    pub(super) has_default: bool,
}

impl OnnxInput {
    /// Returns the input of an emulated model's tensor.
    pub(super) fn of_tensor(EchoTensor { input, .. }: &EchoTensor) -> Self {
        let TensorSpec { name, datatype, shape } = input.clone();
        Self { name, datatype: Some(datatype), shape: Some(shape), is_row: true, has_default: false }
    }
}

/// Reads the file of a model.
pub(super) fn read(path: &Path) -> io::Result<OnnxFile> {
    let mut file = File::open(path)?;
    let mut head = Vec::new();
    (&mut file).take(64).read_to_end(&mut head)?;
    if let Some(instead) = instead(&head) {
        return Err(io::Error::other(instead));
    }
    let model = onnx::decode::<ModelHeader>(file, MAX_READ).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            io::Error::other("the file is truncated, or not an ONNX model; copy it again")
        }
        io::ErrorKind::InvalidData => not_onnx("the bytes are not a valid protocol buffer"),
        _ => error,
    })?;
    let graph = model.graph.ok_or_else(|| not_onnx("the file has no graph"))?;
    let external_files = onnx::external_files(&graph.initializers);
    Ok(OnnxFile { inputs: inputs(graph), external_files })
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

fn inputs(graph: GraphHeader) -> Vec<OnnxInput> {
    let constants: BTreeSet<_> = graph.initializers.into_iter().map(|tensor| tensor.name).collect();
    let input = |ValueInfoProto { name, kind }| {
        let tensor = kind.unwrap_or_default().tensor.unwrap_or_default();
        let shape = tensor.shape.map(|shape| shape.axes.into_iter().map(axis).collect());
        let has_default = constants.contains(&name);
        OnnxInput { name, datatype: onnx::datatype_of(tensor.element), shape, is_row: false, has_default }
    };
    graph.inputs.into_iter().map(input).collect()
}

/// Returns the length of an axis, or -1 if the axis is free.
fn axis(AxisProto { length }: AxisProto) -> i64 {
    if length > 0 { length } else { -1 }
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
        let graph = [field(5, &field(9, &[7; 98])), input("ids"), field(12, b""), input("mask")].concat();
        [&[8, 9][..], &field(2, b"pytorch"), &field(7, &graph), &field(8, b"")].concat()
    }

    fn found(bytes: &[u8]) -> Result<Vec<String>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let model = read(file.path()).map_err(|error| error.to_string())?;
        Ok(model.inputs.into_iter().map(|input| input.name).collect())
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
            read(file.path()).unwrap().inputs
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
            is_row: false,
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
        let found: Vec<PathBuf> = read(file.path()).unwrap().external_files.into_iter().collect();
        assert_eq!(found, ["m", "sub/n"].map(PathBuf::from));
        std::fs::write(file.path(), field(7, &field(11, b""))).unwrap();
        assert!(read(file.path()).unwrap().external_files.is_empty());
    }

    #[test]
    fn incomplete_and_other_files_are_recognised() {
        let whole = model();
        let unreadable = field(7, &field(5, &[7; 100]));
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
            (&unreadable, "not a valid protocol buffer"),
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
