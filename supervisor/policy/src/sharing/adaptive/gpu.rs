//! The state of one GPU: its current layout, and how the policy chose it.
//!
//! ```text
//! AtRest ── a model violates its SLO although late requests are refused ──▶ Trying ── the best ──▶ Chosen
//!   ▲ └───── the same violation, but the best layout for this load is known ─────────────────────▶ │ │
//!   └──────────────────────── no violation during a pause ─────────────────────────────────────────┘ │
//!                          Trying ◀── many more requests miss, or the load has changed ───────────────┘
//! ```

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::super::layout::Layout;
use super::score::Score;
use super::trial::{Candidate, LayoutTrial, SwitchSpeed, TrialObservation, TrialProgress};
use super::window::ArrivalRate;

/// The time for which late requests are refused after a model violated its SLO.
const REFUSAL_TIME: Duration = Duration::from_secs(2);

/// The minimum time for which late requests must be refused before the policy tries a layout.
pub(super) const MIN_REFUSAL_TIME: Duration = Duration::from_millis(300);

/// The minimum and the maximum pause. The policy pauses before it starts another trial for the same
/// load, and before it replaces a layout with the initial shares. Each pause is [`PAUSE_FACTOR`] times
/// the previous one.
const MIN_PAUSE: Duration = Duration::from_secs(10);
const MAX_PAUSE: Duration = Duration::from_secs(600);
const PAUSE_FACTOR: u32 = 10;

/// The increase of the loss (the weighted miss rate) since the last trial that justifies another trial.
/// A trial that changes shares by shadows requires at least this loss.
pub(super) const MUCH_WORSE: f64 = 0.05;

/// The maximum number of loads for which the best layout of a GPU is remembered.
const MAX_REMEMBERED: usize = 16;

/// The state of one GPU.
#[derive(Debug, Clone)]
pub(super) struct GpuState {
    pub(super) stage: GpuStage,
    refuses_since: Option<Timestamp>,
    refuses_until: Timestamp,
    remembered: Vec<ChosenLayout>,
}

/// The stage of the choice of a layout for a GPU.
#[derive(Debug, Clone)]
pub(super) enum GpuStage {
    /// The models have their initial shares. Either the models need no layout, or the policy has not
    /// tried a layout yet.
    AtRest,
    /// A trial is in progress.
    Trying {
        /// The trial that is in progress.
        trial: LayoutTrial,
        /// The request rates at the start of the trial.
        rates: RequestRates,
        /// The length of the last pause under this load.
        pause: Duration,
    },
    /// The policy has chosen a layout.
    Chosen(ChosenLayout),
}

/// The request rate of each model, with the index of the model.
pub(super) type RequestRates = Vec<(usize, ArrivalRate)>;

/// A layout that the policy has chosen. Either it had the fewest misses in a trial, or all models met
/// their SLOs under it in a trial, or it was remembered for this load.
#[derive(Debug, Clone)]
pub(super) struct ChosenLayout {
    pub(super) layout: Layout,
    /// The misses under the layout at the time when it was chosen.
    score: Score,
    pub(super) trial: LayoutTrial,
    /// True if the trial ended early, because all models met their SLOs under this layout.
    sufficed: bool,
    /// The request rates for which the layout was chosen.
    rates: RequestRates,
    /// The request rates under this layout, measured after the layout had been in force for 10 s. They
    /// can differ from `rates`: a client that waits for each response sends more requests under a
    /// faster layout.
    usual_rates: Option<RequestRates>,
    /// The minimum time for which the layout stays in force.
    pause: Duration,
    retry_at: Timestamp,
    /// The time at which a model last violated its SLO.
    last_violation: Timestamp,
}

/// The observation of a GPU in one interval.
#[derive(Debug, Clone)]
pub(super) struct GpuObservation {
    pub(super) trial: TrialObservation,
    /// The index of the most important model that violates its SLO and whose misses a layout may
    /// reduce.
    pub(super) violating: Option<usize>,
    /// The misses of all models since the windows were cleared.
    pub(super) recent: Score,
    /// The misses of all models in the last second.
    pub(super) last: Score,
    /// The request rates of the last second.
    pub(super) rates: RequestRates,
    /// The request rates of the last 10 s. This is `None` if the windows were cleared in this time.
    pub(super) usual_rates: Option<RequestRates>,
    pub(super) speed: SwitchSpeed,
}

/// The effect of an update on the models' observation windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WindowUpdate {
    /// The windows keep their observations.
    Keep,
    /// The windows are cleared, because another layout comes into force, or because a measurement
    /// starts.
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

    /// Returns the layout. Returns `None` if the models have their initial shares.
    pub(super) fn layout(&self) -> Option<&Layout> {
        match &self.stage {
            GpuStage::AtRest => None,
            GpuStage::Trying { trial, .. } => Some(trial.layout()),
            GpuStage::Chosen(chosen) => Some(&chosen.layout),
        }
    }

    /// Starts or ends the refusal of late requests. They are refused while a model violates its SLO,
    /// and for [`REFUSAL_TIME`] afterwards. Returns true if the refusals start now.
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

    /// Returns true if late requests have been refused for at least [`MIN_REFUSAL_TIME`]. The windows
    /// were cleared when the refusals started, so they contain only observations with refusals.
    fn refuses_for_long(&self, now: Timestamp) -> bool {
        self.refuses_since.is_some_and(|since| now.since(since) >= MIN_REFUSAL_TIME)
    }

    /// Updates the stage. `candidates` returns the layouts to try in addition to the current layout.
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

    /// Restores the remembered best layout for this load, if there is such a layout and it is not in
    /// force. Otherwise starts a trial.
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
        // If all models met their SLOs in the trial, the present violation means that the load has
        // changed. One of the two conditions is then enough.
        let retry = if chosen.sufficed { is_worse_now || is_due } else { is_worse_now && is_due };
        let retry = retry && self.refuses_for_long(now);
        // The score must start at zero, because some of the recent misses occurred under the former
        // load.
        let present = Candidate::new(chosen.layout.clone(), observation.recent.blank());
        let pause = chosen.pause;
        self.stage = GpuStage::Chosen(chosen);
        if retry { self.change(model, present, pause, observation, candidates) } else { WindowUpdate::Keep }
    }

    /// Returns the same state with new model indices. Models without a new index keep their old index.
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

/// Returns true if both loads have the same models with similar request rates.
fn are_alike(rates: &RequestRates, other: &RequestRates) -> bool {
    let is_like = |(model, rate): &(usize, ArrivalRate)| {
        other.iter().any(|(of, other)| of == model && rate.is_like(*other))
    };
    rates.len() == other.len() && rates.iter().all(is_like)
}

/// Returns the length of the next pause under the same load.
fn longer(pause: Duration) -> Duration {
    (pause * PAUSE_FACTOR).clamp(MIN_PAUSE, MAX_PAUSE)
}
