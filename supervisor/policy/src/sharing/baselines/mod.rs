//! The published policies with which the adaptive policy is compared. Each names its source and is
//! implemented as published. Like every policy, a baseline keeps `min` and `max` of the
//! configuration.

mod fixed;
mod fixed_layouts;
mod gpulet;
mod gslice;

pub(super) use fixed::FixedShares;
pub(super) use fixed_layouts::FixedLayouts;
pub(super) use gpulet::Gpulet;
pub(super) use gslice::Gslice;
