//! A trial: layouts are put in force one after the other, each for a slice of time, and the one that
//! misses the fewest requests stays.
//!
//! ```text
//! Switching ─ in force ─▶ Settling ─▶ Measuring ─ the slice is over ─▶ the next candidate: Switching
//!                                         │
//!                                         ├─ every model meets its objective ─▶ this layout stays
//!                                         └─ all were measured ─▶ the best and its rival once more;
//!                                            the better one stays
//! ```

use std::ops::RangeInclusive;
use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::super::layout::{Layout, Pattern};
use super::score::Score;

/// The bounds of the wait after a switch. Requests that waited under the former layout still end
/// then, and queues fill up. That takes twice the longest objective.
const SETTLING: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_millis(300);

/// The time for which a candidate is measured in each round. The shorter time suffices if
/// [`ENOUGH_REQUESTS`] ended.
const SLICE: RangeInclusive<Duration> = Duration::from_millis(400)..=Duration::from_secs(1);
/// The requests that must have ended for the shorter time of [`SLICE`].
const ENOUGH_REQUESTS: u64 = 60;

/// The most rounds. Only the best layout and its rival take part after the first.
const ROUNDS: usize = 2;

/// The time after which a candidate that is not in force is left out: its hand-overs fail or take
/// too long.
const IN_FORCE_TIMEOUT: Duration = Duration::from_secs(30);

/// A layout and its misses.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Candidate {
    pub(super) layout: Layout,
    pub(super) score: Score,
    rounds: usize,
    is_out: bool,
}

/// The phase of the present candidate.
#[derive(Debug, Clone, PartialEq)]
enum TrialPhase {
    Switching { since: Timestamp },
    Settling { since: Timestamp },
    Measuring { since: Timestamp, score: Score },
}

/// A trial of a GPU's layouts.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LayoutTrial {
    /// The model that violated its objective.
    pub(super) beneficiary: usize,
    pub(super) candidates: Vec<Candidate>,
    current: usize,
    round: usize,
    rounds: usize,
    phase: TrialPhase,
}

/// The time that a layout needs until it is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SwitchSpeed {
    /// Every share changes inside its worker.
    AtOnce,
    /// Some share changes by a shadow, which takes seconds. Each layout is then measured once.
    Slow,
}

/// The observation of a GPU's models in one interval.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TrialObservation {
    pub(super) now: Timestamp,
    /// True if every model has the part that it should have.
    pub(super) in_force: bool,
    /// The requests that ended in this interval.
    pub(super) misses: Score,
    /// True if every model has met its objective since the layout is in force.
    pub(super) all_keep: bool,
    /// The longest objective of the models.
    pub(super) longest_slo: Duration,
}

/// The progress of a trial after an observation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrialProgress {
    /// The same layout continues.
    Continues,
    /// The measurement begins; earlier observations don't count.
    MeasuringBegins,
    /// Another layout comes next.
    LayoutSwitches,
    /// Every model meets its objective under the present layout.
    Suffices,
    /// The present layout is the best.
    Ended,
}

impl TrialProgress {
    pub(super) fn is_over(self) -> bool {
        matches!(self, Self::Suffices | Self::Ended)
    }
}

impl Candidate {
    pub(super) fn new(layout: Layout, score: Score) -> Self {
        Self { layout, score, rounds: 0, is_out: false }
    }

    pub(super) fn measured(layout: Layout, score: Score) -> Self {
        Self { rounds: 1, ..Self::new(layout, score) }
    }
}

impl LayoutTrial {
    /// Creates a trial. `present` is in force; without a score it is measured first. Returns `None` if
    /// there is nothing to try beside it.
    pub(super) fn new(
        beneficiary: usize,
        present: Candidate,
        others: Vec<Layout>,
        speed: SwitchSpeed,
        now: Timestamp,
    ) -> Option<Self> {
        let rounds = if speed == SwitchSpeed::AtOnce { ROUNDS } else { 1 };
        let blank = present.score.blank();
        let (current, phase) = match present.rounds {
            0 => (0, TrialPhase::Settling { since: now }),
            _ => (1, TrialPhase::Switching { since: now }),
        };
        let others = others.into_iter().map(|layout| Candidate::new(layout, blank.clone()));
        let candidates: Vec<Candidate> = std::iter::once(present).chain(others).collect();
        let trial = Self { beneficiary, candidates, current, round: 0, rounds, phase };
        (trial.candidates.len() > 1).then_some(trial)
    }

    /// Returns the layout of the present candidate.
    pub(super) fn layout(&self) -> &Layout {
        &self.candidates[self.current].layout
    }

    /// Returns the misses under the present layout while it was measured.
    pub(super) fn score(&self) -> &Score {
        &self.candidates[self.current].score
    }

