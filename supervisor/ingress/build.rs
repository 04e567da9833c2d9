//! Compiles the protocols' messages, without needing a protoc on the machine.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let served = protox::compile(["proto/open_inference.proto", "proto/health.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .build_client(false)
        .bytes(".")
        .codec_path("crate::codec::BoundedCodec")
        .compile_fds(served)?;
    Ok(())
}
