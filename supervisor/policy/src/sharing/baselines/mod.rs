//! What others do, as published: what the adaptive policy is held against. Each names its source,
//! and is no better than it was there. A baseline keeps `min` and `max` of the configuration as
//! every policy does.

mod fixed;
mod fixed_layouts;
mod gpulet;
mod gslice;

pub(super) use fixed::FixedShares;
pub(super) use fixed_layouts::FixedLayouts;
pub(super) use gpulet::Gpulet;
pub(super) use gslice::Gslice;
