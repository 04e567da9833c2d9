//! What an operator sees and does.

pub mod admin;
pub mod doctor;
pub mod machine;
pub mod metrics;
pub mod otlp;
pub mod profile;
pub mod status;
