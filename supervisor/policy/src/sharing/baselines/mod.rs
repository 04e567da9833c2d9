//! The policies other than the adaptive one: constant shares (`static`, `equal` and the like), two
//! published policies (GSLICE, gpulet), and fixed layouts for the evaluation. The caller limits their
//! shares to the configured `min` and `max`.

mod fixed;
mod fixed_layouts;
mod gpulet;
mod gslice;

pub(super) use fixed::FixedShares;
pub(super) use fixed_layouts::FixedLayouts;
pub(super) use gpulet::Gpulet;
pub(super) use gslice::Gslice;
