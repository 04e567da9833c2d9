//! The supervisor: what the `shadowslice` binary does.

pub mod pipeline;
pub mod router;
