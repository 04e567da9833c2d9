//! Models and policy inputs for tests.

use std::time::Duration;

use shadowslice_shared::units::{Sms, Timestamp};

use super::{ModelSnapshot, ModelSpec, Observation};

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
