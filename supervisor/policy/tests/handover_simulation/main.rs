//! The hand-over machine in a world of delays, deaths, lost news and workers that ignore orders:
//! many seeded runs, each checked at every step against the invariants in `rules.rs`.
//!
//! * `SHADOWSLICE_SIM_SEEDS=1000000` runs so many seeds instead of [`SEEDS`].
//! * `SHADOWSLICE_SIM_SEED=4711` runs this one only, and tells what happens; show it with
//!   `cargo test -p shadowslice-policy --test handover_simulation -- --nocapture`.
//!
//! `supervisor/policy/mutations/run` shows that this test can fail.
#![allow(clippy::panic, clippy::print_stdout, reason = "a test, which fails and tells why")]

mod random;
mod rules;
mod script;
mod world;

use std::collections::BTreeMap;
use std::num::NonZero;
use std::str::FromStr;
use std::thread;

use world::{Ending, Failure, simulate};

/// Seeds that are run unless told otherwise.
const SEEDS: u64 = 100_000;

/// Endings that must all occur in [`SEEDS`] runs: a world that never gets there proves nothing.
const ENDINGS: [&str; 13] = [
    "Kept",
    "Kept, and the incumbent released",
    "Kept, and a worker given up",
    "RolledBack(Died)",
    "RolledBack(Misbehaved)",
    "RolledBack(Misbehaved), and a worker given up",
    "Aborted(BootFailed(\"scripted\"))",
    "Aborted(SpawnTimedOut)",
    "Aborted(WarmTimedOut)",
    "Aborted(Died)",
    "Aborted(Misbehaved)",
    "Aborted(Cancelled)",
    "Aborted(Cancelled), and a worker given up",
];

/// How often each ending occurred.
type Tally = BTreeMap<String, u64>;

fn describe(ending: &Ending) -> String {
    let given_up = if ending.given_up { ", and a worker given up" } else { "" };
    let released = if ending.released { ", and the incumbent released" } else { "" };
    format!("{:?}{given_up}{released}", ending.outcome)
}

/// Runs every `step`th seed from `first` below `seeds`, up to the first failure.
fn run_some(first: u64, seeds: u64, step: usize) -> Result<Tally, (u64, Failure)> {
    let mut tally = Tally::new();
    for seed in (first..seeds).step_by(step) {
        let ending = simulate(seed, false).map_err(|failure| (seed, failure))?;
        *tally.entry(describe(&ending)).or_default() += 1;
    }
    Ok(tally)
}

/// Runs the seeds on all cores.
fn run_all(seeds: u64) -> Result<Tally, (u64, Failure)> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        let parts = (0..).take(threads).map(|first| scope.spawn(move || run_some(first, seeds, threads)));
        let parts: Vec<_> = parts.collect();
        let mut all = Tally::new();
        for part in parts {
            for (ending, count) in part.join().expect("a panic in a run is a failure too")? {
                *all.entry(ending).or_default() += count;
            }
        }
        Ok(all)
    })
}

/// A number from the environment, if it is there.
fn setting<T: FromStr>(name: &str) -> Option<T> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

#[test]
fn the_hand_over_keeps_its_rules_whatever_happens() {
    if let Some(seed) = setting("SHADOWSLICE_SIM_SEED") {
        let ending = simulate(seed, true).unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
        println!("{}", describe(&ending));
        return;
    }
    let seeds = setting("SHADOWSLICE_SIM_SEEDS").unwrap_or(SEEDS);
    let tally = run_all(seeds).unwrap_or_else(|(seed, failure)| {
        panic!("seed {seed}: {failure}\nreplay it with SHADOWSLICE_SIM_SEED={seed} and --nocapture")
    });
    for (ending, count) in &tally {
        println!("{count:>9}  {ending}");
    }
    if seeds >= SEEDS {
        let missing: Vec<_> = ENDINGS.iter().filter(|&&ending| !tally.contains_key(ending)).collect();
        assert!(missing.is_empty(), "never happened: {missing:?}");
    }
}
