//! What `adaptive` must reach, and what is left to it, from runs alone.
//!
//! Every criterion becomes a margin for each seed, as a part of what was offered: what is left to the limit,
//! below zero where the criterion fails. The verdict is that on the mean margin and its interval.

use shadowslice_simulator::results::Run;

use crate::evidence::{Evidence, Part};
use crate::statistics::{Estimate, Verdict};

/// Who is judged.
pub(crate) const JUDGED: &str = "adaptive";

/// From this attainment of the ideal on, it can carry the load of that run.
const CARRIED: f64 = 0.999;

/// What must be reached of the ideal's goodput where it carries the load, and where not.
const FLOORS: [f64; 2] = [0.95, 0.90];

/// What may be missed of the best baseline's misses, and of what was offered, beyond what the ideal misses.
const MISSES: (f64, f64) = (0.5, 0.005);

/// What must be left of goodput when beliefs are wrong.
const MISLED: f64 = 0.95;

/// Who answers less in time than a baseline by at most this part of what was offered, one request in ten thousand, is alike.
pub(crate) const ALIKE: f64 = 1e-4;

/// From then on, in seconds, nothing moves under a steady load: in the short runs, and in the long ones, which trials and what is
/// remembered for a minute have come to their ends in.
pub(crate) const SETTLED_S: f64 = 15.0;
pub(crate) const LONG_SETTLED_S: f64 = 60.0;

/// The policy's dwell time, in seconds.
pub(crate) const DWELL_S: f64 = 5.0;

/// A case of a criterion.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Case {
    pub(crate) load: String,
    /// The baseline that it is about, if it is about one.
    pub(crate) against: Option<String>,
    pub(crate) part: Part,
    /// What is left to the limit, as a part of what was offered.
    pub(crate) margin: Estimate,
    /// What may be lacking all the same.
    pub(crate) allowed: f64,
    /// What would be left to the ideal, beside a baseline.
    pub(crate) ideal: Option<Estimate>,
}

impl Case {
    pub(crate) fn verdict(&self) -> Verdict {
        Verdict::of(Estimate { mean: self.margin.mean + self.allowed, ..self.margin })
    }

    /// Whether the criterion fails, and clearly would for the ideal, too, which has the same objective and knows what comes.
    pub(crate) fn is_beyond_the_ideal(&self) -> bool {
        let fails = matches!(self.verdict(), Verdict::NotMet | Verdict::NotMetPerhaps);
        fails && self.ideal.is_some_and(|ideal| Verdict::of(ideal) == Verdict::NotMet)
    }

    pub(crate) fn is_of_priority(&self) -> bool {
        self.part != Part::All
    }
}

/// Adaptive beside the ideal under a load.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BesideIdeal {
    pub(crate) case: Case,
    pub(crate) offered_rps: f64,
    /// What the ideal answers in time of what is offered.
    pub(crate) ideal_attainment: f64,
    /// In how many runs it carries the load.
    pub(crate) carried: usize,
    /// Adaptive's goodput over the ideal's.
    pub(crate) ratio: Estimate,
    pub(crate) worst_ratio: f64,
    /// The runs below their own floor: their seeds, and what they reach.
    pub(crate) below: Vec<(u64, f64)>,
}

/// Goodput of at least [`FLOORS`] of the ideal's, each run by its own floor.
pub(crate) fn beside_ideal(evidence: &Evidence, load: &str) -> BesideIdeal {
    let runs = evidence.of(load, JUDGED);
    let carried = |run: &Run| run.ideal_goodput_rps >= CARRIED * run.offered_rps;
    let floor = |run: &Run| if carried(run) { FLOORS[0] } else { FLOORS[1] };
    let margin = |run: &Run| (run.goodput_rps - floor(run) * run.ideal_goodput_rps) / Part::All.offered(run);
    let ratio = |run: &Run| run.goodput_rps / run.ideal_goodput_rps.max(1e-3);
    let mean = |figure: fn(&Run) -> f64| runs.iter().map(figure).sum::<f64>() / runs.len() as f64;
    BesideIdeal {
        case: case(load, None, Part::All, Estimate::of(runs.iter().map(margin))),
        offered_rps: mean(|run| run.offered_rps),
        ideal_attainment: mean(|run| run.ideal_goodput_rps / Part::All.offered(run)),
        carried: runs.iter().filter(|run| carried(run)).count(),
        ratio: Estimate::of(runs.iter().map(ratio)),
        worst_ratio: runs.iter().map(ratio).fold(f64::INFINITY, f64::min),
        below: runs.iter().filter(|run| margin(run) < 0.0).map(|run| (run.seed, ratio(run))).collect(),
    }
}

/// Goodput not below this baseline's by more than [`ALIKE`], all in all and in each priority: how far adaptive is ahead, and how far the
/// ideal is.
pub(crate) fn beside_baseline(evidence: &Evidence, load: &str, baseline: &str) -> Vec<Case> {
    let ours = evidence.of(load, JUDGED);
    let theirs = evidence.of(load, baseline);
    let ahead = |part: Part, goodput: fn(Part, &Run) -> f64| {
        let pairs = ours.iter().zip(theirs).filter(|(own, _)| part.is_in(own));
        Estimate::of(pairs.map(|(own, its)| (goodput(part, own) - part.goodput(its)) / part.offered(own)))
    };
    let judged = |part: Part| Case {
        allowed: ALIKE,
        ideal: Some(ahead(part, Part::ideal_goodput)),
        ..case(load, Some(baseline), part, ahead(part, Part::goodput))
    };
    Part::of(ours).into_iter().map(judged).collect()
}

