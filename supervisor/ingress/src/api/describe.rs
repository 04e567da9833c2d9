//! The descriptions of the server and its models. This file does no I/O.

use std::collections::HashMap;
use std::time::UNIX_EPOCH;

use shadowslice_shared::tensor::{Datatype, TensorSpec};

use crate::proto;
use crate::tensors::public_shape;
use shadowslice_datapath::pipeline::{Metadata, ModelContent};

const EXTENSIONS: [&str; 5] =
    ["binary_tensor_data", "model_configuration", "model_repository", "schedule_policy", "statistics"];

pub(super) fn server(shared_memory: bool) -> proto::ServerMetadataResponse {
    let extensions = EXTENSIONS.into_iter().chain(shared_memory.then_some("system_shared_memory"));
    proto::ServerMetadataResponse {
        name: "shadowslice".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        extensions: extensions.map(str::to_owned).collect(),
    }
}

/// Returns the description of a model that has these versions.
pub(super) fn model(metadata: &Metadata, versions: &[u32]) -> proto::ModelMetadataResponse {
    let tensor = |spec: &TensorSpec, shape| proto::model_metadata_response::TensorMetadata {
        name: spec.name.clone(),
        datatype: spec.datatype.name().to_owned(),
        shape,
    };
    let batched = |spec: &TensorSpec| tensor(spec, public_shape(metadata, spec));
    // Optional inputs have no batch axis.
    let optional = metadata.optional.iter().map(|spec| tensor(spec, spec.shape.clone()));
    proto::ModelMetadataResponse {
        name: metadata.name.clone(),
        versions: versions.iter().map(u32::to_string).collect(),
        platform: metadata.platform.to_owned(),
        inputs: metadata.inputs.iter().map(batched).chain(optional).collect(),
        outputs: metadata.outputs.iter().map(batched).collect(),
    }
}

/// Returns the configuration of a model, with shapes without the batch axis.
pub(super) fn config(metadata: &Metadata, content: &ModelContent) -> proto::ModelConfig {
    let input = |spec: &TensorSpec, dims, optional| proto::ModelInput {
        name: spec.name.clone(),
        data_type: data_type(spec.datatype),
        dims,
        optional,
    };
    let required = metadata.inputs.iter().map(|spec| input(spec, dims(metadata, spec), false));
    let optional = metadata.optional.iter().map(|spec| input(spec, spec.shape.clone(), true));
    let output = |spec: &TensorSpec| proto::ModelOutput {
        name: spec.name.clone(),
        data_type: data_type(spec.datatype),
        dims: dims(metadata, spec),
    };
    proto::ModelConfig {
        name: metadata.name.clone(),
        platform: metadata.platform.to_owned(),
        max_batch_size: i32::try_from(metadata.max_batch).unwrap_or(i32::MAX),
        input: required.chain(optional).collect(),
        output: metadata.outputs.iter().map(output).collect(),
        dynamic_batching: batches(metadata).then(proto::ModelDynamicBatching::default),
        backend: backend(metadata).to_owned(),
        parameters: parameters(content),
        model_transaction_policy: metadata.streams.map(|_| proto::ModelTransactionPolicy { decoupled: true }),
    }
}

/// Returns the known facts about the content that is served.
fn parameters(content: &ModelContent) -> HashMap<String, proto::ModelParameter> {
    let seconds =
        content.loaded_at.and_then(|at| Some(at.duration_since(UNIX_EPOCH).ok()?.as_secs().to_string()));
    let known = [("sha256", content.sha256.get().cloned()), ("loaded_at", seconds)];
    let parameter = |(key, value): (&str, Option<String>)| {
        Some((key.to_owned(), proto::ModelParameter { string_value: value? }))
    };
    known.into_iter().filter_map(parameter).collect()
}

fn batches(metadata: &Metadata) -> bool {
    metadata.max_batch > 0
}

fn dims(metadata: &Metadata, spec: &TensorSpec) -> Vec<i64> {
    spec.shape.iter().skip(usize::from(batches(metadata))).copied().collect()
}

