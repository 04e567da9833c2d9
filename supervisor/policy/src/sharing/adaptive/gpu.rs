//! The state of one GPU: the layout in force, and how it was chosen.
//!
//! ```text
//! AtRest ── a model violates its objective, refusing is not enough ──▶ Trying ── the best ──▶ Chosen
//!   ▲ └───── the same, and the best layout for this load is known ──────────────────────────▶ │ │
//!   └──────────────────────── no violation during a pause ────────────────────────────────────┘ │
//!                          Trying ◀── many more requests miss, or the load has changed ──────────┘
//! ```

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::super::layout::Layout;
use super::score::Score;
use super::trial::{Candidate, LayoutTrial, SwitchSpeed, TrialObservation, TrialProgress};
use super::window::ArrivalRate;

/// The time for which late requests are refused after a model violated its objective.
const REFUSAL_TIME: Duration = Duration::from_secs(2);

/// The time for which late requests must have been refused before a layout is tried.
pub(super) const MIN_REFUSAL_TIME: Duration = Duration::from_millis(300);

/// The pause before another trial for the same load, and before an unneeded layout is taken back:
/// at first, and at most. Each pause is [`PAUSE_FACTOR`] times the one before.
const MIN_PAUSE: Duration = Duration::from_secs(10);
const MAX_PAUSE: Duration = Duration::from_secs(600);
const PAUSE_FACTOR: u32 = 10;

/// The increase of the loss since the last trial that justifies another one, and the loss that
/// justifies a trial by shadows.
pub(super) const MUCH_WORSE: f64 = 0.05;

/// The number of loads for which a GPU remembers the best layout.
const MAX_REMEMBERED: usize = 16;

/// The state of one GPU.
#[derive(Debug, Clone)]
pub(super) struct GpuState {
    pub(super) stage: GpuStage,
    refuses_since: Option<Timestamp>,
    refuses_until: Timestamp,
    remembered: Vec<ChosenLayout>,
}

/// The stage of a GPU's layout.
#[derive(Debug, Clone)]
pub(super) enum GpuStage {
    /// No layout is needed, or none was tried yet.
    AtRest,
    /// A trial is under way.
    Trying {
        /// The trial.
        trial: LayoutTrial,
        /// The request rates when the trial began.
        rates: RequestRates,
        /// The last pause under this load.
        pause: Duration,
    },
    /// A layout is in force.
    Chosen(ChosenLayout),
}

/// The requests per second of each model, by index.
pub(super) type RequestRates = Vec<(usize, ArrivalRate)>;

/// A layout that stays in force: it won a trial, sufficed in one, or is remembered.
#[derive(Debug, Clone)]
pub(super) struct ChosenLayout {
    pub(super) layout: Layout,
    /// The misses under the layout when it was chosen.
    score: Score,
    pub(super) trial: LayoutTrial,
    /// True if the trial ended early, because all models met their objectives.
    sufficed: bool,
    /// The load for which the layout was chosen.
    rates: RequestRates,
    /// The load under this layout after it was in force for long. Clients that wait for each
    /// response send at another rate under another layout.
    usual_rates: Option<RequestRates>,
    /// The least time for which the layout stays.
    pause: Duration,
    retry_at: Timestamp,
    /// The time at which a model last violated its objective.
    last_violation: Timestamp,
}

/// The observation of a GPU in one interval.
#[derive(Debug, Clone)]
pub(super) struct GpuObservation {
    pub(super) trial: TrialObservation,
    /// The most important model that violates its objective and can be helped.
    pub(super) violating: Option<usize>,
    /// The misses of all models since the windows were cleared.
    pub(super) recent: Score,
    /// The misses of the last second.
    pub(super) last: Score,
    /// The request rates over a short time.
    pub(super) rates: RequestRates,
    /// The request rates over a long time; `None` if the windows were cleared within it.
    pub(super) usual_rates: Option<RequestRates>,
    pub(super) speed: SwitchSpeed,
}

/// The effect of an update on the models' windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WindowUpdate {
    /// The windows stay.
    Keep,
    /// The windows are cleared: another layout is in force, or is measured from now on.
    Clear,
}

