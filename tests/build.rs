//! Compiles the protocol's client from the supervisor's own description of it.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = "../supervisor/ingress/proto";
    let proto = format!("{folder}/open_inference.proto");
    println!("cargo:rerun-if-changed={proto}");
    let files = protox::compile([&proto], [folder])?;
    tonic_prost_build::configure().build_server(false).bytes(".").compile_fds(files)?;
    Ok(())
}
