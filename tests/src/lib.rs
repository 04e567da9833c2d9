//! The library of the whole-system tests, the demo and the GPU check. It contains a supervisor
//! under test, its clients, open-loop and closed-loop loads, and requests with known answers.

pub mod cases;
pub mod client;
pub mod home;
pub mod http;
pub mod load;
pub mod metrics;
pub mod process;
pub mod random;
pub mod server;
pub mod status;

/// The messages of the Open Inference Protocol, and its gRPC client.
#[allow(unreachable_pub, unused_qualifications, clippy::all, reason = "generated")]
pub mod proto {
    tonic::include_proto!("inference");

    /// The messages of gRPC's health service, and its client.
    pub mod health {
        tonic::include_proto!("grpc.health.v1");
    }
}
