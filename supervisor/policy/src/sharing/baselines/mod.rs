//! Baselines: published policies with which the adaptive policy is compared. Each module names its
//! source and follows the publication. Like all policies, a baseline respects the configured `min` and
//! `max` shares.

mod fixed;
mod fixed_layouts;
mod gpulet;
mod gslice;

pub(super) use fixed::FixedShares;
pub(super) use fixed_layouts::FixedLayouts;
pub(super) use gpulet::Gpulet;
pub(super) use gslice::Gslice;