/// The first priority in which adaptive clearly differs, and whether it is ahead there: what the
/// lexicographic objective looks at.
pub(crate) fn by_objective(cases: &[Case]) -> Option<(Part, bool)> {
    let differs = |case: &&Case| case.part != Part::All && case.margin.exceeds(ALIKE);
    cases.iter().find(differs).map(|case| (case.part, case.margin.mean > 0.0))
}

/// Misses under a load beyond those of the ideal, as parts of what is offered.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Misses {
    pub(crate) case: Case,
    pub(crate) own: Estimate,
    /// Those of the baseline that misses least.
    pub(crate) best: Estimate,
}

/// At most half of the best baseline's, or at most 0.5 % of what is offered.
pub(crate) fn misses(evidence: &Evidence, load: &str, baselines: &[String]) -> Misses {
    let beyond = |policy: &str| -> Vec<f64> {
        let beyond = |run: &Run| (run.ideal_goodput_rps - run.goodput_rps) / Part::All.offered(run);
        evidence.of(load, policy).iter().map(beyond).collect()
    };
    let own = beyond(JUDGED);
    let all = baselines.iter().map(|baseline| (baseline.as_str(), beyond(baseline)));
    let least = all.min_by(|a, b| a.1.iter().sum::<f64>().total_cmp(&b.1.iter().sum()));
    let (name, best) = least.unwrap_or((JUDGED, own.clone()));
    let half = Estimate::of(best.iter().zip(&own).map(|(best, own)| MISSES.0 * best - own));
    let near = Estimate::of(own.iter().map(|own| MISSES.1 - own));
    let margin = if half.mean > near.mean { half } else { near };
    Misses {
        case: case(load, Some(name), Part::All, margin),
        own: Estimate::of(own.iter().copied()),
        best: Estimate::of(best.iter().copied()),
    }
}

/// What wrong beliefs cost under a load.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Misled {
    pub(crate) case: Case,
    /// Goodput with wrong beliefs over that with right ones, of all seeds together; 1 if there is none.
    pub(crate) ratio: f64,
}

/// With wrong beliefs at least [`MISLED`] of the goodput with right ones, all in all and in each priority.
pub(crate) fn misled(told: &Evidence, misled: &Evidence, load: &str) -> Vec<Misled> {
    let (right, wrong) = (told.of(load, JUDGED), misled.of(load, JUDGED));
    let judged = |part: Part| {
        let pairs = right.iter().zip(wrong).filter(|(right, _)| part.is_in(right));
        let left =
            |(right, wrong)| (part.goodput(wrong) - MISLED * part.goodput(right)) / part.offered(right);
        let sum = |runs: &[Run]| runs.iter().map(|run| part.goodput(run)).sum::<f64>();
        let ratio = if sum(right) > 0.0 { sum(wrong) / sum(right) } else { 1.0 };
        Misled { case: case(load, None, part, Estimate::of(pairs.map(left))), ratio }
    };
    Part::of(right).into_iter().map(judged).collect()
}

/// What moved.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Moves {
    /// Hand-overs in all runs.
    pub(crate) all: u64,
    /// Those once settled.
    pub(crate) settled: usize,
    /// Those of them that came of pressure.
    pub(crate) pressed: usize,
    /// The least time from one of a model to its next that did not come of pressure, in seconds, if there was any.
    pub(crate) shortest_s: Option<f64>,
}

impl Moves {
    /// Of runs that are settled after so many seconds.
    pub(crate) fn of<'r>(runs: impl IntoIterator<Item = &'r Run>, settled_s: f64) -> Self {
        let mut moves = Self { all: 0, settled: 0, pressed: 0, shortest_s: None };
        for model in runs.into_iter().flat_map(|run| run.per_model.values()) {
            let at = &model.repartitioned_at_s;
            moves.all += model.repartitions;
            let settled = || at.iter().filter(|&&at| at > settled_s);
            moves.settled += settled().count();
            moves.pressed += settled().filter(|&at| model.pressed_at_s.contains(at)).count();
            let waited = at.windows(2).filter(|pair| !model.pressed_at_s.contains(&pair[1]));
            let gaps = waited.map(|pair| pair[1] - pair[0]);
            moves.shortest_s = gaps.chain(moves.shortest_s).reduce(f64::min);
        }
        moves
    }

    /// Never more than one a model in a dwell time.
    pub(crate) fn dwells(&self) -> bool {
        self.shortest_s.is_none_or(|gap| gap >= DWELL_S - 1e-6)
    }
}

fn case(load: &str, against: Option<&str>, part: Part, margin: Estimate) -> Case {
    Case {
        load: load.to_owned(),
        against: against.map(str::to_owned),
        part,
        margin,
        allowed: 0.0,
        ideal: None,
    }
}
