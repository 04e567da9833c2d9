//! Convolutions with channels last (NHWC), the layout that tensor cores need. If convolutions use
//! channels first instead, cuDNN transposes their inputs and outputs in every batch.
//!
//! ONNX Runtime transposes a model's activations when it optimises the model. It transposes the
//! weights only when a session loads them, into the session's own memory. This module therefore
//! transposes the weights once, in the files of the optimised model. It also replaces the model's
//! convolutions by the operator that accepts transposed weights.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use prost::bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use prost::encoding::{encode_key, encode_varint, int64, string};

use shadowslice_shared::onnx::NodeProto;

use super::model_file::{ExternalTensor, external_tensors, read};

/// The domain of the operators whose activations ONNX Runtime has transposed.
const NHWC_DOMAIN: &str = "com.ms.internal.nhwc";

/// The operator of [`DOMAIN`] that takes its activations and its weights with channels last.
const OPERATOR: &str = "NhwcConv";
const DOMAIN: &str = "com.microsoft";

/// The field numbers in ONNX's protocol buffer messages.
const GRAPH: u32 = 7;
const NODE: u32 = 1;
const INITIALIZER: u32 = 5;
const NODE_OPERATOR: u32 = 4;
const NODE_DOMAIN: u32 = 7;
const TENSOR_SHAPE: u32 = 1;

/// Transposes the weights of a model's convolutions in the file `weights`, and changes the operator
/// of these convolutions in the file `model`.
pub(super) fn transpose(model: &Path, weights: &Path) -> io::Result<()> {
    let found = read(model)?;
    let tensors = external_tensors(&found)?;
    let transposed = convolved_only(found.nodes(), tensors.iter().filter(|tensor| tensor.shape.len() == 4));
    if transposed.is_empty() {
        return Ok(());
    }
    let file = File::options().read(true).write(true).open(weights)?;
    let mut places = BTreeSet::new();
    for tensor in transposed.values().filter(|tensor| places.insert(tensor.offset)) {
        transpose_weights(&file, tensor)?;
    }
    let bytes = std::fs::read(model)?;
    std::fs::write(model, rewritten(&bytes, &transposed)?)
}

/// Returns the tensors whose only use is as weights of transposed convolutions.
fn convolved_only<'t>(
    nodes: &[NodeProto],
    tensors: impl Iterator<Item = &'t ExternalTensor>,
) -> BTreeMap<&'t str, &'t ExternalTensor> {
    let mut transposed: BTreeMap<_, _> = tensors.map(|tensor| (tensor.name.as_str(), tensor)).collect();
    for node in nodes {
        for (input, name) in node.inputs.iter().enumerate() {
            if !(input == 1 && is_nhwc_convolution(node)) {
                transposed.remove(name.as_str());
            }
        }
    }
    transposed
}

fn is_nhwc_convolution(node: &NodeProto) -> bool {
    node.operator == "Conv" && node.domain == NHWC_DOMAIN
}

/// Transposes a weight tensor from outputs × inputs × height × width to outputs × height × width ×
/// inputs.
fn transpose_weights(file: &File, tensor: &ExternalTensor) -> io::Result<()> {
    let content = tensor.read(file)?;
    let bytes = content.len();
    let lengths: Vec<usize> = tensor.shape.iter().map(|&length| length.max(0) as usize).collect();
    let [outputs, inputs, height, width] = lengths[..] else {
        return Err(io::Error::other("the weights of a convolution do not have four axes"));
    };
    let (count, area) = (outputs * inputs * height * width, height * width);
    let size = bytes.checked_div(count).filter(|size| size * count == bytes);
    let size = size.ok_or_else(|| {
        io::Error::other(format!("the length of tensor `{}` does not match its shape", tensor.name))
    })?;
    let mut transposed = Vec::with_capacity(bytes);
    for output in content.chunks_exact(inputs * area * size) {
        for place in 0..area {
            for input in 0..inputs {
                let start = (input * area + place) * size;
                transposed.extend_from_slice(&output[start..start + size]);
            }
        }
    }
    file.write_all_at(&transposed, tensor.offset)
}