/// Returns the backend of a platform. A platform of Triton consists of a backend and a kind of
/// file.
fn backend(metadata: &Metadata) -> &str {
    metadata.platform.split_once('_').map_or(metadata.platform, |(backend, _)| backend)
}

fn data_type(datatype: Datatype) -> i32 {
    let name = match datatype {
        Datatype::Bytes => "STRING",
        other => other.name(),
    };
    proto::DataType::from_str_name(&format!("TYPE_{name}")).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde::Serialize;
    use serde_json::{Value, json};

    use super::*;

    /// Returns the configuration of a model without files.
    fn described(metadata: &Metadata) -> proto::ModelConfig {
        config(metadata, &ModelContent::default())
    }

    #[test]
    fn the_content_that_is_served_is_among_the_parameters() {
        let content =
            ModelContent { loaded_at: Some(UNIX_EPOCH + Duration::from_secs(7)), ..Default::default() };
        let parameters = || in_json(config(&metadata(8), &content))["parameters"].clone();
        assert_eq!(parameters(), json!({"loaded_at": {"string_value": "7"}}));
        content.sha256.set("ab12".to_owned()).unwrap();
        assert_eq!(parameters()["sha256"], json!({"string_value": "ab12"}));
    }

    fn in_json(message: impl Serialize) -> Value {
        serde_json::to_value(message).unwrap()
    }

    fn metadata(max_batch: u32) -> Metadata {
        let spec = |name: &str, datatype| TensorSpec { name: name.into(), datatype, shape: vec![-1, 16] };
        Metadata {
            name: "m".into(),
            version: "1".into(),
            platform: "onnxruntime_onnx",
            max_batch,
            streams: None,
            inputs: vec![spec("x", Datatype::Fp32)],
            optional: Vec::new(),
            outputs: vec![spec("y", Datatype::Bytes)],
        }
    }

    #[test]
    fn a_batching_model_shows_its_batch_axis_in_metadata_only() {
        let batching = metadata(8);
        assert_eq!(
            in_json(model(&batching, &[1, 3])),
            json!({"name": "m", "versions": ["1", "3"], "platform": "onnxruntime_onnx",
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}],
                "outputs": [{"name": "y", "datatype": "BYTES", "shape": [-1, 16]}]})
        );
        assert_eq!(
            in_json(described(&batching)),
            json!({"name": "m", "platform": "onnxruntime_onnx", "backend": "onnxruntime", "max_batch_size": 8,
                "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [16]}],
                "output": [{"name": "y", "data_type": "TYPE_STRING", "dims": [16]}],
                "dynamic_batching": {"preferred_batch_size": [], "max_queue_delay_microseconds": 0}})
        );
        assert_eq!(described(&batching).input[0].dims, [16]);
        assert!(described(&batching).dynamic_batching.is_some());
    }

    #[test]
    fn optional_inputs_have_no_batch_axis() {
        let spec = TensorSpec { name: "b".into(), datatype: Datatype::Fp32, shape: vec![-1, 2] };
        let with_optional = Metadata { optional: vec![spec], ..metadata(8) };
        let described_model = in_json(model(&with_optional, &[1]));
        assert_eq!(described_model["inputs"][1], json!({"name": "b", "datatype": "FP32", "shape": [-1, 2]}));
        let inputs = &in_json(described(&with_optional))["input"];
        assert_eq!(
            inputs[1],
            json!({"name": "b", "data_type": "TYPE_FP32", "dims": [-1, 2], "optional": true})
        );
        assert_eq!(inputs[0].get("optional"), None);
    }

    #[test]
    fn a_model_without_a_batch_axis_shows_whole_shapes() {
        let whole = metadata(0);
        assert_eq!(in_json(described(&whole))["input"][0]["dims"], json!([-1, 16]));
        assert_eq!(in_json(described(&whole))["dynamic_batching"], Value::Null);
        assert_eq!(described(&whole).max_batch_size, 0);
        assert_eq!(model(&whole, &[1]).outputs[0].datatype, "BYTES");
    }
}
