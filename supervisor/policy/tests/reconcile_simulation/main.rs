//! A simulation of the reconciliation of one model, with commands at any time and faults at every step.
//!
//! `SHADOWSLICE_SIM_SEED=4711` runs only this seed and prints each step. `supervisor/policy/mutations/run`
//! shows that this test detects faults in the code.
#![allow(clippy::panic, clippy::print_stdout, reason = "a test, which fails and tells why")]

#[allow(dead_code, reason = "the other simulation draws more")]
#[path = "../workers_simulation/random.rs"]
mod random;
mod world;

use std::collections::BTreeMap;

use world::simulate;

/// The number of seeds of a run.
const SEEDS: u64 = 50_000;

/// The situations that must occur in a run. Otherwise the rules about them are not tested.
const SITUATIONS: [&str; 19] = [
    "a change in place",
    "a change in place is taken back",
    "a command replaces an unanswered one",
    "a failed instance is replaced",
    "a failed successor is given up",
    "a hanging successor is given up for a later command",
    "a model moves",
    "a model moves back",
    "a model moves back as its supervisor has died",
    "a removed change ends its successor",
    "a share changes",
    "a start fails",
    "a successor fails after a move back",
    "a successor takes over",
    "a worker dies",
    "confirmed",
    "refused",
    "settings cannot be changed",
    "unloaded",
];

#[test]
fn every_command_is_answered_and_no_model_stops_serving_for_a_change() {
    if let Ok(seed) = std::env::var("SHADOWSLICE_SIM_SEED") {
        let seed = seed.parse().expect("SHADOWSLICE_SIM_SEED must be a number");
        simulate(seed, true).unwrap_or_else(|rule| panic!("seed {seed}: does not hold: {rule}"));
        return;
    }
    let mut tally = BTreeMap::<&str, u64>::new();
    for seed in 0..SEEDS {
        let seen = simulate(seed, false).unwrap_or_else(|rule| {
            panic!("seed {seed}: does not hold: {rule}\nreplay it with SHADOWSLICE_SIM_SEED={seed}")
        });
        seen.into_iter().for_each(|situation| *tally.entry(situation).or_default() += 1);
    }
    let missing: Vec<_> = SITUATIONS.iter().filter(|&&situation| !tally.contains_key(situation)).collect();
    assert!(missing.is_empty(), "never happened: {missing:?}");
}
