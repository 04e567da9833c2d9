//! Control: which models there are, their workers, and the GPUs that these share.

pub mod backend;
pub mod controller;
pub mod host;
pub mod model_cache;
pub mod models;
pub mod nvml;
pub mod process;
pub mod residency;
mod run_dir;
