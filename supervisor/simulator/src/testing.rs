//! Small worlds for tests of the bound.

use std::time::Duration;

use shadowslice_policy::sharing::Terms;
use shadowslice_shared::profile::{Execution, Memory, Profile, Row, Source, Start};
use shadowslice_shared::units::{Moment, Sms};

use crate::scenario::{Arrival, Scenario, Served};

/// Times in milliseconds for batches of 1, 2, ... that need 2 SMs and gain nothing from more.
pub(crate) fn flat(ms: &[f64]) -> Execution {
    let row = |(index, &ms): (usize, &f64)| Row { batch: index as u32 + 1, ms: vec![ms] };
    Execution::new(vec![Sms(2)], ms.iter().enumerate().map(row).collect()).unwrap()
}

pub(crate) fn model(execution: Execution, max_batch: u32, slo_ms: u64) -> Served {
    let terms = Terms {
        name: "m".into(),
        gpu: 0,
        initial: Sms(2),
        initial_given: false,
        shares: (0..=500).map(|step| Sms(2 * step)).collect(),
        slo: Duration::from_millis(slo_ms),
        percentile: 99.0,
        priority: 1,
        max_batch,
        profile: None,
    };
    let truth = Profile {
        source: Source::Illustrative,
        memory: Memory::default(),
        start: Start::default(),
        bandwidth: 0.0,
        execution,
    };
    Served { terms, truth, max_queued: 1000, serve_late: false, max_delay: Duration::ZERO, in_process: false }
}

pub(crate) fn scenario(sms: u32, models: Vec<Served>) -> Scenario {
    Scenario { gpus: vec![Sms(sms)], models }
}

/// Arrivals from milliseconds and models.
pub(crate) fn arrivals(load: &[(u64, usize)]) -> Vec<Arrival> {
    let arrival =
        |&(ms, model): &(u64, usize)| Arrival { at: Moment::after_origin(Duration::from_millis(ms)), model };
    load.iter().map(arrival).collect()
}
