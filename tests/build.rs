//! Compiles the gRPC clients from the supervisor's protocol files.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = "../supervisor/ingress/proto";
    println!("cargo:rerun-if-changed={folder}");
    let files = protox::compile(["open_inference.proto", "health.proto"], [folder])?;
    tonic_prost_build::configure().build_server(false).bytes(".").compile_fds(files)?;
    Ok(())
}
