use std::time::Duration;

use shadowslice_shared::profile::{Execution, ExecutionRow};

use super::*;

const GIB: u64 = 1 << 30;

fn gpu(host: usize) -> GpuCapacity {
    GpuCapacity { host, sms: Sms(132), memory: 80 * GIB, taken: Share::NOTHING }
}

fn share(sms: u32) -> Share {
    Share { sms: Sms(sms), memory: 4 * GIB, shadow: GIB, bandwidth: 0.1 }
}

fn model(copies: u32, sms: u32) -> ModelCopies {
    ModelCopies { copies, each: share(sms), priority: 1, on: Vec::new() }
}

fn few(gpus: &[GpuCapacity], models: &[ModelCopies]) -> Placement {
    place(gpus, models, Objective::FewGpus)
}

/// A random number generator (xorshift64*).
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % end
    }
}

/// Returns a random problem: up to four GPUs on up to three hosts, and models with at most six copies
/// in total.
fn mix(seed: u64) -> (Vec<GpuCapacity>, Vec<ModelCopies>) {
    let mut draws = Draws(seed);
    let gpus: Vec<GpuCapacity> = (0..1 + draws.below(4))
        .map(|_| GpuCapacity {
            host: draws.below(3) as usize,
            sms: Sms([132, 132, 78][draws.below(3) as usize]),
            memory: [80, 40][draws.below(2) as usize] * GIB,
            taken: if draws.below(3) == 0 { share(24) } else { Share::NOTHING },
        })
        .collect();
    let (mut models, mut copies) = (Vec::new(), 0);
    while copies < 5 {
        let wanted = 1 + u32::from(draws.below(3) == 0);
        copies += wanted;
        let each = Share {
            sms: Sms(8 * (1 + draws.below(12) as u32)),
            memory: (1 + draws.below(30)) * GIB,
            shadow: draws.below(8) * GIB,
            bandwidth: draws.below(6) as f64 / 10.0,
        };
        let on: Vec<usize> = (0..gpus.len()).filter(|_| draws.below(4) == 0).take(wanted as usize).collect();
        models.push(ModelCopies { copies: wanted, each, priority: 1 + draws.below(2) as u32, on });
    }
    (gpus, models)
}

/// Returns the cost of a placement, computed from the definition of [`Cost`]. Returns `None` if the
/// placement exceeds a resource.
fn cost_of(
    gpus: &[GpuCapacity],
    models: &[ModelCopies],
    placed: &[Vec<usize>],
    objective: Objective,
) -> Option<Cost> {
    let (most, mut load_spread) = (gpus.iter().map(|gpu| gpu.sms.0).max().unwrap_or(0), 0);
    for (index, gpu) in gpus.iter().enumerate() {
        let placed = models.iter().zip(placed).filter(|(_, on)| on.contains(&index));
        let here = || placed.clone().map(|(model, _)| model.each).chain([gpu.taken]);
        let sms: u32 = here().map(|each| each.sms.0).sum();
        let memory: u64 = here().map(|each| each.memory).sum();
        let shadow = here().map(|each| each.shadow).max().unwrap_or(0);
        let bandwidth: f64 = here().map(|each| each.bandwidth).sum();
        if sms > gpu.sms.0 || memory + shadow > gpu.memory || bandwidth > 1.0 + 1e-6 {
            return None;
        }
        load_spread += u64::from(most - gpu.sms.0 + sms).pow(2);
    }
    let mut levels: Vec<(u32, u32)> =
        models.iter().flat_map(|model| (0..model.copies).map(|number| (number, model.priority))).collect();
    levels.sort_unstable();
    levels.dedup();
    let mut cost = Cost { missing: vec![0; levels.len()], ..Cost::default() };
    for (model, on) in models.iter().zip(placed) {
        let have = on.len() as u32;
        for number in have..model.copies {
            let level = (number, model.priority);
            cost.missing[levels.iter().position(|each| *each == level).unwrap()] += 1;
        }
        for (nth, &here) in on.iter().enumerate() {
            if on[..nth].iter().any(|&other| gpus[other].host == gpus[here].host) {
                return None;
            }
            cost.moves += u32::from(!model.on.is_empty() && !model.on.contains(&here));
        }
    }
    match objective {
        Objective::FewGpus => {
            cost.gpus = (0..gpus.len()).filter(|gpu| placed.iter().any(|on| on.contains(gpu))).count() as u32;
        }
        Objective::FewMoves => cost.load_spread = load_spread,
    }
    Some(cost)
}

/// Returns the lowest cost of all possible placements.
fn exhaustive(gpus: &[GpuCapacity], models: &[ModelCopies], objective: Objective) -> Cost {
    let copies: Vec<usize> =
        models.iter().enumerate().flat_map(|(index, model)| (0..model.copies).map(move |_| index)).collect();
    let choices = gpus.len() + 1;
    let all = choices.pow(copies.len() as u32);
    let costs = (0..all).filter_map(|mut number| {
        let mut placed = vec![Vec::new(); models.len()];
        for &model in &copies {
            let chosen = number % choices;
            number /= choices;
            if chosen < gpus.len() {
                placed[model].push(chosen);
            }
        }
        cost_of(gpus, models, &placed, objective)
    });
    costs.min().unwrap()
}

