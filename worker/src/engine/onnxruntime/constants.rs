//! The constants in a model's file, which are candidates for made-up inputs. Models often compare
//! inputs with constants, such as a sampling rate that selects a branch, or the categories of an
//! encoder.

use std::collections::BTreeSet;
use std::path::Path;

use prost::Message;
use prost::bytes::Bytes;

/// The maximum number of integers, and of strings, that are kept.
const MAX_CONSTANTS: usize = 32;

/// The maximum number of elements of a tensor that counts as a constant. Larger tensors are
/// weights.
const MAX_ELEMENTS: usize = 4;

/// ONNX's numbers for the datatypes INT32 and INT64.
const INT32: i32 = 6;
const INT64: i32 = 7;

/// The small integers and the strings in a model's file, in the order of the file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Constants {
    pub whole: Vec<i64>,
    pub texts: Vec<String>,
}

/// The fields of a model's file that this module reads, with the field numbers of onnx.proto.
#[derive(Message)]
struct ModelFile {
    #[prost(message, optional, tag = "7")]
    graph: Option<GraphPart>,
}

#[derive(Message)]
struct GraphPart {
    #[prost(message, repeated, tag = "1")]
    nodes: Vec<NodePart>,
    #[prost(message, repeated, tag = "5")]
    initializers: Vec<TensorPart>,
}

#[derive(Message)]
struct NodePart {
    #[prost(message, repeated, tag = "5")]
    attributes: Vec<AttributePart>,
}

#[derive(Message)]
struct AttributePart {
    #[prost(message, optional, tag = "5")]
    tensor: Option<TensorPart>,
    #[prost(bytes = "bytes", repeated, tag = "9")]
    texts: Vec<Bytes>,
}

#[derive(Message)]
struct TensorPart {
    #[prost(int64, repeated, tag = "1")]
    shape: Vec<i64>,
    #[prost(int32, tag = "2")]
    element: i32,
    #[prost(int32, repeated, tag = "5")]
    int32: Vec<i32>,
    #[prost(int64, repeated, tag = "7")]
    int64: Vec<i64>,
    #[prost(bytes = "bytes", tag = "9")]
    raw: Bytes,
}

impl Constants {
    /// Reads the constants from a model's file. Returns no constants if the file cannot be read.
    pub fn of(model: &Path) -> Self {
        let read = std::fs::read(model).ok().and_then(|bytes| ModelFile::decode(Bytes::from(bytes)).ok());
        let Some(graph) = read.and_then(|model| model.graph) else { return Self::default() };
        let attributes: Vec<&AttributePart> = graph.nodes.iter().flat_map(|node| &node.attributes).collect();
        let tensors =
            graph.initializers.iter().chain(attributes.iter().filter_map(|held| held.tensor.as_ref()));
        let texts = attributes.iter().flat_map(|held| &held.texts);
        let texts = texts.filter_map(|text| std::str::from_utf8(text).ok()).map(str::to_owned);
        Self { whole: distinct(tensors.flat_map(whole)), texts: distinct(texts) }
    }
}

fn distinct<T: Ord + Clone>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = BTreeSet::new();
    values.filter(|value| seen.insert(value.clone())).take(MAX_CONSTANTS).collect()
}

fn whole(tensor: &TensorPart) -> Vec<i64> {
    let elements = tensor.shape.iter().try_fold(1_usize, |product, &axis| {
        product.checked_mul(usize::try_from(axis).ok()?).filter(|&elements| elements <= MAX_ELEMENTS)
    });
    if elements.is_none() {
        return Vec::new();
    }
    match tensor.element {
        INT32 if !tensor.int32.is_empty() => tensor.int32.iter().map(|&value| value.into()).collect(),
        INT32 => tensor.raw.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes).into()).collect(),
        INT64 if !tensor.int64.is_empty() => tensor.int64.clone(),
        INT64 => tensor.raw.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_whole_numbers_and_texts_are_found_once_each() {
        let tensor = |element: i32, shape: &[i64], raw: &[u8], int64: &[i64]| TensorPart {
            shape: shape.to_vec(),
            element,
            int32: Vec::new(),
            int64: int64.to_vec(),
            raw: Bytes::copy_from_slice(raw),
        };
        let texts = ["Berlin", "Wien", "Berlin"].map(|text| Bytes::from_static(text.as_bytes())).to_vec();
        let attributes = vec![AttributePart { tensor: Some(tensor(INT64, &[1], &[], &[7])), texts }];
        let initializers = vec![
            tensor(INT64, &[], &16_000_i64.to_le_bytes(), &[]),
            tensor(INT32, &[2], &[1, 0, 0, 0, 255, 255, 255, 255], &[]),
            tensor(INT64, &[5], &[0; 40], &[]),
            tensor(1, &[1], &[0; 4], &[]),
        ];
        let graph = Some(GraphPart { nodes: vec![NodePart { attributes }], initializers });
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), ModelFile { graph }.encode_to_vec()).unwrap();
        let found = Constants::of(file.path());
        assert_eq!(found.whole, [16_000, 1, -1, 7]);
        assert_eq!(found.texts, ["Berlin", "Wien"]);
        assert_eq!(Constants::of(Path::new("/nowhere")), Constants::default());
    }
}
