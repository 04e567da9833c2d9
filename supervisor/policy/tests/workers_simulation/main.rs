//! A simulation of a model's workers with delays, deaths, lost messages and workers that ignore orders.
//! The simulation runs many seeds, and checks every step against the rules in `rules/`.
//!
//! * `SHADOWSLICE_SIM_SEEDS=1000000` runs this number of seeds instead of [`SEEDS`].
//! * `SHADOWSLICE_SIM_SEED=4711` runs only this seed and prints each step. To see the steps, run
//!   `cargo test -p shadowslice-policy --test workers_simulation -- --nocapture`.
//!
//! `supervisor/policy/mutations/run` shows that this test detects faults in the code.
#![allow(clippy::panic, clippy::print_stdout, reason = "a test, which fails and tells why")]

mod driver;
mod fate;
mod ledger;
mod odds;
mod outside;
mod process;
mod random;
mod rules;
mod script;
mod world;

use std::collections::BTreeMap;
use std::num::NonZero;
use std::str::FromStr;
use std::thread;

use world::{SimulationFailure, simulate};

/// The number of seeds of a normal run.
const SEEDS: u64 = 100_000;

/// The situations that must occur in [`SEEDS`] runs. Otherwise the rules about them are not tested.
const SITUATIONS: [&str; 53] = [
    "a batch is to blame",
    "a change is given up as the model stops",
    "a hand-over as the worker can have no partition",
    "a hand-over at once",
    "a hand-over to a starting worker",
    "a model is given up",
    "a model that was given up restarts",
    "a model that was given up restarts by itself",
    "a model cannot sleep now",
    "a model sleeps without a worker",
    "a parked worker becomes the standby for a change",
    "a partition is released",
    "a shadow waits for memory",
    "a standby replaces a dead worker",
    "a starting standby is awaited",
    "a worker hangs while it prepares a partition",
    "a worker ignores its stop",
    "a worker survives its kill",
    "a worker starts too slowly",
    "aborted: boot failed",
    "aborted: died",
    "aborted: misbehaved",
    "aborted: spawn timed out",
    "aborted: warm timed out",
    "batches move",
    "completed at once",
    "completed by a shadow",
    "completed by a start of the model",
    "completed inside the worker",
    "down",
    "down at the end",
    "down: a fault in the model",
    "down: wrong answers",
    "no partition of that size",
    "no worker at that share",
    "refused: busy",
    "refused: held",
    "refused: in force",
    "refused: never",
    "refused: not serving",
    "refused: out of bounds",
    "refused: stopping",
    "refused: wrong answers",
    "requests are served elsewhere",
    "rolled back: died",
    "rolled back: misbehaved",
    "serves at the end",
    "silence",
    "the GPU takes no worker",
    "the device writes the reference answers",
    "the incumbent takes the traffic back",
    "the model can have no partitions",
    "three workers",
];

/// The number of runs in which each situation occurred.
type Tally = BTreeMap<&'static str, u64>;

/// Runs every `step`th seed from `first` to `seeds - 1`. Stops at the first failure.
fn run_some(first: u64, seeds: u64, step: usize) -> Result<Tally, (u64, SimulationFailure)> {
    let mut tally = Tally::new();
    for seed in (first..seeds).step_by(step) {
        for situation in simulate(seed, false).map_err(|failure| (seed, failure))? {
            *tally.entry(situation).or_default() += 1;
        }
    }
    Ok(tally)
}

/// Runs the seeds on all cores.
fn run_all(seeds: u64) -> Result<Tally, (u64, SimulationFailure)> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        let parts = (0..).take(threads).map(|first| scope.spawn(move || run_some(first, seeds, threads)));
        let parts: Vec<_> = parts.collect();
        let mut all = Tally::new();
        for part in parts {
            for (situation, count) in part.join().expect("a panic in a run is a failure too")? {
                *all.entry(situation).or_default() += count;
            }
        }
        Ok(all)
    })
}

/// Returns a number from the environment, if it is set.
fn setting<T: FromStr>(name: &str) -> Option<T> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

#[test]
fn the_workers_keep_their_rules_whatever_happens() {
    if let Some(seed) = setting("SHADOWSLICE_SIM_SEED") {
        let situations = simulate(seed, true).unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
        println!("{situations:#?}");
        return;
    }
    let seeds = setting("SHADOWSLICE_SIM_SEEDS").unwrap_or(SEEDS);
    let tally = run_all(seeds).unwrap_or_else(|(seed, failure)| {
        panic!("seed {seed}: {failure}\nreplay it with SHADOWSLICE_SIM_SEED={seed} and --nocapture")
    });
    for (situation, count) in &tally {
        println!("{count:>9}  {situation}");
    }
    if seeds >= SEEDS {
        let missing: Vec<_> =
            SITUATIONS.iter().filter(|&&situation| !tally.contains_key(situation)).collect();
        assert!(missing.is_empty(), "never happened: {missing:?}");
    }
}
