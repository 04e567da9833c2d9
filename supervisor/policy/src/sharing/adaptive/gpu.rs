//! One GPU: which layout is in force there, and why.

use std::time::Duration;

use shadowslice_shared::units::Moment;

use super::layout::Layout;
use super::score::Score;
use super::trial::{Candidate, Look, Pace, Progress, Trial};
use super::window::Rate;

/// Requests that cannot be in time are refused for so long after a model violated its objective.
const REFUSES: Duration = Duration::from_secs(2);

/// Refusing must have been tried for so long before a layout is.
pub(super) const ADMISSION_FIRST: Duration = Duration::from_millis(300);

/// How long no model must violate its objective before a layout is taken back: at first, and after
/// it was taken back too early.
const PATIENCE: Duration = Duration::from_secs(10);
const LONG_PATIENCE: Duration = Duration::from_secs(600);

/// A layout was taken back too early if a model violates its objective within this time.
const TOO_EARLY: Duration = Duration::from_secs(60);

/// The pause before another trial for a load that has not changed: at first, and at most. Each is
/// `COOLDOWN_FACTOR` times the one before.
const COOLDOWN: Duration = Duration::from_secs(4);
const COOLDOWN_FACTOR: u32 = 10;

/// Another trial for the same load takes that the loss has risen by so much since the last one.
const MUCH_WORSE: f64 = 0.1;

/// Loads for which a GPU remembers the best layout.
const MAX_REMEMBERED: usize = 16;

/// Two loads are alike if each model's requests per second differ by less than this part and by so
/// many standard deviations together.
const ALIKE: f64 = 0.2;
const DEVIATIONS: f64 = 2.0;

#[derive(Debug, Clone)]
pub(super) struct GpuState {
    pub(super) stage: Stage,
    refuses_since: Option<Moment>,
    refuses_until: Moment,
    calm_since: Moment,
    patience: Duration,
    cooldown: Duration,
    remembered: Vec<Remembered>,
}

#[derive(Debug, Clone)]
pub(super) enum Stage {
    /// Nothing is needed, or nothing was tried yet.
    AtRest,
    Trying(Trial),
    Settled(Settled),
    /// The layout was taken back after a calm time. It returns if that was too early.
    TakenBack {
        since: Moment,
        settled: Settled,
    },
}

/// A layout that stays in force: it won a trial, sufficed in one, or is remembered.
#[derive(Debug, Clone)]
pub(super) struct Settled {
    pub(super) layout: Layout,
    /// What was missed under it when it was chosen.
    score: Score,
    pub(super) trial: Trial,
    /// The trial ended early, because the layout sufficed.
    sufficed: bool,
    since: Moment,
    /// From then on another trial may begin.
    again: Moment,
}

#[derive(Debug, Clone)]
struct Remembered {
    /// Requests per second by model.
    load: Vec<(usize, f64)>,
    settled: Settled,
}

/// What a GPU shows in one interval.
#[derive(Debug, Clone)]
pub(super) struct GpuLook {
    pub(super) look: Look,
    /// The most important model that violates its objective and may be helped.
    pub(super) violating: Option<usize>,
    /// What all models missed since the windows were cleared.
    pub(super) recent: Score,
    /// By model.
    pub(super) rates: Vec<(usize, Rate)>,
    pub(super) pace: Pace,
}

/// What the caller does after a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Nothing,
    /// Conditions are other ones: what was seen of the models says nothing of them.
    Forget,
    /// Another layout is in force, under which loads may be other ones.
    Switched,
}

impl Default for GpuState {
    fn default() -> Self {
        Self {
            stage: Stage::AtRest,
            refuses_since: None,
            refuses_until: Moment::default(),
            calm_since: Moment::default(),
            patience: PATIENCE,
            cooldown: COOLDOWN,
            remembered: Vec::new(),
        }
    }
}

impl GpuState {
    pub(super) fn refuses(&self, now: Moment) -> bool {
        now < self.refuses_until
    }

