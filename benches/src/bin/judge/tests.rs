//! Made-up runs, in which a figure that changes turns a verdict.

use std::collections::BTreeMap;

use shadowslice_simulator::results::{ModelRun, Run};

use crate::criteria::{Moves, beside_baseline, beside_ideal, by_objective, misled, misses};
use crate::evidence::{Evidence, Gap, Part};
use crate::judgement::Judgement;
use crate::mixes::{Known, drawn};
use crate::profiles::{NoMixes, known};
use crate::simulate::{STEADY, World};
use crate::statistics::{Estimate, Verdict};

/// A run in which 100 requests a second are offered to each of two priorities, and so many answered in time.
fn run(load: &str, policy: &str, seed: u64, ideal: f64, goodput: [f64; 2]) -> Run {
    let model = |(index, goodput_rps): (usize, f64)| {
        let model = ModelRun {
            priority: index as u32 + 1,
            slo_ms: 10.0,
            offered_rps: 100.0,
            goodput_rps,
            ideal_goodput_rps: ideal / 2.0,
            attainment: goodput_rps / 100.0,
            mean_ms: 1.0,
            p99_ms: 2.0,
            offered: 1000,
            answered: 1000,
            refused: 0,
            pending: 0,
            repartitions: 0,
            repartitioned_at_s: Vec::new(),
            pressed_at_s: Vec::new(),
            sms: 50,
        };
        (format!("model-{index}"), model)
    };
    let goodput_rps = goodput.iter().sum();
    Run {
        policy: policy.to_owned(),
        load: load.to_owned(),
        seed,
        offered_rps: 200.0,
        goodput_rps,
        ideal_goodput_rps: ideal,
        bound_goodput_rps: 200.0,
        attainment: goodput_rps / 200.0,
        p99_ms: 2.0,
        repartitions: 0,
        per_model: goodput.into_iter().enumerate().map(model).collect::<BTreeMap<_, _>>(),
    }
}

/// Three seeds under `step`: those of `adaptive`, then those of `static`.
fn two(ideal: f64, own: [[f64; 2]; 3], its: [[f64; 2]; 3]) -> Evidence {
    let runs = |policy, goodput: [[f64; 2]; 3]| {
        (0..).zip(goodput).map(move |(seed, goodput)| run("step", policy, seed, ideal, goodput))
    };
    let all = runs("adaptive", own).chain(runs("static", its)).collect();
    Evidence::new(all, &["step"], &["adaptive".to_owned(), "static".to_owned()]).unwrap()
}

fn alone(ideal: f64, own: [[f64; 2]; 3]) -> Evidence {
    two(ideal, own, own)
}

#[test]
fn an_interval_is_students() {
    // By hand: mean 5, deviation 2, of 4 values: 3.182 * 2 / 2.
    let known = Estimate::of([3.0, 7.0, 5.0 - 2f64.sqrt(), 5.0 + 2f64.sqrt()]);
    assert!((known.mean - 5.0).abs() < 1e-12 && (known.half - 3.182).abs() < 1e-9, "{known:?}");
    let twenty = Estimate::of((0..20).map(|index| f64::from(index % 2) * 2.0));
    assert!((twenty.half - 2.093 * (20.0 / 19.0_f64).sqrt() / 20_f64.sqrt()).abs() < 1e-12, "{twenty:?}");
    assert_eq!(Estimate::of([1.0, 1.0]).half, 0.0);
}

#[test]
fn a_verdict_says_whether_the_interval_crosses_the_limit() {
    let verdict = |mean, half| Verdict::of(Estimate { mean, half });
    assert_eq!(verdict(2.0, 1.0), Verdict::Met);
    assert_eq!(verdict(0.0, 0.0), Verdict::Met, "equal is not below");
    assert_eq!(verdict(1.0, 2.0), Verdict::MetPerhaps);
    assert_eq!(verdict(-1.0, 2.0), Verdict::NotMetPerhaps);
    assert_eq!(verdict(-2.0, 1.0), Verdict::NotMet);
}

