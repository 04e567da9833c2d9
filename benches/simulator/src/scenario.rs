//! The scenario of a simulation: GPUs, models and arrivals.

use std::time::Duration;

use shadowslice_policy::sharing::ModelSpec;
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Sms, Timestamp};

/// The GPUs and the models of a simulation. Each GPU is described by its number of SMs.
#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    pub gpus: Vec<Sms>,
    /// The maximum memory of all workers on each GPU in bytes, or `None` if the memory is unlimited. The
    /// maximum only has an effect on GPUs with models that may sleep.
    pub memory: Vec<Option<u64>>,
    pub models: Vec<ScenarioModel>,
}

/// A model of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct ScenarioModel {
    /// The properties that policies know. `profile` is the profile that the policies get (the
    /// belief).
    pub terms: ModelSpec,
    /// The model's profile in the simulated world (the truth).
    pub truth: Profile,
    /// The maximum number of queued requests.
    pub max_queued: usize,
    /// True if the model also answers late requests. False if requests that cannot be answered in
    /// time are refused.
    pub serve_late: bool,
    /// The maximum time for which a partial batch waits for more requests.
    pub max_delay: Duration,
    /// True if the worker changes its share in-process. This also requires that the GPU can be
    /// divided. Otherwise, a shadow starts at the new share.
    pub in_process: bool,
    /// The number of the process that the model shares with other models, which have the same number.
    /// `None` if each worker of the model has its own process.
    pub shared_process: Option<usize>,
    pub sleep: SleepRule,
}

/// The rule that decides when a model sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SleepRule {
    #[default]
    Never,
    /// The model sleeps when other models need its memory.
    OnPressure,
    /// The model also sleeps when no request has arrived for this time.
    After(Duration),
}

/// The arrival of one request. Each request has one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SimulatedArrival {
    pub at: Timestamp,
    pub model: usize,
}

#[cfg(test)]
pub(crate) mod fixtures {
    use shadowslice_shared::profile::{Execution, ExecutionRow, ProcessMemory, ProfileSource, StartTimes};

    use super::*;

    /// Returns a profile in which a request takes `ms` milliseconds on 50 or more SMs. On fewer
    /// SMs, the time is inversely proportional to the number of SMs.
    pub(crate) fn profile(ms: f64) -> Profile {
        let seconds = Duration::from_secs;
        Profile {
            source: ProfileSource::Illustrative,
            memory: ProcessMemory::default(),
            start: StartTimes { process: seconds(1), load: seconds(1), warm: seconds(1) },
            bandwidth: 0.0,
            shapes: Default::default(),
            execution: Execution::new(vec![Sms(50)], vec![ExecutionRow { batch: 1, ms: vec![ms] }]).unwrap(),
        }
    }

    /// Returns a model with 50 SMs and an SLO of 1 s, whose requests take `ms` milliseconds.
    pub(crate) fn model(name: &str, ms: f64) -> ScenarioModel {
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
        ScenarioModel {
            terms,
            truth: profile(ms),
            max_queued: 1024,
            serve_late: true,
            max_delay: Duration::ZERO,
            in_process: false,
            shared_process: None,
            sleep: SleepRule::Never,
        }
    }

    pub(crate) fn on_one_gpu(sms: u32, models: Vec<ScenarioModel>) -> Scenario {
        Scenario { gpus: vec![Sms(sms)], memory: vec![None], models }
    }
}
