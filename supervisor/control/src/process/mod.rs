//! Worker processes: spawning, booting, watching, ending.

mod boot;
mod priority;
mod reference;
mod says;
mod spawn;
mod weights;
mod worker;

pub use boot::plan_warm_up;
pub use priority::may_raise_priority;
pub use reference::{ReferenceError, ReferenceFile};

pub use spawn::Inherited;
pub(crate) use spawn::close_on_exec;
#[cfg(test)]
pub(crate) use spawn::forks;
pub use weights::KeptWeights;
pub use worker::{BootMs, Launch, SpawnError, Worker, WorkerEvent, WorkerSaid};
