//! A benchmark of one decision of the adaptive policy for 100 models on 10 GPUs.
#![allow(clippy::unwrap_used, reason = "a benchmark")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use shadowslice_policy::sharing::{
    BatchStats, Choice, ModelSnapshot, ModelSpec, Observation, Policy, PolicyInput, PolicyName,
};
use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::groups::Groups;
use shadowslice_shared::profile::{
    Execution, ExecutionRow, ProcessMemory, Profile, ProfileSource, StartTimes,
};
use shadowslice_shared::units::{Sms, Timestamp};

const MODELS: usize = 100;
const GPUS: usize = 10;
const GPU: Sms = Sms(132);
const INTERVAL: Duration = Duration::from_millis(100);

/// Returns the profile of a model. A batch takes 0.3 ms, plus `work` ms·SM per row divided by the
/// number of SMs. More than `knee` SMs do not make it faster.
fn profile(work: f64, knee: u32) -> Profile {
    let sms: Vec<Sms> = [8, 14, 26, 38, 58, 78, 104, 132].map(Sms).to_vec();
    let row = |batch: u32| ExecutionRow {
        batch,
        ms: sms.iter().map(|sms| 0.3 + work * f64::from(batch) / f64::from(sms.0.min(knee))).collect(),
    };
    Profile {
        source: ProfileSource::Illustrative,
        memory: ProcessMemory::default(),
        start: StartTimes::default(),
        bandwidth: 0.1,
        shapes: Default::default(),
        execution: Execution::new(sms.clone(), [1, 2, 4, 8, 16, 32].map(row).to_vec()).unwrap(),
    }
}

fn terms(model: usize) -> ModelSpec {
    ModelSpec {
        name: format!("model-{model}"),
        gpu: model % GPUS,
        initial: Sms(40),
        initial_given: false,
        shares: (1..=66).map(|step| Sms(2 * step)).collect(),
        slo: Duration::from_millis(20 + 10 * (model as u64 % 9)),
        percentile: 99.0,
        priority: 1 + model as u32 % 3,
        max_batch: 32,
        profile: Some(profile(20.0 + (model % 7) as f64 * 15.0, 30 + 25 * (model as u32 % 5))),
    }
}

/// Returns the snapshot of a model with this share, after an interval in which `arrived` requests
/// arrived.
fn live(share: Sms, arrived: u64) -> ModelSnapshot {
    let executed = vec![BatchStats { rows: 4, count: arrived / 4, mean: Duration::from_millis(3) }];
    let seen = Observation {
        span: INTERVAL,
        arrived,
        answered: arrived,
        attainment: Some(0.95),
        mean_latency: Duration::from_millis(6),
        p99_latency: Duration::from_millis(12),
        busy: 0.4,
        batches: executed,
        ..Observation::default()
    };
    ModelSnapshot {
        share,
        share_since: Timestamp::default(),
        pending_share: None,
        standby_share: None,
        groups: Some(Groups::WHOLE),
        execution: None,
        held: false,
        can_pause: false,
        observation: seen,
    }
}

/// Returns the policy's input for a round. In every round, some models violate their SLOs, so that
/// the policy always has changes to try.
fn facts(round: u64, shares: &[Sms]) -> PolicyInput {
    let model = |(model, &share)| live(share, 20 + (round * 13 + model as u64 * 29) % 90);
    PolicyInput {
        now: Timestamp::after_origin(INTERVAL * u32::try_from(round).unwrap_or(u32::MAX)),
        gpus: vec![GPU; GPUS],
        models: shares.iter().enumerate().map(model).collect(),
    }
}

fn decide(criterion: &mut Criterion) {
    let terms: Vec<ModelSpec> = (0..MODELS).map(terms).collect();
    let mut policy = Policy::new(Choice::of(PolicyName::Adaptive), &vec![SharedGpu::new(GPU); GPUS], &terms);
    let shares = policy.initial();
    let mut round = 0_u64;
    criterion.bench_function("decide/100 models on 10 GPUs", |bencher| {
        bencher.iter(|| {
            round += 1;
            black_box(policy.decide(&facts(round, &shares)))
        });
    });
}

criterion_group!(benches, decide);
criterion_main!(benches);