    /// `None` for the shares that the models have at rest.
    pub(super) fn layout(&self) -> Option<&Layout> {
        match &self.stage {
            Stage::AtRest | Stage::TakenBack { .. } => None,
            Stage::Trying(trial) => Some(trial.layout()),
            Stage::Settled(settled) => Some(&settled.layout),
        }
    }

    /// Refuses late requests while a model violates its objective, and a while longer. Returns
    /// whether that begins now.
    pub(super) fn admit(&mut self, violating: bool, now: Moment) -> bool {
        let before = self.refuses(now);
        if violating {
            self.refuses_until = now + REFUSES;
        } else if !before {
            self.refuses_since = None;
        }
        let begins = violating && !before;
        if begins {
            self.refuses_since = Some(now);
        }
        begins
    }

    /// The load has changed: pauses that the former load made long are over.
    pub(super) fn load_changed(&mut self, now: Moment) {
        (self.patience, self.cooldown) = (PATIENCE, COOLDOWN);
        if let Stage::Settled(settled) = &mut self.stage {
            settled.again = now;
        }
    }

    /// `candidates` lists what is worth a try beside the layout in force.
    pub(super) fn tend(&mut self, seen: &GpuLook, candidates: impl FnOnce() -> Vec<Layout>) -> Outcome {
        let now = seen.look.now;
        if seen.violating.is_some() || matches!(self.stage, Stage::Trying(_)) {
            self.calm_since = now;
        }
        match std::mem::replace(&mut self.stage, Stage::AtRest) {
            Stage::AtRest => self.at_rest(seen, candidates),
            Stage::Trying(trial) => self.trying(trial, seen),
            Stage::Settled(settled) => self.settled(settled, seen, candidates),
            Stage::TakenBack { settled, .. } if seen.violating.is_some() => {
                self.patience = LONG_PATIENCE;
                self.stage = Stage::Settled(settled);
                Outcome::Switched
            }
            Stage::TakenBack { since, settled } => {
                if now.since(since) < TOO_EARLY {
                    self.stage = Stage::TakenBack { since, settled };
                } else {
                    self.patience = PATIENCE;
                }
                Outcome::Nothing
            }
        }
    }

    fn at_rest(&mut self, seen: &GpuLook, candidates: impl FnOnce() -> Vec<Layout>) -> Outcome {
        let now = seen.look.now;
        let admitted = self.refuses_since.is_some_and(|since| now.since(since) >= ADMISSION_FIRST);
        let Some(model) = seen.violating.filter(|_| admitted && seen.look.in_force) else {
            return Outcome::Nothing;
        };
        if let Some(known) = self.recall(&seen.rates) {
            self.stage = Stage::Settled(Settled { since: now, again: now + self.cooldown, ..known });
            return Outcome::Switched;
        }
        let present = Candidate::measured(Layout::AT_REST, seen.recent.clone());
        self.try_out(model, present, seen, candidates())
    }

    fn try_out(&mut self, model: usize, present: Candidate, seen: &GpuLook, others: Vec<Layout>) -> Outcome {
        let all = std::iter::once(Layout::AT_REST).chain(others);
        let others = all.filter(|other| !other.is_same(&present.layout)).collect();
        match Trial::new(model, present, others, seen.pace, seen.look.now) {
            Some(trial) => {
                self.stage = Stage::Trying(trial);
                Outcome::Switched
            }
            None => Outcome::Nothing,
        }
    }

    fn trying(&mut self, mut trial: Trial, seen: &GpuLook) -> Outcome {
        let progress = trial.look(&seen.look);
        match progress {
            Progress::Goes | Progress::Begins | Progress::Switches => self.stage = Stage::Trying(trial),
            Progress::Suffices | Progress::Ended => self.settle(trial, progress == Progress::Suffices, seen),
        }
        match progress {
            Progress::Goes | Progress::Suffices => Outcome::Nothing,
            Progress::Begins => Outcome::Forget,
            Progress::Switches | Progress::Ended => Outcome::Switched,
        }
    }