#[test]
fn the_floor_is_lower_only_where_the_ideal_cannot_carry_the_load() {
    let verdict = |ideal, goodput| {
        beside_ideal(&alone(ideal, [[goodput / 2.0, goodput / 2.0]; 3]), "step").case.verdict()
    };
    assert_eq!(verdict(199.9, 0.951 * 199.9), Verdict::Met);
    assert_eq!(verdict(199.9, 0.949 * 199.9), Verdict::NotMet);
    assert_eq!(verdict(199.7, 0.949 * 199.7), Verdict::Met, "overload");
    assert_eq!(verdict(199.7, 0.899 * 199.7), Verdict::NotMet);
}

#[test]
fn each_run_has_its_own_floor() {
    let mixed = |goodput: f64| {
        let runs = [(1, 200.0), (2, 150.0)];
        let runs = runs.map(|(seed, ideal)| run("step", "adaptive", seed, ideal, [goodput * ideal / 2.0; 2]));
        let evidence = Evidence::new(runs.to_vec(), &["step"], &["adaptive".to_owned()]).unwrap();
        beside_ideal(&evidence, "step")
    };
    let found = mixed(0.95);
    assert_eq!(found.carried, 1);
    assert!((found.case.margin.mean - (0.0 + 0.05 * 0.75) / 2.0).abs() < 1e-12, "{found:?}");
    assert!((found.worst_ratio - 0.95).abs() < 1e-12);
    assert_eq!(found.below, []);
    assert_eq!(mixed(0.93).below, [(1, 0.93)], "a run that the ideal does not carry may have 0.90");
}

#[test]
fn a_baseline_ahead_in_one_priority_is_seen_there() {
    let cases = beside_baseline(
        &two(200.0, [[90.0, 95.0], [91.0, 95.0], [92.0, 95.0]], [[80.0, 96.0], [81.0, 96.0], [82.0, 96.0]]),
        "step",
        "static",
    );
    let found: Vec<_> = cases.iter().map(|case| (case.part, case.verdict())).collect();
    let expected =
        [(Part::All, Verdict::Met), (Part::Class(1), Verdict::Met), (Part::Class(2), Verdict::NotMet)];
    assert_eq!(found, expected);
    assert!((cases[0].margin.mean - 0.045).abs() < 1e-12, "of all that is offered");
    assert!((cases[1].margin.mean - 0.1).abs() < 1e-12, "of what is offered to that priority");
    assert_eq!(by_objective(&cases), Some((Part::Class(1), true)));
}

#[test]
fn a_baseline_ahead_of_the_ideal_too_is_told_apart() {
    let beyond = |ideal: f64, own: f64| {
        let evidence = two(ideal, [[90.0, own]; 3], [[90.0, 96.0]; 3]);
        beside_baseline(&evidence, "step", "static")[2].is_beyond_the_ideal()
    };
    assert!(beyond(190.0, 95.0));
    assert!(!beyond(190.0, 96.0), "not below");
    assert!(!beyond(192.0, 95.0), "the ideal is not below");
}

#[test]
fn differences_are_those_of_pairs() {
    // The seeds differ by far more than the policies do.
    let own = [[10.0, 50.0], [50.0, 50.0], [90.0, 50.0]];
    let one_less = own.map(|[first, second]| [first - 1.0, second]);
    let ahead = |own, its| beside_baseline(&two(200.0, own, its), "step", "static")[1].verdict();
    assert_eq!(ahead(own, one_less), Verdict::Met);
    assert_eq!(ahead(one_less, own), Verdict::NotMet);
    assert_eq!(ahead(own, own), Verdict::Met);
    let objective = |own, its| by_objective(&beside_baseline(&two(200.0, own, its), "step", "static"));
    assert_eq!(objective(own, own), None);
    assert_eq!(objective(one_less, own), Some((Part::Class(1), false)));
    let wavering = [[12.0, 50.0], [49.0, 50.0], [90.5, 50.0]];
    assert_eq!(ahead(own, wavering), Verdict::NotMetPerhaps);
    assert_eq!(ahead(wavering, own), Verdict::MetPerhaps);
}

