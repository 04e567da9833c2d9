//! Compiles the messages of the protocols, without a protoc on the machine.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use prost::Message;
use prost_types::{DescriptorProto, FileDescriptorSet};

/// The definitions of the services on the gRPC port.
const SERVED: [&str; 4] =
    ["open_inference.proto", "health.proto", "reflection_v1.proto", "reflection_v1alpha.proto"];

/// The messages that HTTP returns as JSON, and the messages inside them.
const ALSO_JSON: [&str; 16] = [
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
    "ModelParameter",
    "ModelInput",
    "ModelOutput",
    "ModelDynamicBatching",
    "ModelTransactionPolicy",
    "RepositoryIndexResponse",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let served = protox::compile(SERVED, ["proto"])?;
    describe(&served, Path::new(&env::var("OUT_DIR")?))?;
    let mut builder = tonic_prost_build::configure()
        .build_client(false)
        .bytes(".")
        .codec_path("crate::tensors::BoundedCodec")
        // Both versions have the same messages.
        .extern_path(".grpc.reflection.v1alpha", "crate::proto::reflection")
        .field_attribute("data_type", "#[serde(serialize_with = \"crate::proto::serialize_data_type\")]")
        .field_attribute("model_transaction_policy", "#[serde(skip_serializing_if = \"Option::is_none\")]")
        .field_attribute("ModelInput.optional", "#[serde(skip_serializing_if = \"std::ops::Not::not\")]")
        .field_attribute(
            "ModelConfig.parameters",
            "#[serde(skip_serializing_if = \"std::collections::HashMap::is_empty\")]",
        )
        .field_attribute("dynamic_batching", "#[serde(skip_serializing_if = \"Option::is_none\")]");
    for message in ALSO_JSON {
        builder = builder.type_attribute(format!(".inference.{message}"), "#[derive(serde::Serialize)]");
    }
    builder.compile_fds(served)?;
    Ok(())
}

/// Writes the tables for reflection, which contain the files, and the file of each symbol.
fn describe(served: &FileDescriptorSet, out: &Path) -> Result<(), Box<dyn Error>> {
    let (mut files, mut symbols, mut services) = (String::new(), Vec::new(), String::new());
    for (place, file) in served.file.iter().enumerate() {
        let mut file = file.clone();
        // Comments would make a descriptor four times as large.
        file.source_code_info = None;
        if !file.dependency.is_empty() {
            return Err(format!("{} has imports, which reflection does not answer with", file.name()).into());
        }
        let name = file.name();
        fs::write(out.join(name).with_extension("descriptor"), file.encode_to_vec())?;
        let described = format!("/{}", Path::new(name).with_extension("descriptor").display());
        writeln!(files, "    ({name:?}, include_bytes!(concat!(env!(\"OUT_DIR\"), {described:?}))),")?;
        let package = file.package();
        for service in &file.service {
            let service_name = format!("{package}.{}", service.name());
            writeln!(services, "    {service_name:?},")?;
            let method = |name: &str| (format!("{service_name}.{name}"), place);
            symbols.extend(service.method.iter().map(|one| method(one.name())));
            symbols.push((service_name.clone(), place));
        }
        symbols.extend(file.enum_type.iter().map(|one| (format!("{package}.{}", one.name()), place)));
        file.message_type.iter().for_each(|message| name_types(package, message, place, &mut symbols));
    }
    symbols.sort_unstable();
    let mut tables = format!(
        "pub(super) const FILES: &[(&str, &[u8])] = &[\n{files}];\n\
         pub(super) const SERVICES: &[&str] = &[\n{services}];\n\
         /// Sorted, each with its file's place in `FILES`.\n\
         pub(super) const SYMBOLS: &[(&str, usize)] = &[\n"
    );
    symbols.iter().try_for_each(|(symbol, place)| writeln!(tables, "    ({symbol:?}, {place}),"))?;
    tables.push_str("];\n");
    fs::write(out.join("descriptors.rs"), tables)?;
    Ok(())
}

/// Adds the names of a message and of the types within it.
fn name_types(within: &str, message: &DescriptorProto, file: usize, symbols: &mut Vec<(String, usize)>) {
    let name = format!("{within}.{}", message.name());
    symbols.extend(message.enum_type.iter().map(|one| (format!("{name}.{}", one.name()), file)));
    message.nested_type.iter().for_each(|nested| name_types(&name, nested, file, symbols));
    symbols.push((name, file));
}
