//! A benchmark of the number of requests that the simulator handles per second of wall time, on one
//! core.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark's own output")]

use std::time::{Duration, Instant};

use shadowslice_policy::sharing::{AdmissionPolicy, Decision, ModelSpec, PolicyInput};
use shadowslice_shared::profile::{
    Execution, ExecutionRow, ProcessMemory, Profile, ProfileSource, StartTimes,
};
use shadowslice_shared::units::Sms;
use shadowslice_simulator::loads::NamedLoad;
use shadowslice_simulator::scenario::{Scenario, ScenarioModel, SleepRule};
use shadowslice_simulator::world::{self, GpuSharing, WorldSettings};

const SETTINGS: WorldSettings = WorldSettings {
    interval: Duration::from_millis(500),
    dwell: Duration::from_secs(5),
    interference: true,
    sharing: GpuSharing::Turns,
    pause: true,
    noise: 0.0,
    seed: 1,
};

/// Returns a model that can handle a few thousand requests per second on a sixth of the GPU.
fn served(index: u32) -> ScenarioModel {
    let row =
        |batch: u32, factor: f64| ExecutionRow { batch, ms: [8.0, 4.5, 3.0].map(|ms| ms * factor).to_vec() };
    let rows = vec![row(1, 0.2), row(8, 0.6), row(32, 1.8)];
    let profile = Profile {
        source: ProfileSource::Illustrative,
        memory: ProcessMemory::default(),
        start: StartTimes { process: Duration::from_secs(1), ..StartTimes::default() },
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
    ScenarioModel {
        terms,
        truth: profile,
        max_queued: 1024,
        serve_late: false,
        max_delay: Duration::ZERO,
        in_process: false,
        shared_process: None,
        sleep: SleepRule::Never,
    }
}

/// Simulates six models, and prints the number of simulated requests per second of wall time.
fn measure(name: &str, initial: Sms, admission: &[AdmissionPolicy], utilisation: f64) {
    let models = (0..6).map(served).collect();
    let mut scenario = Scenario { gpus: vec![Sms(132)], memory: vec![None], models };
    scenario.models.iter_mut().for_each(|served| served.terms.initial = initial);
    let arrivals = NamedLoad::Poisson.arrivals(&scenario, 1, 120.0, utilisation);
    let mut requests = 0_u64;
    let counted = arrivals.inspect(|_| requests += 1);
    let mut decide = |_: &PolicyInput| Decision { admissions: admission.to_vec(), ..Decision::default() };
    let start = Instant::now();
    let outcome = world::run(&scenario, &SETTINGS, counted, &mut decide);
    let took = start.elapsed().as_secs_f64();
    let rate = requests as f64 / took / 1e6;
    drop(outcome);
    println!("{name}: {requests} requests in {took:.2} s, {rate:.2} million a second");
}

fn main() {
    let admission = [AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(32) }; 6];
    measure("partitioned, half loaded", Sms(22), &[], 0.5);
    measure("partitioned, half loaded, with admission control", Sms(22), &admission, 0.5);
    measure("unpartitioned, half loaded, with admission control", Sms(132), &admission, 0.5);
    measure("partitioned, overloaded, with admission control", Sms(22), &admission, 1.5);
    measure("partitioned, overloaded", Sms(22), &[], 1.5);
}