#[test]
fn one_request_in_ten_thousand_is_no_difference() {
    let cases = |less: f64| {
        beside_baseline(&two(200.0, [[90.0 - less, 50.0]; 3], [[90.0, 50.0]; 3]), "step", "static")
    };
    let found = |less| (cases(less)[1].verdict(), by_objective(&cases(less)));
    assert_eq!(found(0.009), (Verdict::Met, None));
    assert_eq!(found(0.011), (Verdict::NotMet, Some((Part::Class(1), false))));
    assert_eq!(by_objective(&cases(-0.009)), None, "nor is one more");
}

#[test]
fn misses_are_held_against_half_of_the_best_or_a_half_percent() {
    let verdict = |own: f64, its: f64| {
        let evidence = two(200.0, [[100.0, 100.0 - own]; 3], [[100.0, 100.0 - its]; 3]);
        misses(&evidence, "step", &["static".to_owned()]).case.verdict()
    };
    assert_eq!(verdict(10.0, 20.0), Verdict::Met, "half of the best");
    assert_eq!(verdict(10.1, 20.0), Verdict::NotMet);
    assert_eq!(verdict(0.9, 1.0), Verdict::Met, "0.45 % of what is offered");
    assert_eq!(verdict(1.1, 1.0), Verdict::NotMet);
}

#[test]
fn what_the_ideal_misses_too_is_forgiven() {
    let evidence = two(150.0, [[100.0, 49.5]; 3], [[100.0, 10.0]; 3]);
    let found = misses(&evidence, "step", &["static".to_owned()]);
    assert!((found.own.mean - 0.0025).abs() < 1e-12, "{found:?}");
    assert_eq!(found.case.verdict(), Verdict::Met);
}

#[test]
fn wrong_beliefs_may_cost_five_percent_in_each_priority() {
    let verdicts = |told: [f64; 2], wrong: [f64; 2]| {
        let found = misled(&alone(200.0, [told; 3]), &alone(200.0, [wrong; 3]), "step");
        found.iter().map(|found| found.case.verdict()).collect::<Vec<_>>()
    };
    let (met, not) = (Verdict::Met, Verdict::NotMet);
    assert_eq!(verdicts([100.0, 80.0], [96.0, 77.0]), [met, met, met]);
    assert_eq!(verdicts([100.0, 80.0], [94.0, 80.0]), [met, not, met]);
    assert_eq!(verdicts([100.0, 80.0], [95.0, 70.0]), [not, met, not]);
    assert_eq!(verdicts([100.0, 0.0], [100.0, 0.0]), [met, met, met], "nothing of nothing is no loss");
}

fn moved(at: &[f64]) -> Moves {
    let mut run = run("poisson", "adaptive", 1, 200.0, [100.0; 2]);
    let model = run.per_model.get_mut("model-1").unwrap();
    model.repartitioned_at_s = at.to_vec();
    model.repartitions = at.len() as u64;
    Moves::of([&run], 15.0)
}

#[test]
fn moves_are_counted_once_settled_and_by_dwell_time() {
    assert_eq!((moved(&[]).settled, moved(&[]).dwells()), (0, true));
    assert_eq!(moved(&[2.0, 14.9]).settled, 0);
    assert_eq!(moved(&[2.0, 15.1]).settled, 1);
    assert!(moved(&[2.0, 7.0, 40.0]).dwells());
    assert!(!moved(&[2.0, 20.0, 24.9]).dwells());
}