    pub(super) fn observe(&mut self, observation: &TrialObservation) -> TrialProgress {
        let now = observation.now;
        let settling = (2 * observation.longest_slo).clamp(*SETTLING.start(), *SETTLING.end());
        match &mut self.phase {
            TrialPhase::Switching { .. } if observation.in_force => {
                self.phase = TrialPhase::Settling { since: now };
                TrialProgress::Continues
            }
            TrialPhase::Switching { since } if now.since(*since) > IN_FORCE_TIMEOUT => {
                self.candidates[self.current].is_out = true;
                self.next(now)
            }
            TrialPhase::Settling { since } if now.since(*since) >= settling => {
                self.phase = TrialPhase::Measuring { since: now, score: observation.misses.blank() };
                TrialProgress::MeasuringBegins
            }
            TrialPhase::Switching { .. } | TrialPhase::Settling { .. } => TrialProgress::Continues,
            TrialPhase::Measuring { since, score } => {
                score.add_all(&observation.misses);
                let (age, score) = (now.since(*since), score.clone());
                self.measure(age, &score, observation)
            }
        }
    }

    fn measure(&mut self, age: Duration, score: &Score, observation: &TrialObservation) -> TrialProgress {
        let is_over = age >= *SLICE.start() && score.total().ended >= ENOUGH_REQUESTS || age >= *SLICE.end();
        let is_hopeless = age >= *SLICE.start() / 2 && score.is_certainly_worse(&self.best().score);
        if !is_over && !is_hopeless {
            return TrialProgress::Continues;
        }
        let candidate = &mut self.candidates[self.current];
        candidate.score.add_all(score);
        candidate.rounds += 1;
        if observation.all_keep && !is_hopeless {
            return TrialProgress::Suffices;
        }
        self.next(observation.now)
    }

    /// Returns the best candidate; of equal ones the first, which is the gentlest. A layout that
    /// confines the first priority must save requests of the first priority.
    fn best(&self) -> &Candidate {
        let measured = |confines: bool| {
            let fits = move |candidate: &&Candidate| {
                candidate.rounds > 0 && !candidate.is_out && candidate.layout.confines_first() == confines
            };
            let better = |one: &Candidate, other: &Candidate| other.score.compared(&one.score).is_lt();
            let all = self.candidates.iter().filter(fits);
            all.reduce(|best, other| if better(best, other) { other } else { best })
        };
        match (measured(false), measured(true)) {
            (Some(open), Some(confining)) if !confining.score.saves_first(&open.score) => open,
            (open, confining) => confining.or(open).unwrap_or(&self.candidates[0]),
        }
    }

    fn next(&mut self, now: Timestamp) -> TrialProgress {
        loop {
            let is_next = |candidate: &Candidate| !candidate.is_out && candidate.rounds <= self.round;
            if let Some(next) = self.candidates.iter().position(is_next) {
                return self.switch(next, now);
            }
            self.leave_out();
            let left = self.candidates.iter().filter(|candidate| !candidate.is_out).count();
            self.round += 1;
            if left <= 1 || self.round >= self.rounds {
                let best = self.best().layout.clone();
                let best = self.candidates.iter().position(|candidate| candidate.layout == best);
                self.switch(best.unwrap_or(0), now);
                return TrialProgress::Ended;
            }
        }
    }

    fn switch(&mut self, to: usize, now: Timestamp) -> TrialProgress {
        let stays = std::mem::replace(&mut self.current, to) == to;
        self.phase =
            if stays { TrialPhase::Settling { since: now } } else { TrialPhase::Switching { since: now } };
        TrialProgress::LayoutSwitches
    }

    /// Leaves out the candidates that are worse than the best one, and all but one of the others.
    fn leave_out(&mut self) {
        let best = self.best().layout.clone();
        let score = self.best().score.clone();
        let is_left = |at: &usize| {
            let candidate = &self.candidates[*at];
            !candidate.is_out && candidate.layout != best && !candidate.score.is_certainly_worse(&score)
        };
        let mut others: Vec<usize> = (0..self.candidates.len()).filter(is_left).collect();
        let loss = |at: usize| self.candidates[at].score.loss();
        others.sort_by(|&one, &other| loss(one).total_cmp(&loss(other)));
        others.truncate(1);
        for (at, candidate) in self.candidates.iter_mut().enumerate() {
            candidate.is_out |= candidate.layout != best && !others.contains(&at);
        }
    }

    /// Changes the indices of the models.
    pub(super) fn renumber(&mut self, now: impl Fn(usize) -> Option<usize> + Copy) {
        self.beneficiary = now(self.beneficiary).unwrap_or(self.beneficiary);
        for candidate in &mut self.candidates {
            candidate.layout = candidate.layout.renumbered(now);
        }
    }

    pub(super) fn tried(&self) -> Vec<(Pattern, Score)> {
        let tried = self.candidates.iter().filter(|candidate| candidate.rounds > 0);
        tried.map(|candidate| (candidate.layout.pattern, candidate.score.clone())).collect()
    }
}
