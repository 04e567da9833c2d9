//! Compiles the collector's messages, without needing a protoc on the machine.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let spoken = protox::compile(["proto/otlp_trace.proto"], ["proto"])?;
    tonic_prost_build::configure().build_server(false).bytes(".").compile_fds(spoken)?;
    Ok(())
}
