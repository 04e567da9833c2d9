//! The lanes to the workers: sockets and messages, hung workers, and inputs that kill workers.

mod hangs;
mod lane_events;
mod link;
mod occupancy;
mod pauses;
mod quarantine;
mod reader;
mod shapes;
mod sm_time;
mod socket;
mod steps;

pub use hangs::StalledBatch;
pub use lane_events::{EVENT_QUEUE_SIZE, LaneEvent};
pub use link::LaneWorker;
pub use occupancy::{Occupancy, OccupancyGuard};
pub use pauses::{GpuPauses, ModelPair, PauseTotal};
pub use reader::LaneReader;
pub use sm_time::{GpuSmTime, SmAccount, SmUse};
pub use socket::BatchSocket;

#[cfg(test)]
pub(crate) use link::step_limit;
pub(crate) use link::{PipelineBatch, PipelineLane, PipelineScheduler, WorkerLink};
pub(crate) use quarantine::{Admission, Quarantine};
#[cfg(test)]
pub(crate) use shapes::ShapeTimes;
pub(crate) use socket::adopt;