#[test]
fn runs_without_their_pairs_are_not_judged() {
    let policies = ["adaptive".to_owned(), "static".to_owned()];
    let with = |seeds: &[u64]| {
        let own = [1, 2].map(|seed| run("step", "adaptive", seed, 200.0, [100.0; 2]));
        let its = seeds.iter().map(|&seed| run("step", "static", seed, 200.0, [100.0; 2]));
        Evidence::new(own.into_iter().chain(its).collect(), &["step"], &policies).map(|_| ())
    };
    assert_eq!(with(&[2, 1]), Ok(()));
    for unpaired in [&[1][..], &[1, 3], &[]] {
        assert!(matches!(with(unpaired), Err(Gap::Unpaired { policy, .. }) if policy == "static"));
    }
}

/// Everybody alike under every load, answering all but this.
fn everywhere(world: World, missed: f64, bend: impl Fn(&mut Run)) -> Evidence {
    let mut all = Vec::new();
    for load in world.loads() {
        for policy in world.policies() {
            all.extend([1, 2].map(|seed| run(load, &policy, seed, 200.0, [100.0, 100.0 - missed])));
        }
    }
    all.iter_mut().for_each(bend);
    Evidence::new(all, world.loads(), &world.policies()).unwrap()
}

fn verdicts(bend: impl Fn(&mut Run) + Copy) -> (Vec<Verdict>, [bool; 3], bool) {
    let judgement = Judgement::of(
        &everywhere(World::Profiled, 0.5, bend),
        &everywhere(World::Steady, 0.5, bend),
        &everywhere(World::Told, 0.5, |_| ()),
        &everywhere(World::Misled, 0.5, |_| ()),
    );
    let worst = |cases: Vec<&crate::criteria::Case>| cases.iter().map(|case| case.verdict()).min().unwrap();
    let verdicts = judgement.criteria().into_iter().map(|(_, cases)| worst(cases)).collect();
    (verdicts, judgement.stillness(), judgement.dwells())
}

#[test]
fn one_baseline_ahead_under_one_load_fails_the_whole_criterion() {
    let (met, not) = (Verdict::Met, Verdict::NotMet);
    assert_eq!(verdicts(|_| ()), (vec![met; 8], [true; 3], true));
    let ahead = |name: &'static str| {
        move |run: &mut Run| {
            if run.load == "zipf" && run.policy == name {
                run.per_model.get_mut("model-1").unwrap().goodput_rps += 0.2;
            }
        }
    };
    assert_eq!(verdicts(ahead("half")).0, [met, not, not, met, met, met, met, met]);
    assert_eq!(verdicts(ahead("half+doors")).0, [met, met, met, not, not, met, met, met]);
}

#[test]
fn one_move_under_one_steady_load_is_seen_and_whether_it_was_on_the_fast_path() {
    let moves = |load: &'static str, at: [f64; 2], pressed: &'static [f64]| {
        move |run: &mut Run| {
            if run.load == load && run.policy == "adaptive" {
                let model = run.per_model.get_mut("model-0").unwrap();
                (model.repartitioned_at_s, model.pressed_at_s) = (at.to_vec(), pressed.to_vec());
            }
        }
    };
    let met = vec![Verdict::Met; 8];
    let steady = |at: [f64; 2], pressed| verdicts(moves(STEADY[1], at, pressed));
    assert_eq!(steady([3.0, 14.0], &[]), (met.clone(), [true; 3], true));
    assert_eq!(steady([3.0, 30.0], &[]), (met.clone(), [true, true, false], true));
    assert_eq!(steady([3.0, 90.0], &[90.0]), (met.clone(), [true, false, false], true));
    assert_eq!(steady([3.0, 90.0], &[3.0]), (met.clone(), [false; 3], true));
    assert_eq!(verdicts(moves("surge", [3.0, 4.0], &[])), (met, [true; 3], false));
}

