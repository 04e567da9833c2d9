use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use shadowslice_simulator::results::{ModelRun, Run};

use crate::evidence::{Evidence, in_time, moves_at_rest};
use crate::mixes::{Known, drawn};
use crate::simulate::{Ask, BASE, JUDGED, Mechanism, Trial};

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
        repartitions: 0,
        per_model: BTreeMap::from(per_model.map(|(name, run)| (name.to_owned(), run))),
    }
}

fn trial(judged: Run) -> Trial {
    Trial { seed: 1, runs: vec![run(BASE, 1.0, 1.0), judged] }
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
    let hard = Trial { seed: 1, runs: vec![run(BASE, 0.9, 1.0), run(JUDGED, 0.1, 0.1)] };
    assert!(Evidence::of(vec![hard]).harmed().is_empty(), "there was something to help");
}

#[test]
fn what_is_in_time_is_a_mean_over_mixes() {
    let trials = [trial(run(JUDGED, 0.5, 1.0)), trial(run(JUDGED, 1.0, 0.5))];
    let kept = in_time(&trials, JUDGED).unwrap();
    assert!((kept.all - (0.875 + 0.625) / 2.0).abs() < 1e-9 && (kept.first - 0.75).abs() < 1e-9);
    assert_eq!(in_time(&trials, "half"), None);
}

#[test]
fn moves_count_once_the_load_has_not_changed_for_long() {
    let mut moved = run(JUDGED, 1.0, 1.0);
    let times = vec![5.0, 29.0, 31.0, 60.0];
    moved.per_model.values_mut().take(1).for_each(|model| model.repartitioned_at_s = times.clone());
    let trials = [trial(moved), trial(run(JUDGED, 1.0, 1.0))];
    assert_eq!(moves_at_rest(&trials, 90.0), (2.0, 1.0));
}

#[test]
fn a_seed_always_draws_the_same_mix_and_another_one_another() {
    let known =
        ["x", "y"].map(|name| Known { name: name.to_owned(), profile: PathBuf::from(name), one_ms: 2.0 });
    let mix = drawn(&known, 7);
    assert_eq!(mix, drawn(&known, 7));
    assert!((8..40).any(|seed| drawn(&known, seed) != mix));
    let fixed = mix.text(Mechanism::Shadow, &vec![50; mix.models()]);
    assert_eq!(fixed.matches("share: {initial: 50%}").count(), mix.models());
    assert_eq!(mix.text(Mechanism::InProcess, &[]).matches("handover: in-process").count(), mix.models());
}

#[test]
fn the_command_line_says_all_that_is_simulated() {
    let ask = Ask { config: Path::new("m.yaml"), load: "flash", utilisation: 0.5, seed: 3, seconds: 20 };
    assert_eq!(
        ask.arguments("noise", &["adaptive", "half"]).join(" "),
        "m.yaml --load flash --seconds 20 --utilisation 0.5 --seed 3 --truth noise --no-interference --json \
         --policy adaptive half"
    );
}
