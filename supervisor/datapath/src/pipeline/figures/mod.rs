//! The figures of a model that operators, load balancers and the controller see.

mod counts;
mod durations;
mod histogram;
mod rates;
mod stall;
mod stats;
mod totals;

pub use counts::{CountedRefusal, RefusalCounts, RequestCounts};
pub use durations::Durations;
pub use histogram::LatencyHistogram;
pub use rates::{ModelLoad, Rates};
pub use stall::Stall;
pub use totals::{BatchStageTotals, Total, Totals};

pub(crate) use durations::RequestTimes;
pub(crate) use stall::StallMeter;
pub(crate) use stats::Stats;
pub(crate) use totals::BatchTimes;
