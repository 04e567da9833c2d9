//! The supervisor's interfaces for operators: control socket, status, `top`, `doctor`, `profile`,
//! metrics, logs and traces.

pub mod access_log;
pub mod admin;
pub mod doctor;
pub mod figures;
pub mod history;
pub mod log;
pub mod machine;
pub mod metrics;
pub mod otlp;
pub mod own_process;
pub mod plan;
pub mod profile;
pub mod status;
pub mod top;
