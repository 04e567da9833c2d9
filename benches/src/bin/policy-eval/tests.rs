use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use shadowslice_simulator::results::{ModelRun, Run};

use crate::compare::{behind, best_layout, in_time, ratios, weighted};
use crate::evidence::{Evidence, moves_at_rest};
use crate::mixes::{Known, Mix, drawn, seven};
use crate::simulate::{Ask, BASE, JUDGED, Mechanism, OPEN, Trial};

fn model(priority: u32, offered: u64, part: f64) -> ModelRun {
    ModelRun {
        priority,
        slo_ms: 20.0,
        offered_rps: offered as f64,
        goodput_rps: offered as f64 * part,
        attainment: part,
        mean_ms: 5.0,
        p50_ms: 5.0,
        p99_ms: 9.0,
        offered,
        answered: offered,
        refused: 0,
        pending: 0,
        repartitions: 0,
        repartitioned_at_s: Vec::new(),
        sms: 132,
    }
}

/// A model of the first priority and a model of the second that keep these parts.
fn run(policy: &str, first: f64, second: f64) -> Run {
    let per_model = [("a", model(1, 100, first)), ("b", model(2, 300, second))];
    Run {
        policy: policy.to_owned(),
        load: "poisson".to_owned(),
        seed: 1,
        offered_rps: 400.0,
        goodput_rps: 100.0 * first + 300.0 * second,
        attainment: (100.0 * first + 300.0 * second) / 400.0,
        p99_ms: 9.0,
        bound_rps: 400.0,
        repartitions: 0,
        per_model: BTreeMap::from(per_model.map(|(name, run)| (name.to_owned(), run))),
    }
}

fn known(count: usize) -> Vec<Known> {
    let profile = |index| Known {
        name: format!("p{index}"),
        profile: PathBuf::from(format!("p{index}.yaml")),
        one_ms: 2.0,
    };
    (0..count).map(profile).collect()
}

fn mix(seed: u64) -> Mix {
    drawn(&known(2), seed)
}

fn trial(judged: Run) -> Trial {
    Trial { mix: mix(1), runs: vec![run(BASE, 1.0, 1.0), run(OPEN, 1.0, 1.0), judged] }
}

/// The judged policy beside fixed layouts that keep these parts of the requests of each model.
fn beside(seed: u64, judged: (f64, f64), layouts: &[(&str, f64, f64)]) -> Trial {
    let mut runs = vec![run(BASE, 0.9, 0.9), run(JUDGED, judged.0, judged.1)];
    runs.extend(layouts.iter().map(|&(name, first, second)| run(name, first, second)));
    Trial { mix: mix(seed), runs }
}

#[test]
fn harm_is_what_is_lost_or_refused_or_slower_where_nothing_was_to_be_helped() {
    let harmed = |judged: Run| !Evidence::of(vec![trial(judged)]).harmed().is_empty();
    let slower = |ms: f64| {
        let mut run = run(JUDGED, 1.0, 1.0);
        run.per_model.values_mut().for_each(|model| model.p50_ms = ms);
        run
    };
    let mut refuses = run(JUDGED, 1.0, 1.0);
    refuses.per_model.values_mut().for_each(|model| model.refused = 1);
    assert!(!harmed(run(JUDGED, 1.0, 0.997)) && harmed(run(JUDGED, 1.0, 0.995)));
    assert!(!harmed(slower(6.0)) && harmed(slower(6.1)));
    assert!(harmed(refuses));
    let hard = Trial { mix: mix(1), runs: vec![run(BASE, 0.9, 1.0), run(JUDGED, 0.1, 0.1)] };
    assert!(Evidence::of(vec![hard]).harmed().is_empty(), "there was something to help");
}

#[test]
fn what_is_in_time_is_a_mean_over_mixes() {
    let trials = [trial(run(JUDGED, 0.5, 1.0)), trial(run(JUDGED, 1.0, 0.5))];
    let kept = in_time(&trials, JUDGED).unwrap();
    assert!((kept.all - (0.875 + 0.625) / 2.0).abs() < 1e-9 && (kept.first - 0.75).abs() < 1e-9);
    assert!((kept.weighted - (0.6 + 0.9) / 2.0).abs() < 1e-9);
    assert!((kept.behind - 0.4).abs() < 1e-9, "in the first mix");
    assert_eq!(in_time(&trials, "half+admission"), None);
}

