//! The MPS backend, against a stand-in of NVIDIA's control program.
#![allow(clippy::unwrap_used, reason = "a test's set-up that fails has failed the test")]

mod life;
mod rig;
mod workers;
