//! Compiles the protocols' messages, without needing a protoc on the machine.

use std::error::Error;

/// Messages that HTTP answers with as JSON, and what they are made of.
const ALSO_JSON: [&str; 15] = [
    "ServerMetadataResponse",
    "ModelMetadataResponse",
    "SystemSharedMemoryStatusResponse",
    "ModelStatisticsResponse",
    "ModelStatistics",
    "InferStatistics",
    "InferBatchStatistics",
    "StatisticDuration",
    "NeverGiven",
    "ModelConfig",
    "ModelInput",
    "ModelOutput",
    "ModelDynamicBatching",
    "ModelTransactionPolicy",
    "RepositoryIndexResponse",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let served = protox::compile(["proto/open_inference.proto", "proto/health.proto"], ["proto"])?;
    let mut builder = tonic_prost_build::configure()
        .build_client(false)
        .bytes(".")
        .codec_path("crate::codec::BoundedCodec")
        .field_attribute("data_type", "#[serde(serialize_with = \"crate::describe::by_name\")]")
        .field_attribute("model_transaction_policy", "#[serde(skip_serializing_if = \"Option::is_none\")]")
        .field_attribute("dynamic_batching", "#[serde(skip_serializing_if = \"Option::is_none\")]");
    for message in ALSO_JSON {
        builder = builder.type_attribute(format!(".inference.{message}"), "#[derive(serde::Serialize)]");
    }
    builder.compile_fds(served)?;
    Ok(())
}
