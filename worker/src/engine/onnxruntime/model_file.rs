//! The operators and large tensors in a model's file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use prost::Message;
use serde::{Deserialize, Serialize};
use shadowslice_shared::onnx::{
    self, AttributeProto, ModelHeader, ModelProto, NodeProto, TensorProto, ValueInfoProto,
};

/// A tensor of the model whose bytes are stored in another file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ExternalTensor {
    pub(super) name: String,
    /// ONNX's number for the datatype of the elements.
    pub(super) element: i32,
    pub(super) shape: Vec<i64>,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl ExternalTensor {
    /// Reads the bytes of the tensor from the file that contains them.
    pub(super) fn read(&self, file: &File) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.bytes).map_err(io::Error::other)?];
        file.read_exact_at(&mut bytes, self.offset)?;
        Ok(bytes)
    }
}

/// Returns the name of the first of these inputs that is a tensor without a shape, and therefore of
/// unknown rank. Also returns `None` if the file cannot be read.
pub(super) fn input_without_rank(model: &Path, names: &[&str]) -> Option<String> {
    let model: ModelHeader = decode(model).ok()?;
    let without_shape =
        |input: &ValueInfoProto| input.kind.as_ref()?.tensor.as_ref().map(|tensor| tensor.shape.is_none());
    let mut inputs = model.graph?.inputs.into_iter().filter(|input| names.contains(&input.name.as_str()));
    inputs.find(|input| without_shape(input) == Some(true)).map(|input| input.name)
}

pub(super) fn read(model: &Path) -> io::Result<ModelProto> {
    decode(model)
}

fn decode<M: Message + Default>(model: &Path) -> io::Result<M> {
    onnx::decode(File::open(model)?, u64::MAX)
}

/// Returns the external tensors of the main graph. Fails if a tensor has no length and therefore
/// extends to the end of its file.
pub(super) fn external_tensors(model: &ModelProto) -> io::Result<Vec<ExternalTensor>> {
    let external = model.tensors().iter().filter(|tensor| tensor.external("location").is_some());
    external
        .map(|tensor| {
            let number = |key: &str| tensor.external(key).map(str::parse).transpose();
            let (Ok(offset), Ok(Some(bytes))) = (number("offset"), number("length")) else {
                let why = format!("tensor `{}` of the model has no valid offset and length", tensor.name);
                return Err(io::Error::other(why));
            };
            let TensorProto { shape, element, name, .. } = tensor.clone();
            Ok(ExternalTensor { name, element, shape, offset: offset.unwrap_or(0), bytes })
        })
        .collect()
}

/// Returns true if the model should use channels last. It must have more two-dimensional
/// convolutions than matrix products, and all its other operators must be in
/// [`TESTED_OPERATORS`]. That list excludes operators that cannot be recorded with channels
/// last. Grouped convolutions are not allowed, because cuDNN would have to compile kernels for
/// them at run time.
pub(super) fn is_convolutional(model: &ModelProto) -> bool {
    let nodes = model.nodes();
    let nested = |node: &NodeProto| node.attributes.iter().any(has_graph);
    if !model.functions.is_empty() || nodes.iter().any(nested) {
        return false;
    }
    let weights: BTreeMap<&str, &TensorProto> =
        model.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let plain = |node: &&NodeProto| {
        let weights = node.inputs.get(1).and_then(|name| weights.get(name.as_str()));
        let grouped = |held: &AttributeProto| held.name == "group" && held.number > 1;
        node.operator == "Conv"
            && weights.is_some_and(|weights| weights.shape.len() == 4 && [1, 10].contains(&weights.element))
            && !node.attributes.iter().any(grouped)
    };
    let of = |names: &[&str]| nodes.iter().filter(|node| names.contains(&node.operator.as_str())).count();
    let convolutions = nodes.iter().filter(plain).count();
    convolutions > of(&MATRIX_PRODUCTS)
        && convolutions + of(&MATRIX_PRODUCTS) + of(&TESTED_OPERATORS) == nodes.len()
}
/// The operators that multiply matrices.
const MATRIX_PRODUCTS: [&str; 2] = ["Gemm", "MatMul"];

/// The operators of convolutional networks, apart from convolutions and matrix products, that have
/// been tested with channels last.
const TESTED_OPERATORS: [&str; 19] = [
    "Add",
    "AveragePool",
    "BatchNormalization",
    "Cast",
    "Clip",
    "Concat",
    "Constant",
    "Dropout",
    "Flatten",
    "GlobalAveragePool",
    "Identity",
    "LeakyRelu",
    "MaxPool",
    "Mul",
    "ReduceMean",
    "Relu",
    "Reshape",
    "Sigmoid",
    "Softmax",
];

/// Returns the name of a tensor in ONNX's encoding.
pub(super) fn name_of(tensor: &[u8]) -> io::Result<String> {
    TensorProto::decode(tensor).map(|tensor| tensor.name).map_err(io::Error::other)
}

fn has_graph(attribute: &AttributeProto) -> bool {
    attribute.graph.is_some() || !attribute.graphs.is_empty()
}

