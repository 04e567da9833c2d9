//! The supervisor: what the `shadowslice` binary does.

pub mod admin;
pub mod cli;
pub mod clock;
pub mod config;
pub mod control;
pub mod doctor;
pub mod errors;
pub mod exit;
pub mod host;
pub mod ingress;
pub mod machine;
pub mod metrics;
pub mod models;
pub mod nvml;
pub mod otlp;
pub mod partition;
pub mod pipeline;
pub mod process;
pub mod profile;
pub mod repository;
pub mod router;
pub mod serve;
pub mod simulate;
pub mod status;
pub mod trace;
