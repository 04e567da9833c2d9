//! One GPU: which layout is in force there, and why.
//!
//! ```text
//! AtRest ── a model violates its objective, refusing does not suffice ──▶ Trying ── the best ──▶ Settled
//!   ▲ └──────── the same, and the best layout for this load is known ───────────────────────────▶ │ │
//!   └────────────────────────── no violation for a pause ───────────────────────────────────────────┘ │
//!                                 Trying ◀── much more is missed than then, or the load is another ───┘
//! ```

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::super::layout::Layout;
use super::score::Score;
use super::trial::{Candidate, Look, Pace, Progress, Trial};
use super::window::Rate;

/// For how long late requests are refused after a model violated its objective.
const REFUSES: Duration = Duration::from_secs(2);

/// For how long refusing must have been tried before a layout is.
pub(super) const ADMISSION_FIRST: Duration = Duration::from_millis(300);

/// The pause before another trial for the same load, and before a layout that no model needs is
/// taken back: at first, and at most. Each is [`LENGTHENS`] times the one before.
const PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
const LENGTHENS: u32 = 10;

/// By how much the loss must have risen since the last trial for another one, and how large it must
/// be for a trial by shadows.
pub(super) const MUCH_WORSE: f64 = 0.05;

/// The number of loads for which a GPU remembers the best layout.
const MAX_REMEMBERED: usize = 16;

#[derive(Debug, Clone)]
pub(super) struct GpuState {
    pub(super) stage: Stage,
    refuses_since: Option<Timestamp>,
    refuses_until: Timestamp,
    remembered: Vec<Settled>,
}

#[derive(Debug, Clone)]
pub(super) enum Stage {
    /// No layout is needed, or none was tried yet.
    AtRest,
    Trying {
        trial: Trial,
        /// When the trial began.
        load: Load,
        /// The last pause under this load.
        pause: Duration,
    },
    Settled(Settled),
}

/// Requests per second, by model.
pub(super) type Load = Vec<(usize, Rate)>;

/// A layout that stays in force: it won a trial, sufficed in one, or is remembered.
#[derive(Debug, Clone)]
pub(super) struct Settled {
    pub(super) layout: Layout,
    /// What was missed under it when it was chosen.
    score: Score,
    pub(super) trial: Trial,
    /// The trial ended early, because no model violated its objective any more.
    sufficed: bool,
    /// The load for which it was chosen.
    load: Load,
    /// The load under this layout once it has been in force for long: clients that wait for each
    /// response send at another pace under another layout.
    usual: Option<Load>,
    /// How long it stays whatever happens.
    pause: Duration,
    again: Timestamp,
    /// When a model violated its objective last.
    violated: Timestamp,
}

/// What a GPU shows in one interval.
#[derive(Debug, Clone)]
pub(super) struct GpuLook {
    pub(super) look: Look,
    /// The most important model that violates its objective and may be helped.
    pub(super) violating: Option<usize>,
    /// What all models missed since the windows were cleared.
    pub(super) recent: Score,
    /// What they missed in the last second.
    pub(super) last: Score,
    /// Over a short time.
    pub(super) load: Load,
    /// Over a long time; `None` if the windows were cleared within it.
    pub(super) usual: Option<Load>,
    pub(super) pace: Pace,
}

/// What the caller does after a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Nothing,
    /// Another layout is in force, or is measured from now on: what was seen of the models says
    /// nothing of it.
    Forget,
}

impl Default for GpuState {
    fn default() -> Self {
        Self {
            stage: Stage::AtRest,
            refuses_since: None,
            refuses_until: Timestamp::default(),
            remembered: Vec::new(),
        }
    }
}

impl GpuState {
    pub(super) fn refuses(&self, now: Timestamp) -> bool {
        now < self.refuses_until
    }

    /// Returns `None` for the shares that the models have at rest.
    pub(super) fn layout(&self) -> Option<&Layout> {
        match &self.stage {
            Stage::AtRest => None,
            Stage::Trying { trial, .. } => Some(trial.layout()),
            Stage::Settled(settled) => Some(&settled.layout),
        }
    }

