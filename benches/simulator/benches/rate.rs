//! How many requests a second of wall time the world simulates, on one core.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark's own output")]

use std::time::{Duration, Instant};

use shadowslice_policy::sharing::{AdmissionPolicy, Decision, ModelSpec, PolicyInput};
use shadowslice_shared::profile::{Execution, Memory, Profile, Row, Source, Start};
use shadowslice_shared::units::Sms;
use shadowslice_simulator::loads::Named;
use shadowslice_simulator::scenario::{Scenario, Served};
use shadowslice_simulator::world::{self, Settings, Sharing};

const SETTINGS: Settings = Settings {
    interval: Duration::from_millis(500),
    dwell: Duration::from_secs(5),
    interference: true,
    sharing: Sharing::Turns,
    noise: 0.0,
    seed: 1,
};

/// Some thousand requests a second each, on a sixth of the GPU.
fn served(index: u32) -> Served {
    let row = |batch: u32, factor: f64| Row { batch, ms: [8.0, 4.5, 3.0].map(|ms| ms * factor).to_vec() };
    let rows = vec![row(1, 0.2), row(8, 0.6), row(32, 1.8)];
    let profile = Profile {
        source: Source::Illustrative,
        memory: Memory::default(),
        start: Start { process: Duration::from_secs(1), ..Start::default() },
        bandwidth: 0.2,
        shapes: Default::default(),
        execution: Execution::new(vec![Sms(10), Sms(20), Sms(40)], rows).unwrap(),
    };
    let terms = ModelSpec {
        name: format!("m{index}"),
        gpu: 0,
        initial: Sms(22),
        initial_given: false,
        shares: (1..=66).map(|step| Sms(2 * step)).collect(),
        slo: Duration::from_millis(20 + 10 * u64::from(index)),
        percentile: 99.0,
        priority: 1 + index % 2,
        max_batch: 32,
        profile: Some(profile.clone()),
    };
    Served {
        terms,
        truth: profile,
        max_queued: 1024,
        serve_late: false,
        max_delay: Duration::ZERO,
        in_process: false,
    }
}

fn measure(what: &str, initial: Sms, admissions: &[AdmissionPolicy], utilisation: f64) {
    let mut scenario = Scenario { gpus: vec![Sms(132)], models: (0..6).map(served).collect() };
    scenario.models.iter_mut().for_each(|served| served.terms.initial = initial);
    let arrivals = Named::Poisson.arrivals(&scenario, 1, 120.0, utilisation);
    let mut requests = 0_u64;
    let counted = arrivals.inspect(|_| requests += 1);
    let mut decide = |_: &PolicyInput| Decision { admissions: admissions.to_vec(), ..Decision::default() };
    let begun = Instant::now();
    let outcome = world::run(&scenario, &SETTINGS, counted, &mut decide);
    let took = begun.elapsed().as_secs_f64();
    let rate = requests as f64 / took / 1e6;
    drop(outcome);
    println!("{what}: {requests} requests in {took:.2} s, {rate:.2} million a second");
}

fn main() {
    let admission = [AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(32) }; 6];
    measure("partitioned, half loaded", Sms(22), &[], 0.5);
    measure("partitioned, half loaded, refusing late requests", Sms(22), &admission, 0.5);
    measure("unpartitioned, half loaded, refusing late requests", Sms(132), &admission, 0.5);
    measure("partitioned, overloaded, refusing late requests", Sms(22), &admission, 1.5);
    measure("partitioned, overloaded", Sms(22), &[], 1.5);
}
