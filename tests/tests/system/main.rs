//! Whole-system tests: the real binaries on an emulated GPU, used from outside.

mod adaptive;
mod batching;
mod blocked;
mod broken;
mod collector;
mod crash;
mod doctor;
mod drain;
mod in_process;
mod lifecycle;
mod limits;
mod metrics;
mod misses;
mod modes;
mod mps;
mod profile;
mod readiness;
mod reload;
mod repository;
mod resize;
mod rolling;
mod scene;
mod soak;
mod standby;
mod starting;
mod tracing;
