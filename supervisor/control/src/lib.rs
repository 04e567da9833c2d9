//! Control: which models there are, their workers, and the GPUs that these share.

pub mod controller;
pub mod host;
pub mod models;
pub mod nvml;
pub mod partition;
pub mod process;
