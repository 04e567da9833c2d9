//! Compiles the messages of the protocols, without a protoc on the machine.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use prost::Message;

/// The definitions of the services on the gRPC port.
const SERVED: [&str; 4] =
    ["open_inference.proto", "health.proto", "reflection_v1.proto", "reflection_v1alpha.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let mut served = protox::compile(SERVED, ["proto"])?;
    for file in &mut served.file {
        // Comments would make a descriptor four times as large.
        file.source_code_info = None;
        if !file.dependency.is_empty() {
            return Err(format!("{} has imports, which reflection does not answer with", file.name()).into());
        }
    }
    fs::write(Path::new(&env::var("OUT_DIR")?).join("served.descriptors"), served.encode_to_vec())?;
    // Both versions of reflection have the same messages, so the code is that of v1.
    served.file.retain(|file| file.package() != "grpc.reflection.v1alpha");
    tonic_prost_build::configure()
        .build_client(false)
        .bytes(".")
        .codec_path("crate::tensors::BoundedCodec")
        .field_attribute("data_type", "#[serde(serialize_with = \"crate::proto::serialize_data_type\")]")
        .field_attribute("model_transaction_policy", "#[serde(skip_serializing_if = \"Option::is_none\")]")
        .field_attribute("ModelInput.optional", "#[serde(skip_serializing_if = \"std::ops::Not::not\")]")
        .field_attribute(
            "ModelConfig.parameters",
            "#[serde(skip_serializing_if = \"std::collections::HashMap::is_empty\")]",
        )
        .field_attribute("dynamic_batching", "#[serde(skip_serializing_if = \"Option::is_none\")]")
        // HTTP returns many of the messages as JSON.
        .type_attribute(".inference", "#[derive(serde::Serialize)]")
        .compile_fds(served)?;
    Ok(())
}