/// Returns true if ONNX Runtime's CUDA provider may store data for the last shape that an operator
/// processed, such as the plan of a convolution. When the operator processes the next shape, the
/// provider replaces that data and frees kernels that a recording would start. If the file cannot
/// be read, returns true.
pub(super) fn remembers_shapes(model: &Path) -> bool {
    let Ok(ModelProto { graph: Some(graph), functions }) = read(model) else { return true };
    any_remembers(&graph.nodes) || functions.iter().any(|function| any_remembers(&function.nodes))
}

/// Returns true if any of these nodes, or any node in the graphs inside them, remembers shapes. The
/// decoder limits the depth of the recursion.
fn any_remembers(nodes: &[NodeProto]) -> bool {
    nodes.iter().any(|node| {
        let mut inner = node.attributes.iter().flat_map(|held| held.graph.iter().chain(&held.graphs));
        remembers(&node.operator) || inner.any(|graph| any_remembers(&graph.nodes))
    })
}

fn remembers(operator: &str) -> bool {
    operator.contains("Conv") || matches!(operator, "RNN" | "LSTM" | "GRU")
}

/// Returns an FP32 tensor whose bytes are in the file `weights`. The pair is the offset and the
/// length of the tensor in that file, in bytes.
#[cfg(test)]
pub(super) fn external(name: &str, shape: &[i64], (offset, bytes): (u64, u64)) -> TensorProto {
    let property = |key: &str, value: String| onnx::ExternalEntry { key: key.to_owned(), value };
    TensorProto {
        shape: shape.to_vec(),
        element: 1,
        name: name.to_owned(),
        external: vec![
            property("location", "weights".to_owned()),
            property("offset", offset.to_string()),
            property("length", bytes.to_string()),
        ],
    }
}

#[cfg(test)]
pub(super) fn node(operator: &str, domain: &str, inputs: &[&str]) -> NodeProto {
    let inputs = inputs.iter().map(|&name| name.to_owned()).collect();
    NodeProto { inputs, operator: operator.to_owned(), attributes: Vec::new(), domain: domain.to_owned() }
}

#[cfg(test)]
pub(super) fn model_of(nodes: Vec<NodeProto>, initializers: Vec<TensorProto>) -> ModelProto {
    ModelProto { graph: Some(onnx::GraphProto { nodes, initializers }), functions: Vec::new() }
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::onnx::GraphProto;

    use super::*;

    #[test]
    fn networks_of_convolutions_are_recognised() {
        let convolution = |weights: &str| node("Conv", "", &["x", weights]);
        let grouped = |number| {
            let group = AttributeProto { name: "group".to_owned(), number, graph: None, graphs: Vec::new() };
            NodeProto { attributes: vec![group], ..convolution("w") }
        };
        let is = |nodes: Vec<NodeProto>| {
            let weights = [external("w", &[8, 3, 3, 3], (0, 864)), external("line", &[8, 3, 3], (0, 288))];
            let half = TensorProto { element: 10, name: "half".to_owned(), ..weights[0].clone() };
            let double = TensorProto { element: 11, name: "double".to_owned(), ..weights[0].clone() };
            is_convolutional(&model_of(nodes, [weights.to_vec(), vec![half, double]].concat()))
        };
        let product = || node("Gemm", "", &["x", "m"]);
        assert!(is(vec![convolution("w"), node("Relu", "", &["x"])]));
        assert!(is(vec![convolution("half"), grouped(1), product()]));
        assert!(!is(vec![convolution("w"), product()]), "as many products");
        assert!(!is(vec![convolution("w"), grouped(8)]));
        assert!(!is(vec![convolution("w"), node("ConvTranspose", "", &["x", "w"])]));
        for weights in ["line", "double", "computed"] {
            assert!(!is(vec![convolution("w"), convolution(weights)]), "{weights}");
        }
        assert!(!is(vec![convolution("w"), node("Resize", "", &["x"])]), "it was not tried");
        assert!(!is(vec![]));
        let branch = GraphProto { nodes: vec![product()], initializers: Vec::new() };
        let branch = AttributeProto { graph: Some(branch), ..AttributeProto::default() };
        let choice = NodeProto { attributes: vec![branch], ..node("If", "", &["x"]) };
        assert!(!is(vec![convolution("w"), convolution("w"), choice]));
    }

    #[test]
    fn operators_are_found_and_an_unreadable_file_may_have_any() {
        let folder = tempfile::tempdir().unwrap();
        let has = |operators: &[&str]| {
            let node =
                |operator: &&str| NodeProto { operator: (*operator).to_owned(), ..NodeProto::default() };
            let graph = GraphProto { nodes: operators.iter().map(node).collect(), initializers: Vec::new() };
            let path = folder.path().join("model.onnx");
            let model = ModelProto { graph: Some(graph), functions: Vec::new() };
            std::fs::write(&path, model.encode_to_vec()).unwrap();
            remembers_shapes(&path)
        };
        assert!(has(&["MatMul", "ConvTranspose"]));
        assert!(!has(&["MatMul", "Add", "Gelu"]));
        assert!(remembers_shapes(&folder.path().join("nothing")));
    }

    /// Returns an encoded field with these bytes.
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
