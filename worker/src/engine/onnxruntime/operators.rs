//! What a model's operators are, read from its file.

use std::path::Path;

use prost::Message;

/// The part of a model's file that is needed here; the numbers are ONNX's.
#[derive(Message)]
struct ModelProto {
    #[prost(message, optional, tag = "7")]
    graph: Option<Graph>,
    /// The model's own functions, which nodes may call.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_are_found_and_what_is_no_model_may_have_any() {
        let folder = tempfile::tempdir().unwrap();
        let has = |operators: &[&str]| {
            let node = |operator: &&str| Node { operator: (*operator).to_owned(), attributes: Vec::new() };
            let graph = Graph { nodes: operators.iter().map(node).collect() };
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
