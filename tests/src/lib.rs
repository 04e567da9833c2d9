//! The shared parts of the whole-system tests and the demo: a supervisor to be tested from outside,
//! with its clients, an open-loop load, and requests with known answers.

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

/// The protocol's messages and its client.
#[allow(unreachable_pub, unused_qualifications, clippy::all, reason = "generated")]
pub mod proto {
    tonic::include_proto!("inference");

    /// gRPC's health service.
    pub mod health {
        tonic::include_proto!("grpc.health.v1");
    }
}
