//! Whole-system tests: the real binaries on an emulated GPU, used from outside.

mod adaptive;
mod batching;
mod blocked;
mod broken;
mod collector;
mod crash;
mod doctor;
mod in_process;
mod lifecycle;
mod limits;
mod metrics;
mod modes;
mod mps;
mod profile;
mod reload;
mod repository;
mod resize;
mod scene;
mod soak;
mod standby;
mod starting;
mod tracing;
