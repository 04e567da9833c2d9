use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use shadowslice_simulator::results::{ModelRun, SimulationRun};

use super::compare::{best_layout, gaps, in_time, ratios, weighted};
use super::evidence::{Evidence, moves_at_rest};
use super::mixes::{MeasuredProfile, RandomMix, drawn, seven};
use super::simulate::{BASE, EVALUATED, MixRuns, OPEN, ShareMechanism, SimulateCall};

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
        sleep: None,
        pauses: None,
    }
}

/// Returns a run of two models with the priorities 1 and 2. `first` and `second` are their
/// fractions of requests in time.
fn run(policy: &str, first: f64, second: f64) -> SimulationRun {
    let per_model = [("a", model(1, 100, first)), ("b", model(2, 300, second))];
    SimulationRun {
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

fn known(count: usize) -> Vec<MeasuredProfile> {
    let profile = |index| MeasuredProfile {
        name: format!("p{index}"),
        profile: PathBuf::from(format!("p{index}.yaml")),
        one_ms: 2.0,
    };
    (0..count).map(profile).collect()
}

fn mix(seed: u64) -> RandomMix {
    drawn(&known(2), seed)
}

fn trial(evaluated: SimulationRun) -> MixRuns {
    MixRuns { mix: mix(1), runs: vec![run(BASE, 1.0, 1.0), run(OPEN, 1.0, 1.0), evaluated] }
}

/// Returns the runs of a mix under the evaluated policy and under fixed layouts. The numbers are
/// the fractions of requests in time of the two models.
fn against_layouts(seed: u64, evaluated: (f64, f64), layouts: &[(&str, f64, f64)]) -> MixRuns {
    let mut runs = vec![run(BASE, 0.9, 0.9), run(EVALUATED, evaluated.0, evaluated.1)];
    runs.extend(layouts.iter().map(|&(name, first, second)| run(name, first, second)));
    MixRuns { mix: mix(seed), runs }
}

#[test]
fn harm_is_a_loss_a_refusal_or_a_longer_median_in_an_easy_mix() {
    let harmed = |evaluated: SimulationRun| !Evidence::of(vec![trial(evaluated)]).harmed().is_empty();
    let slower = |ms: f64| {
        let mut run = run(EVALUATED, 1.0, 1.0);
        run.per_model.values_mut().for_each(|model| model.p50_ms = ms);
        run
    };
    let mut refuses = run(EVALUATED, 1.0, 1.0);
    refuses.per_model.values_mut().for_each(|model| model.refused = 1);
    assert!(!harmed(run(EVALUATED, 1.0, 0.997)) && harmed(run(EVALUATED, 1.0, 0.995)));
    assert!(!harmed(slower(6.0)) && harmed(slower(6.1)));
    assert!(harmed(refuses));
    let hard = MixRuns { mix: mix(1), runs: vec![run(BASE, 0.9, 1.0), run(EVALUATED, 0.1, 0.1)] };
    assert!(Evidence::of(vec![hard]).harmed().is_empty(), "the mix is hard");
}

#[test]
fn fractions_in_time_are_means_over_mixes() {
    let trials = [trial(run(EVALUATED, 0.5, 1.0)), trial(run(EVALUATED, 1.0, 0.5))];
    let kept = in_time(&trials, EVALUATED).unwrap();
    assert!((kept.all - (0.875 + 0.625) / 2.0).abs() < 1e-9 && (kept.first - 0.75).abs() < 1e-9);
    assert!((kept.weighted - (0.6 + 0.9) / 2.0).abs() < 1e-9);
    assert!((kept.largest_gap - 0.4).abs() < 1e-9, "in the first mix");
    assert_eq!(in_time(&trials, "half+admission"), None);
}

#[test]
fn the_best_layout_is_chosen_by_weighted_fraction_among_layouts_only() {
    let layouts = [("layout:halves", 1.0, 0.4), (OPEN, 1.0, 0.3), ("layout:thirds", 0.8, 0.9)];
    let trial = against_layouts(1, (1.0, 0.5), &[&layouts[..], &[("half+admission", 1.0, 1.0)]].concat());
    assert_eq!(best_layout(&trial).unwrap().policy, "layout:halves");
    assert!((weighted(best_layout(&trial).unwrap()) - 4.4 / 5.0).abs() < 1e-9);
    let open = against_layouts(1, (1.0, 0.5), &[("layout:halves", 1.0, 0.8), (OPEN, 1.0, 0.9)]);
    assert_eq!(best_layout(&open).unwrap().policy, OPEN);
    assert!(best_layout(&against_layouts(1, (1.0, 1.0), &[("half+admission", 1.0, 1.0)])).is_none());
}

#[test]
fn the_largest_gaps_come_first() {
    let trials = [
        against_layouts(1, (1.0, 0.9), &[("layout:halves", 1.0, 0.94)]),
        against_layouts(2, (1.0, 0.8), &[("layout:halves", 1.0, 0.9)]),
        against_layouts(3, (0.8, 0.9), &[("layout:halves", 0.9, 0.9)]),
        against_layouts(4, (1.0, 0.5), &[("layout:halves", 0.8, 0.9)]),
    ];
    let seeds: Vec<u64> = gaps(&trials).iter().map(|gap| gap.trial.mix.seed).collect();
    assert_eq!(seeds, [3, 2], "gaps below a point do not count");
    let ratios = ratios(&trials[2..]).unwrap();
    assert!((ratios.best_layout - (0.82 / 0.9 + 0.9 / 0.82) / 2.0).abs() < 1e-9);
    assert!((ratios.bound - (350.0 / 400.0 + 250.0 / 400.0) / 2.0).abs() < 1e-9);
}

#[test]
fn share_changes_count_from_30_s_on() {
    let mut moved = run(EVALUATED, 1.0, 1.0);
    let times = vec![5.0, 29.0, 31.0, 60.0];
    moved.per_model.values_mut().take(1).for_each(|model| model.repartitioned_at_s = times.clone());
    let trials = [trial(moved), trial(run(EVALUATED, 1.0, 1.0))];
    assert_eq!(moves_at_rest(&trials, 90.0), [2.0, 0.0]);
}

#[test]
fn a_seed_always_draws_the_same_mix_and_other_seeds_draw_others() {
    let mix = mix(7);
    assert_eq!(mix, drawn(&known(2), 7));
    let text = |seed: u64| drawn(&known(2), seed).text(ShareMechanism::Shadow);
    assert!((8..40).all(|seed| text(seed) != text(7)));
    let text = mix.text(ShareMechanism::Shadow);
    assert_eq!(text.matches("name: ").count(), text.matches("handover: shadow").count());
}

#[test]
fn seven_models_have_three_priorities_and_every_load_at_every_utilisation() {
    let mixes: Vec<RandomMix> = (0..12).map(|turn| seven(&known(9), turn as u64, turn)).collect();
    for mix in &mixes {
        let text = mix.text(ShareMechanism::InProcess);
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
fn the_command_line_has_all_settings_of_a_simulation() {
    let mix = mix(3).under("flash");
    let call = SimulateCall { config: Path::new("m.yaml"), seconds: 20, mix: &mix };
    assert_eq!(
        call.arguments(&["adaptive", "half"]).join(" "),
        format!(
            "m.yaml --load flash --seconds 20 --utilisation {} --seed 3 --truth form,scale,noise,starts \
             --no-interference --json --policy adaptive half",
            mix.utilisation
        )
    );
}