#[test]
fn no_placement_costs_less_on_drawn_mixes() {
    let mut short = 0;
    for (seed, objective) in
        (1..=40).flat_map(|seed| [(seed, Objective::FewGpus), (seed, Objective::FewMoves)])
    {
        let (gpus, models) = mix(seed * 7919);
        let placement = place(&gpus, &models, objective);
        assert!(placement.is_best, "seed {seed}");
        let cost = cost_of(&gpus, &models, &placement.models, objective);
        assert_eq!(
            cost.as_ref(),
            Some(&placement.cost),
            "seed {seed}: the placement exceeds nothing and has its stated cost"
        );
        assert_eq!(placement.cost, exhaustive(&gpus, &models, objective), "seed {seed}");
        assert_eq!(placement, place(&gpus, &models, objective), "seed {seed}: the result is the same");
        short += placement.missing.len();
    }
    assert!(short > 5, "some mixes do not fit: {short}");
}

#[test]
fn a_hundred_models_on_sixteen_gpus_exceed_nothing_within_the_bound() {
    let gpus: Vec<GpuCapacity> = (0..16).map(|index| gpu(index / 2)).collect();
    let mut draws = Draws(11);
    let models: Vec<ModelCopies> =
        (0..100).map(|_| model(1 + u32::from(draws.below(4) == 0), 8 + 8 * draws.below(3) as u32)).collect();
    for objective in [Objective::FewGpus, Objective::FewMoves] {
        let placement = place(&gpus, &models, objective);
        assert_eq!(cost_of(&gpus, &models, &placement.models, objective), Some(placement.cost));
        assert_eq!(placement.missing, []);
    }
}

#[test]
fn copies_lie_on_hosts_of_their_own_and_models_stay_where_they_are() {
    let gpus = [gpu(0), gpu(0), gpu(1)];
    let two = few(&gpus, &[model(2, 40)]);
    assert_eq!(two.models, [[0, 2]]);
    assert_eq!(two.cost.moves, 0);
    assert_eq!(few(&gpus, &[model(3, 40)]).missing[0].shortage, Shortage::Host);
    let stays = ModelCopies { on: vec![1, 2], ..model(2, 40) };
    assert_eq!(few(&gpus, &[stays, model(1, 40)]).models, [vec![1, 2], vec![1]]);
}

#[test]
fn without_room_for_all_the_model_of_higher_priority_has_its_first_copy_before_others() {
    let low = ModelCopies { priority: 2, on: vec![0], ..model(1, 100) };
    let high = model(2, 100);
    let placement = few(&[gpu(0), gpu(1)], &[low, high]);
    assert_eq!(placement.models, [vec![0], vec![1]], "a second copy comes after first ones");
    let missing =
        MissingCopies { model: 1, copies: 1, shortage: Shortage::Sms { free: Sms(32), needed: Sms(100) } };
    assert_eq!(placement.missing, [missing]);
    let only = few(&[gpu(0)], &[ModelCopies { priority: 2, ..model(1, 100) }, model(1, 100)]);
    assert_eq!(only.models, [vec![], vec![0]]);
}

#[test]
fn a_missing_copy_has_its_reason() {
    let shortage = |gpus: &[GpuCapacity], each: Share, beside: Share| {
        let models =
            [ModelCopies { each: beside, ..model(1, 8) }, ModelCopies { priority: 2, each, ..model(1, 8) }];
        few(gpus, &models).missing.first().map(|missing| missing.shortage)
    };
    let large = Share { memory: 70 * GIB, shadow: 12 * GIB, ..share(8) };
    let needed = 82 * GIB;
    assert_eq!(shortage(&[gpu(0)], large, share(8)), Some(Shortage::Memory { free: 76 * GIB, needed }));
    let greedy = Share { bandwidth: 0.95, ..share(8) };
    assert_eq!(shortage(&[gpu(0)], greedy, share(8)), Some(Shortage::Bandwidth));
    assert_eq!(shortage(&[gpu(0)], share(8), share(8)), None);
    let twice = few(&[gpu(0)], &[model(2, 8)]);
    assert_eq!(twice.missing[0].shortage, Shortage::Host);
    assert_eq!(few(&[], &[model(1, 8)]).missing[0].shortage, Shortage::Host);
}

#[test]
fn a_copy_needs_the_fewest_sms_that_keep_its_slo_at_its_rate() {
    let row = |batch, ms: [f64; 3]| ExecutionRow { batch, ms: ms.to_vec() };
    let rows = vec![row(1, [8.0, 4.0, 3.0]), row(8, [32.0, 12.0, 6.0])];
    let execution = Execution::new(vec![Sms(16), Sms(64), Sms(132)], rows).unwrap();
    let sm_requirement = |slo, rate| {
        sm_requirement(
            &execution,
            Sms(132),
            &CopyLoad { slo: Duration::from_millis(slo), rate, max_batch: 8 },
        )
    };
    let few = sm_requirement(16, 10.0).unwrap();
    assert_eq!((few.sms, few.batch), (Sms(16), 1), "two batches of 8 ms are just in time");
    assert!((few.busy - 0.08).abs() < 1e-9);
    let many = sm_requirement(24, 600.0).unwrap();
    assert_eq!((many.sms, many.batch), (Sms(64), 8));
    assert!(many.busy > 0.85 && many.busy <= 1.0);
    assert!(matches!(sm_requirement(5, 1.0), Err(UnmetLoad::Slo { two }) if two == Duration::from_millis(6)));
    assert!(
        matches!(sm_requirement(24, 1e6), Err(UnmetLoad::Rate { max }) if (1300.0..1340.0).contains(&max))
    );
}