    fn settle(&mut self, trial: Trial, sufficed: bool, seen: &GpuLook) {
        let now = seen.look.now;
        let again = now + self.cooldown;
        self.cooldown = (self.cooldown * COOLDOWN_FACTOR).min(LONG_PATIENCE);
        let (layout, score) = (trial.layout().clone(), trial.score().clone());
        let settled = Settled { layout, score, trial, sufficed, since: now, again };
        self.remember(&settled, &seen.rates);
        self.stage = Stage::Settled(settled);
    }

    fn settled(
        &mut self,
        mut settled: Settled,
        seen: &GpuLook,
        candidates: impl FnOnce() -> Vec<Layout>,
    ) -> Outcome {
        let now = seen.look.now;
        let Some(model) = seen.violating else {
            if now.since(self.calm_since) < self.patience {
                self.stage = Stage::Settled(settled);
                return Outcome::Nothing;
            }
            self.calm_since = now;
            self.stage = Stage::TakenBack { since: now, settled };
            return Outcome::Switched;
        };
        if settled.sufficed && now.since(settled.since) < COOLDOWN {
            let progress = settled.trial.resume(&seen.recent, now);
            match progress {
                Progress::Ended => self.settle(settled.trial, false, seen),
                _ => self.stage = Stage::Trying(settled.trial),
            }
            return Outcome::Switched;
        }
        let worse = seen.recent.compared(&settled.score).is_gt()
            && seen.recent.loss() > settled.score.loss() + MUCH_WORSE;
        let due = now >= settled.again;
        // Under a layout that sufficed, a violation says that the load is another one.
        let again = if settled.sufficed { worse || due } else { worse && due };
        if !again {
            self.stage = Stage::Settled(settled);
            return Outcome::Nothing;
        }
        // What was missed of late was partly under the former load.
        let present = Candidate::new(settled.layout.clone(), seen.recent.blank());
        self.stage = Stage::Settled(settled);
        self.try_out(model, present, seen, candidates())
    }

    fn recall(&self, rates: &[(usize, Rate)]) -> Option<Settled> {
        let alike = |known: &&Remembered| {
            rates.len() == known.load.len()
                && rates.iter().all(|(model, rate)| {
                    let before = known.load.iter().find(|(other, _)| other == model);
                    before.is_some_and(|&(_, per_s)| {
                        (rate.per_s - per_s).abs() <= ALIKE * per_s + DEVIATIONS * rate.deviation
                    })
                })
        };
        self.remembered.iter().rev().find(alike).map(|known| known.settled.clone())
    }

    fn remember(&mut self, settled: &Settled, rates: &[(usize, Rate)]) {
        let load = rates.iter().map(|(model, rate)| (*model, rate.per_s)).collect();
        if self.remembered.len() == MAX_REMEMBERED {
            self.remembered.remove(0);
        }
        self.remembered.push(Remembered { load, settled: settled.clone() });
    }

    /// Returns the same state for models with other indices, as far as those are known.
    pub(super) fn renumbered(&self, now: impl Fn(usize) -> Option<usize> + Copy) -> Self {
        let mut gpu = self.clone();
        match &mut gpu.stage {
            Stage::AtRest => {}
            Stage::Trying(trial) => trial.renumber(now),
            Stage::Settled(settled) | Stage::TakenBack { settled, .. } => settled.renumber(now),
        }
        for known in &mut gpu.remembered {
            known.settled.renumber(now);
            known.load.iter_mut().for_each(|(model, _)| *model = now(*model).unwrap_or(*model));
        }
        gpu
    }
}

impl Settled {
    fn renumber(&mut self, now: impl Fn(usize) -> Option<usize> + Copy) {
        self.layout = self.layout.renumbered(now);
        self.trial.renumber(now);
    }
}