impl Default for GpuState {
    fn default() -> Self {
        Self {
            stage: GpuStage::AtRest,
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

    /// Returns the layout; `None` if the models have their shares at rest.
    pub(super) fn layout(&self) -> Option<&Layout> {
        match &self.stage {
            GpuStage::AtRest => None,
            GpuStage::Trying { trial, .. } => Some(trial.layout()),
            GpuStage::Chosen(chosen) => Some(&chosen.layout),
        }
    }

    /// Refuses late requests while a model violates its objective, and for a while after. Returns
    /// true if refusing begins now.
    pub(super) fn admit(&mut self, violating: bool, now: Timestamp) -> bool {
        let before = self.refuses(now);
        if violating {
            self.refuses_until = now + REFUSAL_TIME;
        } else if !before {
            self.refuses_since = None;
        }
        let begins = violating && !before;
        if begins {
            self.refuses_since = Some(now);
        }
        begins
    }

    /// Returns true if late requests were refused long enough to help. The windows were cleared
    /// when refusing began, so they contain nothing from a newer load.
    fn refuses_for_long(&self, now: Timestamp) -> bool {
        self.refuses_since.is_some_and(|since| now.since(since) >= MIN_REFUSAL_TIME)
    }

    /// Updates the stage. `candidates` lists the layouts to try beside the present one.
    pub(super) fn update(
        &mut self,
        observation: &GpuObservation,
        candidates: impl FnOnce() -> Vec<Layout>,
    ) -> WindowUpdate {
        match std::mem::replace(&mut self.stage, GpuStage::AtRest) {
            GpuStage::AtRest => self.while_at_rest(observation, candidates),
            GpuStage::Trying { trial, rates, pause } => self.while_trying(trial, rates, pause, observation),
            GpuStage::Chosen(chosen) => self.while_chosen(chosen, observation, candidates),
        }
    }

    fn while_at_rest(
        &mut self,
        observation: &GpuObservation,
        candidates: impl FnOnce() -> Vec<Layout>,
    ) -> WindowUpdate {
        let now = observation.trial.now;
        let Some(model) =
            observation.violating.filter(|_| self.refuses_for_long(now) && observation.trial.in_force)
        else {
            return WindowUpdate::Keep;
        };
        let present = Candidate::measured(Layout::AT_REST, observation.recent.clone());
        self.change(model, present, Duration::ZERO, observation, candidates)
    }

    /// Restores the best layout for this load if it is known and differs from the present one.
    /// Otherwise begins a trial.
    fn change(
        &mut self,
        model: usize,
        present: Candidate,
        pause: Duration,
        observation: &GpuObservation,
        candidates: impl FnOnce() -> Vec<Layout>,
    ) -> WindowUpdate {
        let now = observation.trial.now;
        let known = self.remembered.iter().find(|known| are_alike(&known.rates, &observation.rates));
        if let Some(known) = known.filter(|known| !known.layout.is_same(&present.layout)).cloned() {
            self.keep_layout(ChosenLayout { pause: longer(known.pause), ..known }, now);
            return WindowUpdate::Clear;
        }
        let all = std::iter::once(Layout::AT_REST).chain(candidates());
        let others = all.filter(|other| !other.is_same(&present.layout)).collect();
        let Some(trial) = LayoutTrial::new(model, present, others, observation.speed, now) else {
            return WindowUpdate::Keep;
        };
        self.stage = GpuStage::Trying { trial, rates: observation.rates.clone(), pause };
        WindowUpdate::Clear
    }

    fn while_trying(
        &mut self,
        mut trial: LayoutTrial,
        rates: RequestRates,
        pause: Duration,
        observation: &GpuObservation,
    ) -> WindowUpdate {
        let progress = trial.observe(&observation.trial);
        if progress.is_over() {
            let (layout, score) = (trial.layout().clone(), trial.score().clone());
            let (sufficed, now) = (progress == TrialProgress::Suffices, observation.trial.now);
            let (pause, usual_rates) = (longer(pause), None);
            let (retry_at, last_violation) = (now, now);
            self.keep_layout(
                ChosenLayout {
                    layout,
                    score,
                    trial,
                    sufficed,
                    rates,
                    usual_rates,
                    pause,
                    retry_at,
                    last_violation,
                },
                now,
            );
        } else {
            self.stage = GpuStage::Trying { trial, rates, pause };
        }
        match progress {
            TrialProgress::Continues | TrialProgress::Suffices => WindowUpdate::Keep,
            TrialProgress::MeasuringBegins | TrialProgress::LayoutSwitches | TrialProgress::Ended => {
                WindowUpdate::Clear
            }
        }
    }

    fn keep_layout(&mut self, chosen: ChosenLayout, now: Timestamp) {
        let chosen =
            ChosenLayout { retry_at: now + chosen.pause, last_violation: now, usual_rates: None, ..chosen };
        self.remembered.retain(|known| !are_alike(&known.rates, &chosen.rates));
        if self.remembered.len() == MAX_REMEMBERED {
            self.remembered.remove(0);
        }
        self.remembered.push(chosen.clone());
        self.stage = GpuStage::Chosen(chosen);
    }

    fn while_chosen(
        &mut self,
        mut chosen: ChosenLayout,
        observation: &GpuObservation,
        candidates: impl FnOnce() -> Vec<Layout>,
    ) -> WindowUpdate {
        let now = observation.trial.now;
        if let Some(rates) = &observation.usual_rates
            && !are_alike(chosen.usual_rates.get_or_insert_with(|| rates.clone()), rates)
        {
            (chosen.pause, chosen.retry_at) = (Duration::ZERO, now);
            chosen.usual_rates = Some(rates.clone());
        }
        let Some(model) = observation.violating else {
            let stays = now < chosen.retry_at.max(chosen.last_violation + MIN_PAUSE);
            self.stage = if stays { GpuStage::Chosen(chosen) } else { GpuStage::AtRest };
            return if stays { WindowUpdate::Keep } else { WindowUpdate::Clear };
        };
        chosen.last_violation = now;
        let is_worse = |score: &Score| {
            score.compared(&chosen.score).is_gt() && score.loss() > chosen.score.loss() + MUCH_WORSE
        };
        let is_worse_now = is_worse(&observation.recent) || is_worse(&observation.last);
        let is_due = now >= chosen.retry_at || !are_alike(&chosen.rates, &observation.rates);
        // A violation under a layout that sufficed means that the load has changed.
        let retry = if chosen.sufficed { is_worse_now || is_due } else { is_worse_now && is_due };
        let retry = retry && self.refuses_for_long(now);
        // Some of the recent misses belong to the former load.
        let present = Candidate::new(chosen.layout.clone(), observation.recent.blank());
        let pause = chosen.pause;
        self.stage = GpuStage::Chosen(chosen);
        if retry { self.change(model, present, pause, observation, candidates) } else { WindowUpdate::Keep }
    }

    /// Returns the same state for models with other indices; unknown ones keep theirs.
    pub(super) fn renumbered(&self, now: impl Fn(usize) -> Option<usize> + Copy) -> Self {
        let mut gpu = self.clone();
        match &mut gpu.stage {
            GpuStage::AtRest => {}
            GpuStage::Trying { trial, rates, .. } => {
                trial.renumber(now);
                renumber(rates, now);
            }
            GpuStage::Chosen(chosen) => chosen.renumber(now),
        }
        gpu.remembered.iter_mut().for_each(|known| known.renumber(now));
        gpu
    }
}

impl ChosenLayout {
    fn renumber(&mut self, now: impl Fn(usize) -> Option<usize> + Copy) {
        self.layout = self.layout.renumbered(now);
        self.trial.renumber(now);
        renumber(&mut self.rates, now);
        self.usual_rates.iter_mut().for_each(|rates| renumber(rates, now));
    }
}

fn renumber(rates: &mut RequestRates, now: impl Fn(usize) -> Option<usize>) {
    rates.iter_mut().for_each(|(model, _)| *model = now(*model).unwrap_or(*model));
}

/// Returns true if two loads have the same models, and the rates of each model are alike.
fn are_alike(rates: &RequestRates, other: &RequestRates) -> bool {
    let is_like = |(model, rate): &(usize, ArrivalRate)| {
        other.iter().any(|(of, other)| of == model && rate.is_like(*other))
    };
    rates.len() == other.len() && rates.iter().all(is_like)
}

/// Returns the next pause under the same load.
fn longer(pause: Duration) -> Duration {
    (pause * PAUSE_FACTOR).clamp(MIN_PAUSE, MAX_PAUSE)
}
