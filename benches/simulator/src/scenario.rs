//! What is simulated.

use std::time::Duration;

use shadowslice_policy::sharing::ModelSpec;
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Sms, Timestamp};

#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    pub gpus: Vec<Sms>,
    pub models: Vec<Served>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Served {
    /// What policies are told; the profile is what they believe.
    pub terms: ModelSpec,
    /// What the model really costs.
    pub truth: Profile,
    pub max_queued: usize,
    pub serve_late: bool,
    /// How long a batch that is not full waits for more.
    pub max_delay: Duration,
    /// The share changes inside the worker, where the GPU divides; else a second worker brings the
    /// new share.
    pub in_process: bool,
}

/// Of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrival {
    pub at: Timestamp,
    pub model: usize,
}

#[cfg(test)]
pub(crate) mod fixtures {
    use shadowslice_shared::profile::{Execution, Memory, Row, Source, Start};

    use super::*;

    /// A profile of one row: `ms` a request on 50 SMs, in inverse proportion below, flat above.
    pub(crate) fn profile(ms: f64) -> Profile {
        let seconds = Duration::from_secs;
        Profile {
            source: Source::Illustrative,
            memory: Memory::default(),
            start: Start { process: seconds(1), load: seconds(1), warm: seconds(1) },
            bandwidth: 0.0,
            shapes: Default::default(),
            execution: Execution::new(vec![Sms(50)], vec![Row { batch: 1, ms: vec![ms] }]).unwrap(),
        }
    }

    /// A model with 50 SMs. A request takes `ms` by itself, and its answer is due after a second.
    pub(crate) fn model(name: &str, ms: f64) -> Served {
        let terms = ModelSpec {
            name: name.to_owned(),
            gpu: 0,
            initial: Sms(50),
            initial_given: false,
            shares: (1..=50).map(|step| Sms(2 * step)).collect(),
            slo: Duration::from_secs(1),
            percentile: 99.0,
            priority: 1,
            max_batch: 1,
            profile: Some(profile(ms)),
        };
        Served {
            terms,
            truth: profile(ms),
            max_queued: 1024,
            serve_late: true,
            max_delay: Duration::ZERO,
            in_process: false,
        }
    }

    pub(crate) fn on_one_gpu(sms: u32, models: Vec<Served>) -> Scenario {
        Scenario { gpus: vec![Sms(sms)], models }
    }
}
