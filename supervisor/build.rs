//! Compiles the protocol's messages, without needing a protoc on the machine.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let protos = ["proto/open_inference.proto", "proto/health.proto"];
    protos.iter().for_each(|proto| println!("cargo:rerun-if-changed={proto}"));
    let files = protox::compile(protos, ["proto"])?;
    tonic_prost_build::configure()
        .build_client(false)
        .bytes(".")
        .codec_path("crate::ingress::codec::BoundedCodec")
        .compile_fds(files)?;
    Ok(())
}
