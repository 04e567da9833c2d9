//! What a model's operators are, read from its file.

use std::path::Path;

use prost::Message;

/// A model, as far as it is of interest here: the numbers are ONNX's.
#[derive(Message)]
struct Model {
    #[prost(message, optional, tag = "7")]
    graph: Option<Graph>,
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
}

/// Whether ONNX Runtime's provider for CUDA keeps something for the shape that an operator saw last, as the plan of a
/// convolution: with the next shape that goes, and with it the kernels that a recording would start. A file that cannot
/// be read may have such operators.
pub(super) fn remembers_shapes(model: &Path) -> bool {
    let graph = std::fs::read(model).ok().and_then(|bytes| Model::decode(bytes.as_slice()).ok()?.graph);
    graph.is_none_or(|graph| graph.nodes.iter().any(|node| remembers(&node.operator)))
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
            let node = |operator: &&str| Node { operator: (*operator).to_owned() };
            let graph = Graph { nodes: operators.iter().map(node).collect() };
            let path = folder.path().join("model.onnx");
            std::fs::write(&path, Model { graph: Some(graph) }.encode_to_vec()).unwrap();
            remembers_shapes(&path)
        };
        assert!(has(&["MatMul", "ConvTranspose"]));
        assert!(!has(&["MatMul", "Add", "Gelu"]));
        assert!(remembers_shapes(&folder.path().join("nothing")));
    }
}
