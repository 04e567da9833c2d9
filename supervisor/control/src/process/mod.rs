//! Worker processes: their start, boot, monitoring and end.

mod boot;
mod environment;
mod exit;
mod loaded_files;
mod orphans;
mod pid_files;
mod priority;
mod python;
mod reference;
mod shared;
mod spawn;
mod start_queue;
mod stderr_forward;
mod users;
mod weights;
mod worker;
mod worker_host;

pub use boot::{FilesToLoad, plan_warm_up};
pub use exit::{EndCause, WorkerEnd};
pub use loaded_files::{FileStamps, LoadedFiles};
pub(crate) use orphans::own;
pub use orphans::reap_orphans;
pub use pid_files::kill_leftover_workers;
pub use priority::may_raise_priority;
pub(crate) use python::python_variables;
pub use reference::{ReferenceFile, ReferenceFileError};

pub use shared::{SharedKey, SharedPlace, SharedProcesses};
#[cfg(test)]
pub(crate) use spawn::forks;
pub use spawn::{Child, InheritedFile, held, spawn};
pub(crate) use spawn::{close_on_exec, watch};
pub use start_queue::{Rank, Start, StartPermit, StartPlace, StartQueue};
pub use users::{NoUser, User, Users};
pub use weights::KeptWeights;
pub use worker::{BootMs, LaunchSpec, Programs, SpawnError, Worker, WorkerEvent, WorkerSaid, WorkerSettings};
