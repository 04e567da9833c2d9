//! All criteria on all loads.

use crate::criteria::{BesideIdeal, Case, Misled, Misses, Moves};
use crate::criteria::{
    JUDGED, LONG_SETTLED_S, SETTLED_S, beside_baseline, beside_ideal, by_objective, misled, misses,
};
use crate::evidence::Evidence;
use crate::simulate::{LOADS, STEADY, baselines};
use crate::statistics::Verdict;

/// Loads with changes that a policy has to follow.
const CHANGING: [&str; 3] = ["step", "flash", "anti"];

/// What was found.
#[derive(Debug)]
pub(crate) struct Judgement {
    pub(crate) ideal: Vec<BesideIdeal>,
    /// By load, then by baseline, then by part.
    pub(crate) baselines: Vec<Vec<Vec<Case>>>,
    pub(crate) misses: Vec<Misses>,
    /// By load, then by part.
    pub(crate) misled: Vec<Vec<Misled>>,
    /// Under each of [`STEADY`], in the short runs and in the long ones.
    pub(crate) steady: Vec<(&'static str, [Moves; 2])>,
    /// Under all loads, in the profiled world for a while, the other one, and the other one misled.
    pub(crate) moves: [Moves; 3],
}

impl Judgement {
    pub(crate) fn of(profiled: &Evidence, steady: &Evidence, told: &Evidence, wrong: &Evidence) -> Self {
        let names = baselines();
        let still = |load: &str| {
            let (short, long) = (profiled.of(load, JUDGED), steady.of(load, JUDGED));
            [Moves::of(short, SETTLED_S), Moves::of(long, LONG_SETTLED_S)]
        };
        let beside = |load: &str| names.iter().map(|name| beside_baseline(profiled, load, name)).collect();
        Self {
            ideal: LOADS.iter().map(|load| beside_ideal(profiled, load)).collect(),
            baselines: LOADS.iter().map(|load| beside(load)).collect(),
            misses: CHANGING.iter().map(|load| misses(profiled, load, &names)).collect(),
            misled: LOADS.iter().map(|load| misled(told, wrong, load)).collect(),
            steady: STEADY.map(|load| (load, still(load))).to_vec(),
            moves: [profiled, told, wrong].map(|evidence| Moves::of(evidence.all_of(JUDGED), SETTLED_S)),
        }
    }

    /// Each criterion in words, with its cases.
    pub(crate) fn criteria(&self) -> Vec<(&'static str, Vec<&Case>)> {
        let baselines = |doors: bool, by_priority: bool| {
            let cases = self.baselines.iter().flatten().flatten();
            let against =
                |case: &&Case| case.against.as_ref().is_some_and(|name| name.ends_with("+doors") == doors);
            cases.filter(against).filter(move |case| case.is_of_priority() == by_priority).collect()
        };
        let misled = |by_priority: bool| {
            let cases = self.misled.iter().flatten().map(|misled| &misled.case);
            cases.filter(|case| case.is_of_priority() == by_priority).collect()
        };
        vec![
            (
                "goodput at least 0.95 of the ideal's where it carries the load, 0.90 where not",
                self.ideal.iter().map(|ideal| &ideal.case).collect(),
            ),
            ("below no baseline, all in all", baselines(false, false)),
            ("the same in each priority", baselines(false, true)),
            ("below no baseline that has adaptive's own doors, all in all", baselines(true, false)),
            ("the same in each priority", baselines(true, true)),
            (
                "on step, flash, anti: beyond the ideal's misses at most half of the best baseline's, or 0.5 % of what is offered",
                self.misses.iter().map(|misses| &misses.case).collect(),
            ),
            ("at most 5 % worse when beliefs are wrong, all in all", misled(false)),
            ("the same in each priority", misled(true)),
        ]
    }

    /// In how many pairs of a load and a baseline adaptive is ahead by the lexicographic objective, alike, and behind.
    pub(crate) fn by_objective(&self) -> [usize; 3] {
        let ahead = |cases: &Vec<Case>| by_objective(cases).map(|(_, ahead)| ahead);
        let pairs = || self.baselines.iter().flatten().map(ahead);
        [Some(true), None, Some(false)].map(|wanted| pairs().filter(|&ahead| ahead == wanted).count())
    }

    /// Whether nothing moved under steady loads once settled: in the long runs but for the fast path, in the long runs at all, and in the short
    /// ones.
    pub(crate) fn stillness(&self) -> [bool; 3] {
        let (short, long) = (|moves: &[Moves; 2]| moves[0].settled, |moves: &[Moves; 2]| moves[1].settled);
        let slow = |moves: &[Moves; 2]| moves[1].settled - moves[1].pressed;
        let none = |count: fn(&[Moves; 2]) -> usize| self.steady.iter().all(|(_, moves)| count(moves) == 0);
        [none(slow), none(long), none(short)]
    }

    /// Whether no model ever moved twice in a dwell time.
    pub(crate) fn dwells(&self) -> bool {
        let steady = self.steady.iter().flat_map(|(_, moves)| moves);
        self.moves.iter().chain(steady).all(Moves::dwells)
    }
}

/// How many cases have each verdict: met, met?, not met?, not met.
pub(crate) fn count(cases: &[&Case]) -> [usize; 4] {
    [Verdict::Met, Verdict::MetPerhaps, Verdict::NotMetPerhaps, Verdict::NotMet]
        .map(|verdict| cases.iter().filter(|case| case.verdict() == verdict).count())
}

/// The case with the worst verdict; of those the one with the least left.
pub(crate) fn worst<'c>(cases: impl IntoIterator<Item = &'c Case>) -> Option<&'c Case> {
    let least = |a: &&Case, b: &&Case| a.margin.mean.total_cmp(&b.margin.mean);
    cases.into_iter().min_by(|a, b| a.verdict().cmp(&b.verdict()).then_with(|| least(a, b)))
}