#[test]
fn the_objective_is_behind_where_the_first_priority_that_differs_is() {
    let counted = |bend: fn(&mut Run)| {
        let profiled = everywhere(World::Profiled, 0.5, bend);
        let [steady, told, wrong] =
            [World::Steady, World::Told, World::Misled].map(|world| everywhere(world, 0.5, |_| ()));
        Judgement::of(&profiled, &steady, &told, &wrong).by_objective()
    };
    let pairs = 9 * 12;
    let [ahead, alike, behind] = counted(|_| ());
    assert_eq!((ahead + alike, behind), (pairs, 0));
    let first = |run: &mut Run| {
        if run.load == "zipf" && run.policy == "half" {
            run.per_model.get_mut("model-0").unwrap().goodput_rps += 0.2;
        }
    };
    assert_eq!(counted(first)[2], 1);
}

#[test]
fn a_priority_is_judged_over_the_runs_that_have_it() {
    let without = |policy: &str, goodput: [f64; 2]| {
        let mut runs = [1, 2, 3].map(|seed| run("step", policy, seed, 200.0, goodput));
        runs[0].per_model.remove("model-1");
        runs
    };
    let (own, its) = (without("adaptive", [100.0, 60.0]), without("static", [100.0, 50.0]));
    let policies = ["adaptive".to_owned(), "static".to_owned()];
    let evidence = Evidence::new(own.into_iter().chain(its).collect(), &["step"], &policies).unwrap();
    let second = &beside_baseline(&evidence, "step", "static")[2];
    assert_eq!(second.part, Part::Class(2));
    assert!((second.margin.mean - 0.1).abs() < 1e-12 && second.margin.half < 1e-12, "{second:?}");
    let half = without("adaptive", [100.0, 30.0]);
    let wrong = Evidence::new(half.to_vec(), &["step"], &policies[..1]).unwrap();
    let second = &misled(&evidence, &wrong, "step")[2];
    assert!((second.case.margin.mean - (0.3 - 0.95 * 0.6)).abs() < 1e-12, "{second:?}");
    assert_eq!(
        Part::of(&without("adaptive", [1.0, 1.0])[..2]),
        [Part::All, Part::Class(1)],
        "one run is no interval"
    );
}

#[test]
fn a_seed_draws_a_mix_that_can_be_served() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("tall.yaml");
    let text = "{source: {kind: illustrative}, execution_ms: {sms: [132], 1: [3.0]}}";
    std::fs::write(&profile, text).unwrap();
    std::fs::write(folder.path().join("notes.txt"), "not a profile").unwrap();
    let tall = known(folder.path(), &folder.path().join("all")).unwrap();
    assert_eq!(
        tall,
        [Known { name: "tall".to_owned(), profile: profile.canonicalize().unwrap(), one_ms: 3.0 }]
    );
    std::fs::write(folder.path().join("zero.yaml"), "{source: {kind: illustrative}, execution_ms: {}}")
        .unwrap();
    let broken = known(folder.path(), &folder.path().join("all"));
    assert!(matches!(broken, Err(NoMixes::Broken { path }) if path.ends_with("zero.yaml")));
    let mixes: Vec<_> = (0..50).map(|seed| drawn(&tall, seed)).collect();
    assert_eq!(mixes[7], drawn(&tall, 7));
    let quick = [Known { one_ms: 0.01, ..tall[0].clone() }];
    assert!(drawn(&quick, 7).text.contains("latency: 4ms"), "no SLO is shorter");
    let mut sizes = Vec::new();
    for mix in &mixes {
        let path = folder.path().join("mix");
        std::fs::write(&path, &mix.text).unwrap();
        let config = shadowslice::config::load_here(&path).unwrap();
        assert!(
            config.models.iter().all(|model| (11..=120).contains(&model.slo.latency.as_millis())),
            "{}",
            mix.text
        );
        sizes.push(config.models.len());
    }
    assert_eq!((sizes.iter().min(), sizes.iter().max()), (Some(&2), Some(&8)));
}
