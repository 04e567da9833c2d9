//! What is simulated.

use shadowslice_policy::sharing::Terms;
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Moment, Sms};

/// The models and GPUs of a simulated world.
#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    /// The SMs of each GPU.
    pub gpus: Vec<Sms>,
    /// The models.
    pub models: Vec<Served>,
}

/// A model of a simulated world.
#[derive(Debug, Clone, PartialEq)]
pub struct Served {
    /// What policies are told of it; its profile is what they believe.
    pub terms: Terms,
    /// What it really costs.
    pub truth: Profile,
    /// Requests that may wait.
    pub max_queued: usize,
    /// Whether late requests are served all the same.
    pub serve_late: bool,
}

/// A request of a load, of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrival {
    /// When it comes.
    pub at: Moment,
    /// The model's index.
    pub model: usize,
}