/// Returns the content of the model's file after the weights are transposed. Keeps all other
/// fields, including unknown ones.
fn rewritten(model: &[u8], transposed: &BTreeMap<&str, &ExternalTensor>) -> io::Result<Vec<u8>> {
    let mut whole = Vec::with_capacity(model.len());
    each_field(model, |field| {
        match field.number {
            GRAPH => put(GRAPH, &graph(field.content, transposed)?, &mut whole),
            _ => whole.extend_from_slice(field.raw),
        }
        Ok(())
    })?;
    Ok(whole)
}

fn graph(graph: &[u8], transposed: &BTreeMap<&str, &ExternalTensor>) -> io::Result<Vec<u8>> {
    let mut whole = Vec::with_capacity(graph.len());
    each_field(graph, |field| {
        match field.number {
            NODE => {
                let node: NodeProto = prost::Message::decode(field.content).map_err(io::Error::other)?;
                let weights = node.inputs.get(1).filter(|_| is_nhwc_convolution(&node));
                let mut content = field.content.to_vec();
                if weights.is_some_and(|name| transposed.contains_key(name.as_str())) {
                    // These fields override the existing ones, because decoders use the last
                    // occurrence of a field.
                    string::encode(NODE_OPERATOR, &OPERATOR.to_owned(), &mut content);
                    string::encode(NODE_DOMAIN, &DOMAIN.to_owned(), &mut content);
                }
                put(NODE, &content, &mut whole);
            }
            INITIALIZER => put(INITIALIZER, &initializer(field.content, transposed)?, &mut whole),
            _ => whole.extend_from_slice(field.raw),
        }
        Ok(())
    })?;
    Ok(whole)
}

fn initializer(tensor: &[u8], transposed: &BTreeMap<&str, &ExternalTensor>) -> io::Result<Vec<u8>> {
    let name = super::model_file::name_of(tensor)?;
    let Some(ExternalTensor { shape, .. }) = transposed.get(name.as_str()) else {
        return Ok(tensor.to_vec());
    };
    let mut whole = Vec::with_capacity(tensor.len());
    each_field(tensor, |field| {
        if field.number != TENSOR_SHAPE {
            whole.extend_from_slice(field.raw);
        }
        Ok(())
    })?;
    int64::encode_repeated(TENSOR_SHAPE, &[shape[0], shape[2], shape[3], shape[1]], &mut whole);
    Ok(whole)
}

/// A field of a protocol buffer message.
struct Field<'m> {
    number: u32,
    /// The bytes of the field, including its key.
    raw: &'m [u8],
    /// The content of the field, which is empty for a plain number.
    content: &'m [u8],
}