    /// Refuses late requests while a model violates its objective, and a while longer. Returns
    /// whether that begins now.
    pub(super) fn admit(&mut self, violating: bool, now: Timestamp) -> bool {
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

    /// Returns whether refusing late requests had its time to help. The models' windows were cleared
    /// when it began, so nothing is known of a load that is newer.
    fn refuses_for_long(&self, now: Timestamp) -> bool {
        self.refuses_since.is_some_and(|since| now.since(since) >= ADMISSION_FIRST)
    }

    /// `candidates` lists what is worth a try beside the layout in force.
    pub(super) fn tend(&mut self, seen: &GpuLook, candidates: impl FnOnce() -> Vec<Layout>) -> Outcome {
        match std::mem::replace(&mut self.stage, Stage::AtRest) {
            Stage::AtRest => self.at_rest(seen, candidates),
            Stage::Trying { trial, load, pause } => self.trying(trial, load, pause, seen),
            Stage::Settled(settled) => self.settled(settled, seen, candidates),
        }
    }

    fn at_rest(&mut self, seen: &GpuLook, candidates: impl FnOnce() -> Vec<Layout>) -> Outcome {
        let now = seen.look.now;
        let Some(model) = seen.violating.filter(|_| self.refuses_for_long(now) && seen.look.in_force) else {
            return Outcome::Nothing;
        };
        let present = Candidate::measured(Layout::AT_REST, seen.recent.clone());
        self.change(model, present, Duration::ZERO, seen, candidates)
    }

    /// Brings back the best layout for this load if it is known, and another one than the present.
    /// Otherwise begins a trial.
    fn change(
        &mut self,
        model: usize,
        present: Candidate,
        pause: Duration,
        seen: &GpuLook,
        candidates: impl FnOnce() -> Vec<Layout>,
    ) -> Outcome {
        let now = seen.look.now;
        let known = self.remembered.iter().find(|known| are_alike(&known.load, &seen.load));
        if let Some(known) = known.filter(|known| !known.layout.is_same(&present.layout)).cloned() {
            self.settle(Settled { pause: longer(known.pause), ..known }, now);
            return Outcome::Forget;
        }
        let all = std::iter::once(Layout::AT_REST).chain(candidates());
        let others = all.filter(|other| !other.is_same(&present.layout)).collect();
        let Some(trial) = Trial::new(model, present, others, seen.pace, now) else { return Outcome::Nothing };
        self.stage = Stage::Trying { trial, load: seen.load.clone(), pause };
        Outcome::Forget
    }

    fn trying(&mut self, mut trial: Trial, load: Load, pause: Duration, seen: &GpuLook) -> Outcome {
        let progress = trial.look(&seen.look);
        if progress.is_over() {
            let (layout, score) = (trial.layout().clone(), trial.score().clone());
            let (sufficed, now) = (progress == Progress::Suffices, seen.look.now);
            let (pause, usual) = (longer(pause), None);
            let (again, violated) = (now, now);
            self.settle(Settled { layout, score, trial, sufficed, load, usual, pause, again, violated }, now);
        } else {
            self.stage = Stage::Trying { trial, load, pause };
        }
        match progress {
            Progress::Goes | Progress::Suffices => Outcome::Nothing,
            Progress::Begins | Progress::Switches | Progress::Ended => Outcome::Forget,
        }
    }

    fn settle(&mut self, settled: Settled, now: Timestamp) {
        let settled = Settled { again: now + settled.pause, violated: now, usual: None, ..settled };
        self.remembered.retain(|known| !are_alike(&known.load, &settled.load));
        if self.remembered.len() == MAX_REMEMBERED {
            self.remembered.remove(0);
        }
        self.remembered.push(settled.clone());
        self.stage = Stage::Settled(settled);
    }

    fn settled(
        &mut self,
        mut settled: Settled,
        seen: &GpuLook,
        candidates: impl FnOnce() -> Vec<Layout>,
    ) -> Outcome {
        let now = seen.look.now;
        if let Some(load) = &seen.usual
            && !are_alike(settled.usual.get_or_insert_with(|| load.clone()), load)
        {
            (settled.pause, settled.again) = (Duration::ZERO, now);
            settled.usual = Some(load.clone());
        }
        let Some(model) = seen.violating else {
            let stays = now < settled.again.max(settled.violated + PAUSE);
            self.stage = if stays { Stage::Settled(settled) } else { Stage::AtRest };
            return if stays { Outcome::Nothing } else { Outcome::Forget };
        };
        settled.violated = now;
        let is_worse = |score: &Score| {
            score.compared(&settled.score).is_gt() && score.loss() > settled.score.loss() + MUCH_WORSE
        };
        let worse = is_worse(&seen.recent) || is_worse(&seen.last);
        let due = now >= settled.again || !are_alike(&settled.load, &seen.load);
        // Under a layout that sufficed, a violation says that the load is another one.
        let again = if settled.sufficed { worse || due } else { worse && due };
        let again = again && self.refuses_for_long(now);
        // What was missed of late was partly under the former load.
        let present = Candidate::new(settled.layout.clone(), seen.recent.blank());
        let pause = settled.pause;
        self.stage = Stage::Settled(settled);
        if again { self.change(model, present, pause, seen, candidates) } else { Outcome::Nothing }
    }

    /// Returns the same state for models with other indices, as far as those are known.
    pub(super) fn renumbered(&self, now: impl Fn(usize) -> Option<usize> + Copy) -> Self {
        let mut gpu = self.clone();
        match &mut gpu.stage {
            Stage::AtRest => {}
            Stage::Trying { trial, load, .. } => {
                trial.renumber(now);
                renumber(load, now);
            }
            Stage::Settled(settled) => settled.renumber(now),
        }
        gpu.remembered.iter_mut().for_each(|known| known.renumber(now));
        gpu
    }
}

impl Settled {
    fn renumber(&mut self, now: impl Fn(usize) -> Option<usize> + Copy) {
        self.layout = self.layout.renumbered(now);
        self.trial.renumber(now);
        renumber(&mut self.load, now);
        self.usual.iter_mut().for_each(|load| renumber(load, now));
    }
}

fn renumber(load: &mut Load, now: impl Fn(usize) -> Option<usize>) {
    load.iter_mut().for_each(|(model, _)| *model = now(*model).unwrap_or(*model));
}

/// Returns whether two loads are of the same models, and each one's rates are alike.
fn are_alike(load: &Load, other: &Load) -> bool {
    let is_like =
        |(model, rate): &(usize, Rate)| other.iter().any(|(of, other)| of == model && rate.is_like(*other));
    load.len() == other.len() && load.iter().all(is_like)
}

/// Returns the pause after one of this length under the same load.
fn longer(pause: Duration) -> Duration {
    (pause * LENGTHENS).clamp(PAUSE, LONGEST_PAUSE)
}
