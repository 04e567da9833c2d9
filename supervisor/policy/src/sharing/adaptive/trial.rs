//! A trial of layouts. The trial puts each layout in force for a short time and measures its misses.
//! The layout with the fewest misses stays.
//!
//! ```text
//! Switching ─ in force ─▶ Settling ─▶ Measuring ─ measured for long enough ─▶ Switching to the next layout
//!                                         │
//!                                         ├─ every model meets its SLO ─▶ this layout stays
//!                                         └─ all layouts were measured ─▶ the best two are measured again;
//!                                            the better of the two stays
//! ```

use std::ops::RangeInclusive;
use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::super::layout::{Layout, Pattern};
use super::score::Score;

/// The minimum and maximum wait after a switch, before a layout is measured. In this time, the requests
/// that waited under the former layout are answered, and queues reach their usual length. The wait is
/// twice the longest SLO, within these bounds.
const SETTLING: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_millis(300);

/// The minimum and maximum time for which a layout is measured in each round. The minimum is enough if
/// [`ENOUGH_REQUESTS`] requests have ended.
const SLICE: RangeInclusive<Duration> = Duration::from_millis(400)..=Duration::from_secs(1);
/// The number of ended requests from which the minimum time of [`SLICE`] is enough.
const ENOUGH_REQUESTS: u64 = 60;

/// The maximum number of rounds. After the first round, only the best layout and one rival are measured
/// again.
const ROUNDS: usize = 2;

/// The time after which the trial excludes a layout that has not come into force, because its
/// hand-overs fail or take too long.
const IN_FORCE_TIMEOUT: Duration = Duration::from_secs(30);

/// A layout in a trial, and its misses.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Candidate {
    pub(super) layout: Layout,
    pub(super) score: Score,
    rounds: usize,
    is_out: bool,
}

/// The phase of the trial for the current layout.
#[derive(Debug, Clone, PartialEq)]
enum TrialPhase {
    Switching { since: Timestamp },
    Settling { since: Timestamp },
    Measuring { since: Timestamp, score: Score },
}

/// A trial of layouts on one GPU.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LayoutTrial {
    /// The index of the model that violated its SLO.
    pub(super) beneficiary: usize,
    pub(super) candidates: Vec<Candidate>,
    current: usize,
    round: usize,
    rounds: usize,
    phase: TrialPhase,
}

/// The speed at which a layout can come into force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SwitchSpeed {
    /// All shares change inside their workers, immediately.
    AtOnce,
    /// One or more shares change by a shadow, which takes seconds. Each layout is then measured only
    /// once.
    Slow,
}

/// The observation of a GPU's models in one interval.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TrialObservation {
    pub(super) now: Timestamp,
    /// True if every model has the share that the current layout gives it.
    pub(super) in_force: bool,
    /// The requests that ended in this interval, and the number of them that missed their SLO.
    pub(super) misses: Score,
    /// True if every model probably meets its SLO, judged by the misses since the layout came into
    /// force.
    pub(super) all_keep: bool,
    /// The longest SLO of the models.
    pub(super) longest_slo: Duration,
}

/// The progress of a trial after an observation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrialProgress {
    /// The trial continues with the same layout.
    Continues,
    /// The measurement of a layout starts. Earlier observations do not count.
    MeasuringBegins,
    /// The trial switches to another layout.
    LayoutSwitches,
    /// Every model meets its SLO under the current layout, so the trial ends early.
    Suffices,
    /// The trial has ended, and the current layout is the best one.
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
    /// Creates a trial. The layout of `present` is in force. If it has no score, it is measured first.
    /// Returns `None` if no other layout can be tried.
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

    /// Returns the layout that is being tried.
    pub(super) fn layout(&self) -> &Layout {
        &self.candidates[self.current].layout
    }

    /// Returns the misses that were measured under the current layout.
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

    /// Returns the best candidate. Among equally good candidates, this is the first candidate, which
    /// restricts models least. A layout that restricts the models with the highest priority must reduce
    /// the misses of these models.
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

    /// Excludes all candidates except the best one and its closest rival. Also excludes the rival if it
    /// is certainly worse than the best candidate.
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

    /// Replaces the indices of the models.
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