fn each_field(mut message: &[u8], mut each: impl FnMut(Field<'_>) -> io::Result<()>) -> io::Result<()> {
    while message.has_remaining() {
        let begun = message;
        let (number, kind) = decode_key(&mut message).map_err(io::Error::other)?;
        let mut content: &[u8] = &[];
        if kind == WireType::LengthDelimited {
            let mut behind = message;
            let length = decode_varint(&mut behind).map_err(io::Error::other)?;
            let length = usize::try_from(length).map_err(io::Error::other)?;
            content =
                behind.get(..length).ok_or_else(|| io::Error::other("a field of the model is cut off"))?;
        }
        skip_field(kind, number, &mut message, DecodeContext::default()).map_err(io::Error::other)?;
        each(Field { number, raw: &begun[..begun.len() - message.len()], content })?;
    }
    Ok(())
}

fn put(number: u32, content: &[u8], message: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, message);
    encode_varint(content.len() as u64, message);
    message.extend_from_slice(content);
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use shadowslice_shared::onnx::ModelProto;

    use super::super::model_file::{external, model_of, node};
    use super::*;

    /// The shape of weights: 2 outputs × 3 inputs × height 1 × width 2.
    const SHAPE: [i64; 4] = [2, 3, 1, 2];

    /// Returns weights whose elements are numbered in memory order.
    fn numbered() -> Vec<u8> {
        (0..12_u32).flat_map(u32::to_le_bytes).collect()
    }

    struct Files {
        _folder: tempfile::TempDir,
        model: std::path::PathBuf,
        weights: std::path::PathBuf,
    }

    impl Files {
        fn new(nodes: Vec<NodeProto>) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let (model, weights) = (folder.path().join("model.onnx"), folder.path().join("weights"));
            let tensors = vec![external("w", &SHAPE, (0, 48)), external("v", &SHAPE, (48, 48))];
            let mut bytes = model_of(nodes, tensors).encode_to_vec();
            // This field is the version of the format. The module does not interpret this field,
            // and must keep it.
            prost::encoding::int64::encode(1, &8, &mut bytes);
            std::fs::write(&model, bytes).unwrap();
            std::fs::write(&weights, [numbered(), numbered()].concat()).unwrap();
            Self { _folder: folder, model, weights }
        }

        fn transposed(self) -> (ModelProto, Vec<u32>, Vec<u8>) {
            transpose(&self.model, &self.weights).unwrap();
            let weights = std::fs::read(&self.weights).unwrap();
            let numbers = weights.chunks(4).map(|four| u32::from_le_bytes(four.try_into().unwrap()));
            (read(&self.model).unwrap(), numbers.collect(), std::fs::read(&self.model).unwrap())
        }
    }

    #[test]
    fn weights_of_turned_convolutions_are_turned_once_and_all_else_stays() {
        let nodes = vec![
            node("Conv", NHWC_DOMAIN, &["x", "w", "b"]),
            node("Conv", NHWC_DOMAIN, &["y", "w"]),
            node("Conv", "", &["z", "v"]),
        ];
        let (model, weights, bytes) = Files::new(nodes).transposed();
        let operators = model.nodes().iter().map(|node| (node.operator.as_str(), node.domain.as_str()));
        let renamed = (OPERATOR, DOMAIN);
        assert_eq!(operators.collect::<Vec<_>>(), [renamed, renamed, ("Conv", "")]);
        assert_eq!(model.nodes()[0].inputs, ["x", "w", "b"]);
        let shapes: Vec<_> =
            external_tensors(&model).unwrap().into_iter().map(|tensor| tensor.shape).collect();
        assert_eq!(shapes, [vec![2, 1, 2, 3], SHAPE.to_vec()]);
        assert_eq!(weights[..12], [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        assert_eq!(weights[12..], (0..12).collect::<Vec<_>>());
        assert!(bytes.ends_with(&[8, 8]), "an unknown field stays");
    }

    #[test]
    fn weights_with_another_use_stay() {
        for other in [node("Add", "", &["x", "w"]), node("Conv", "", &["x", "w"])] {
            let nodes =
                vec![node("Conv", NHWC_DOMAIN, &["x", "w"]), other, node("Conv", NHWC_DOMAIN, &["v", "x"])];
            let files = Files::new(nodes);
            let before = std::fs::read(&files.model).unwrap();
            let (_, weights, after) = files.transposed();
            assert!(before == after && weights[1] == 1);
        }
    }

    #[test]
    fn a_file_that_is_not_a_model_is_an_error() {
        let files = Files::new(vec![node("Conv", NHWC_DOMAIN, &["x", "w"])]);
        std::fs::write(&files.weights, [0; 7]).unwrap();
        assert!(transpose(&files.model, &files.weights).is_err(), "cut off");
        std::fs::write(&files.model, [0xff; 9]).unwrap();
        assert!(transpose(&files.model, &files.weights).is_err());
    }
}