#[test]
fn the_best_layout_keeps_most_in_time_weighted_whatever_other_policies_do() {
    let layouts = [("layout:halves", 1.0, 0.4), (OPEN, 1.0, 0.3), ("layout:thirds", 0.8, 0.9)];
    let trial = beside(1, (1.0, 0.5), &[&layouts[..], &[("half+admission", 1.0, 1.0)]].concat());
    assert_eq!(best_layout(&trial).unwrap().policy, "layout:halves");
    assert!((weighted(best_layout(&trial).unwrap()) - 4.4 / 5.0).abs() < 1e-9);
    let open = beside(1, (1.0, 0.5), &[("layout:halves", 1.0, 0.8), (OPEN, 1.0, 0.9)]);
    assert_eq!(best_layout(&open).unwrap().policy, OPEN);
    assert!(best_layout(&beside(1, (1.0, 1.0), &[("half+admission", 1.0, 1.0)])).is_none());
}

#[test]
fn the_worst_mixes_behind_the_best_layout_come_first() {
    let trials = [
        beside(1, (1.0, 0.9), &[("layout:halves", 1.0, 0.94)]),
        beside(2, (1.0, 0.8), &[("layout:halves", 1.0, 0.9)]),
        beside(3, (0.8, 0.9), &[("layout:halves", 0.9, 0.9)]),
        beside(4, (1.0, 0.5), &[("layout:halves", 0.8, 0.9)]),
    ];
    let seeds: Vec<u64> = behind(&trials).iter().map(|behind| behind.trial.mix.seed).collect();
    assert_eq!(seeds, [3, 2], "less than a point is not behind");
    let ratios = ratios(&trials[2..]).unwrap();
    assert!((ratios.best_layout - (0.82 / 0.9 + 0.9 / 0.82) / 2.0).abs() < 1e-9);
    assert!((ratios.bound - (350.0 / 400.0 + 250.0 / 400.0) / 2.0).abs() < 1e-9);
}

#[test]
fn moves_count_once_the_load_has_not_changed_for_long() {
    let mut moved = run(JUDGED, 1.0, 1.0);
    let times = vec![5.0, 29.0, 31.0, 60.0];
    moved.per_model.values_mut().take(1).for_each(|model| model.repartitioned_at_s = times.clone());
    let trials = [trial(moved), trial(run(JUDGED, 1.0, 1.0))];
    assert_eq!(moves_at_rest(&trials, 90.0), [2.0, 0.0]);
}

#[test]
fn a_seed_always_draws_the_same_mix_and_another_one_another() {
    let mix = mix(7);
    assert_eq!(mix, drawn(&known(2), 7));
    let text = |seed: u64| drawn(&known(2), seed).text(Mechanism::Shadow);
    assert!((8..40).all(|seed| text(seed) != text(7)));
    let text = mix.text(Mechanism::Shadow);
    assert_eq!(text.matches("name: ").count(), text.matches("handover: shadow").count());
}

#[test]
fn seven_models_have_three_priorities_and_meet_every_load_at_every_utilisation() {
    let mixes: Vec<Mix> = (0..12).map(|turn| seven(&known(9), turn as u64, turn)).collect();
    for mix in &mixes {
        let text = mix.text(Mechanism::InProcess);
        let of = |priority: u32| text.matches(&format!("priority: {priority}")).count();
        assert_eq!([1, 2, 3].map(of), [2, 3, 2]);
        assert!((0..9).all(|index| text.matches(&format!("name: p{index}-")).count() <= 1), "{text}");
    }
    let mut cases: Vec<String> =
        mixes.iter().map(|mix| format!("{} {}", mix.load, mix.utilisation)).collect();
    cases.sort();
    cases.dedup();
    assert_eq!(cases.len(), 12);
}

#[test]
fn the_command_line_says_all_that_is_simulated() {
    let mix = mix(3).under("flash");
    let ask = Ask { config: Path::new("m.yaml"), seconds: 20, mix: &mix };
    assert_eq!(
        ask.arguments(&["adaptive", "half"]).join(" "),
        format!(
            "m.yaml --load flash --seconds 20 --utilisation {} --seed 3 --truth form,scale,noise,starts \
             --no-interference --json --policy adaptive half",
            mix.utilisation
        )
    );
}
