//! Models and inputs for the tests of baselines.

use std::time::Duration;

use shadowslice_shared::profile::{
    Execution, ExecutionRow, ProcessMemory, Profile, ProfileSource, StartTimes,
};
use shadowslice_shared::units::{Sms, Timestamp};

use shadowslice_policy::sharing::{ModelSnapshot, ModelSpec, Observation};

pub(super) fn spec(name: &str, slo_ms: u64) -> ModelSpec {
    ModelSpec {
        name: name.to_owned(),
        gpu: 0,
        initial: Sms(40),
        initial_given: false,
        shares: (1..=66).map(|step| Sms(2 * step)).collect(),
        slo: Duration::from_millis(slo_ms),
        percentile: 99.0,
        priority: 1,
        max_batch: 16,
        profile: None,
    }
}

/// Returns the profile of a model whose batches take `fixed` ms plus `work` ms·SM per row. More than
/// `knee` SMs do not make a batch faster.
pub(super) fn profile(fixed: f64, work: f64, knee: u32) -> Profile {
    let sms: Vec<Sms> = [2, 4, 8, 14, 26, 40, 66, 100, 132].into_iter().map(Sms).collect();
    let row = |batch: u32| {
        let ms = |sms: &Sms| fixed + work * f64::from(batch) / f64::from(sms.0.min(knee));
        ExecutionRow { batch, ms: sms.iter().map(ms).collect() }
    };
    Profile {
        source: ProfileSource::Illustrative,
        memory: ProcessMemory::default(),
        start: StartTimes {
            process: Duration::from_millis(300),
            load: Duration::from_millis(700),
            warm: Duration::from_millis(500),
        },
        bandwidth: 0.1,
        shapes: Default::default(),
        execution: Execution::new(sms.clone(), [1, 2, 4, 8, 16, 32].map(row).to_vec()).unwrap(),
    }
}

pub(super) fn snapshot(share: Sms) -> ModelSnapshot {
    ModelSnapshot {
        share,
        share_since: Timestamp::default(),
        pending_share: None,
        standby_share: None,
        groups: None,
        execution: None,
        held: false,
        can_pause: false,
        observation: Observation { span: Duration::from_millis(500), ..Observation::default() },
    }
}
