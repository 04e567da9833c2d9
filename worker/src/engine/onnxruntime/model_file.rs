//! What a model's file says of its operators and its large tensors.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use prost::Message;

/// The part of a model's file that is needed here; the numbers are ONNX's.
#[derive(Message)]
struct ModelProto {
    #[prost(message, optional, tag = "7")]
    graph: Option<Graph>,
    #[prost(message, repeated, tag = "25")]
    functions: Vec<Function>,
}

#[derive(Message)]
struct Function {
    #[prost(message, repeated, tag = "7")]
    nodes: Vec<Node>,
}

#[derive(Message)]
struct Graph {
    #[prost(message, repeated, tag = "1")]
    nodes: Vec<Node>,
    #[prost(message, repeated, tag = "5")]
    initializers: Vec<Tensor>,
}

#[derive(Message)]
struct Tensor {
    #[prost(int64, repeated, tag = "1")]
    shape: Vec<i64>,
    #[prost(int32, tag = "2")]
    element: i32,
    #[prost(string, tag = "8")]
    name: String,
    #[prost(message, repeated, tag = "13")]
    external: Vec<Property>,
}

#[derive(Message)]
struct Property {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ExternalTensor {
    pub(super) name: String,
    /// The number that ONNX has for the type of its elements.
    pub(super) element: i32,
    pub(super) shape: Vec<i64>,
    /// The file, as a path from the model's folder.
    pub(super) file: PathBuf,
    pub(super) offset: u64,
    /// `None`: to the end of the file.
    pub(super) bytes: Option<u64>,
}

/// Those of the main graph.
pub(super) fn external_tensors(model: &Path) -> io::Result<Vec<ExternalTensor>> {
    let model = ModelProto::decode(std::fs::read(model)?.as_slice()).map_err(io::Error::other)?;
    let tensors = model.graph.map_or_else(Vec::new, |graph| graph.initializers);
    Ok(tensors.into_iter().filter_map(external).collect())
}

/// The files beside the model's own that it consists of.
pub(super) fn further_files(model: &Path) -> io::Result<BTreeSet<PathBuf>> {
    Ok(external_tensors(model)?.into_iter().map(|tensor| tensor.file).collect())
}

fn external(tensor: Tensor) -> Option<ExternalTensor> {
    let property = |key: &str| {
        tensor.external.iter().find(|property| property.key == key).map(|property| property.value.as_str())
    };
    let file = PathBuf::from(property("location")?);
    let offset = property("offset").map_or(Some(0), |offset| offset.parse().ok())?;
    let bytes = property("length").and_then(|length| length.parse().ok());
    let Tensor { shape, element, name, .. } = tensor;
    Some(ExternalTensor { name, element, shape, file, offset, bytes })
}

#[derive(Message)]
struct Node {
    #[prost(string, tag = "4")]
    operator: String,
    #[prost(message, repeated, tag = "5")]
    attributes: Vec<Attribute>,
}

/// The graphs in it are the branches of an `If`, or the body of a loop.
#[derive(Message)]
struct Attribute {
    #[prost(message, optional, tag = "6")]
    graph: Option<Graph>,
    #[prost(message, repeated, tag = "11")]
    graphs: Vec<Graph>,
}

/// Whether ONNX Runtime's provider for CUDA keeps something for the last shape that an operator
/// saw, such as the plan of a convolution. The next shape replaces that, and frees the kernels that
/// a recording would start. A file that cannot be read may have such operators.
pub(super) fn remembers_shapes(model: &Path) -> bool {
    let model = std::fs::read(model).ok().and_then(|bytes| ModelProto::decode(bytes.as_slice()).ok());
    let Some(ModelProto { graph: Some(graph), functions }) = model else { return true };
    any_remembers(&graph.nodes) || functions.iter().any(|function| any_remembers(&function.nodes))
}

/// Recursion goes no deeper than decoding allows.
fn any_remembers(nodes: &[Node]) -> bool {
    nodes.iter().any(|node| {
        let mut inner = node.attributes.iter().flat_map(|held| held.graph.iter().chain(&held.graphs));
        remembers(&node.operator) || inner.any(|graph| any_remembers(&graph.nodes))
    })
}

fn remembers(operator: &str) -> bool {
    operator.contains("Conv") || matches!(operator, "RNN" | "LSTM" | "GRU")
}

/// A model of nothing but FP32 tensors, whose bytes are at these places in the file `weights`.
#[cfg(test)]
pub(super) fn with_external_tensors(tensors: &[(&str, u64, u64)]) -> Vec<u8> {
    let property = |key: &str, value: String| Property { key: key.to_owned(), value };
    let tensor = |&(name, offset, bytes): &(&str, u64, u64)| Tensor {
        shape: vec![(bytes / 4) as i64],
        element: 1,
        name: name.to_owned(),
        external: vec![
            property("location", "weights".to_owned()),
            property("offset", offset.to_string()),
            property("length", bytes.to_string()),
        ],
    };
    let graph = Graph { nodes: Vec::new(), initializers: tensors.iter().map(tensor).collect() };
    ModelProto { graph: Some(graph), functions: Vec::new() }.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_are_found_and_what_is_no_model_may_have_any() {
        let folder = tempfile::tempdir().unwrap();
        let has = |operators: &[&str]| {
            let node = |operator: &&str| Node { operator: (*operator).to_owned(), attributes: Vec::new() };
            let graph = Graph { nodes: operators.iter().map(node).collect(), initializers: Vec::new() };
            let path = folder.path().join("model.onnx");
            let model = ModelProto { graph: Some(graph), functions: Vec::new() };
            std::fs::write(&path, model.encode_to_vec()).unwrap();
            remembers_shapes(&path)
        };
        assert!(has(&["MatMul", "ConvTranspose"]));
        assert!(!has(&["MatMul", "Add", "Gelu"]));
        assert!(remembers_shapes(&folder.path().join("nothing")));
    }

    /// A field of so many bytes.
    fn field(number: u32, bytes: &[u8]) -> Vec<u8> {
        let mut field = Vec::new();
        prost::encoding::bytes::encode(number, &bytes.to_vec(), &mut field);
        field
    }

    #[test]
    fn operators_in_branches_loops_and_functions_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        let has = |model: &[u8]| {
            std::fs::write(&path, model).unwrap();
            remembers_shapes(&path)
        };
        let node = |operator: &str, rest: &[u8]| [field(4, operator.as_bytes()), rest.to_vec()].concat();
        let graph = |node: &[u8]| field(1, node);
        for inner in ["Conv", "MatMul"] {
            let branch = graph(&node(inner, &[]));
            for kind in [6, 11] {
                let outer = graph(&node("If", &field(5, &field(kind, &branch))));
                assert_eq!(
                    has(&field(7, &outer)),
                    inner == "Conv",
                    "{inner} in an attribute of number {kind}"
                );
            }
            let function = field(7, &node(inner, &[]));
            let called = field(7, &graph(&node("local.layer", &[])));
            assert_eq!(
                has(&[called, field(25, &function)].concat()),
                inner == "Conv",
                "{inner} in a function"
            );
        }
    }
}
