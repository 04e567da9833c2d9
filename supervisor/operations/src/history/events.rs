//! Finds the events between two statuses, and the reasons for these events.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::plan::PlanReport;
use crate::status::{HostStatus, ModelStatus, RolloutPhase, RolloutStatus, change_text};
use shadowslice_control::controller::{ChangeOutcome, ReportedState};
use shadowslice_datapath::readiness::HostState;

/// The number of samples without a refusal after which the next refusal is reported as a new event.
const QUIET_SAMPLES: u32 = 15;

/// The longest text of an event, in characters.
const MAX_TEXT: usize = 300;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum HistoryEventKind {
    /// A share changed.
    Change,
    /// A change of a share failed or was rolled back.
    Failure,
    Death,
    /// A model starts to refuse requests.
    Refusals,
    /// The state of a model, a GPU or the host changed.
    State,
}

/// An event that the web page shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct HistoryEvent {
    kind: HistoryEventKind,
    /// The model, or `None` for an event of a GPU or the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    text: String,
}

impl HistoryEvent {
    /// Returns an event that reports the start of this supervisor.
    pub(super) fn begin() -> Self {
        let text =
            format!("supervisor {}, version {}, started", std::process::id(), env!("CARGO_PKG_VERSION"));
        Self::of_host(HistoryEventKind::State, text)
    }

    fn of(model: &ModelStatus, kind: HistoryEventKind, text: String) -> Self {
        Self { model: Some(model.name.clone()), ..Self::of_host(kind, text) }
    }

    fn of_host(kind: HistoryEventKind, mut text: String) -> Self {
        if let Some((cut, _)) = text.char_indices().nth(MAX_TEXT) {
            text.truncate(cut);
            text.push('…');
        }
        Self { kind, model: None, text }
    }
}

/// The number of samples since the last refusal, for each model and reason.
#[derive(Debug, Default)]
pub(super) struct RefusalTracker(BTreeMap<(String, &'static str), u32>);

pub(super) fn between(
    before: &HostStatus,
    now: &HostStatus,
    plan: &PlanReport,
    refusing: &mut RefusalTracker,
) -> Vec<HistoryEvent> {
    let mut marks = Vec::new();
    marks.extend(host(before, now));
    for gpu in &now.gpus {
        let earlier = before.gpus.get(gpu.index).and_then(|earlier| earlier.why.as_ref());
        if let Some(why) = gpu.why.as_ref().filter(|why| Some(*why) != earlier) {
            marks.push(HistoryEvent::of_host(
                HistoryEventKind::State,
                format!("GPU {} accepts no workers: {why}", gpu.index),
            ));
        }
    }
    for model in &now.models {
        let nothing = ModelStatus { name: model.name.clone(), ..ModelStatus::default() };
        let earlier = before.models.iter().find(|earlier| earlier.instance() == model.instance());
        // If a model was replaced, its counters started again from zero, so they are not compared
        // with the earlier counters.
        let same = earlier.filter(|earlier| model.requests.since(&earlier.requests).is_some());
        let counted = same.unwrap_or(&nothing);
        marks.extend(death(counted, model));
        marks.extend(change(counted, model, plan));
        marks.extend(state(earlier, model));
        marks.extend(rollout(earlier, model));
        marks.extend(refusing.begin(counted, model));
    }
    let gone = |earlier: &&ModelStatus| now.models.iter().all(|model| model.instance() != earlier.instance());
    let gone = before.models.iter().filter(gone);
    marks.extend(gone.map(|model| HistoryEvent::of(model, HistoryEventKind::State, "removed".to_owned())));
    refusing.0.retain(|(name, _), _| now.models.iter().any(|model| model.name == *name));
    marks
}

fn host(before: &HostStatus, now: &HostStatus) -> Option<HistoryEvent> {
    let text = match now.host {
        host if host == before.host => return None,
        HostState::Serving => "the host is undrained",
        HostState::Drained => "the host is drained",
        HostState::Stopping => "the host is stopping",
    };
    Some(HistoryEvent::of_host(HistoryEventKind::State, text.to_owned()))
}

/// Returns an event if a rollout of the model has entered another phase.
fn rollout(before: Option<&ModelStatus>, now: &ModelStatus) -> Option<HistoryEvent> {
    let key = |rollout: &RolloutStatus| (rollout.candidate, rollout.phase, rollout.canary.to_bits());
    let rollout = now.rollout.as_ref().filter(|_| now.role.is_released())?;
    let earlier = before.and_then(|before| before.rollout.as_ref());
    if earlier.map(key) == Some(key(rollout)) {
        return None;
    }
    let kind = match rollout.phase {
        RolloutPhase::RolledBack => HistoryEventKind::Failure,
        _ => HistoryEventKind::Change,
    };
    Some(HistoryEvent::of(now, kind, rollout.text()))
}

fn death(before: &ModelStatus, now: &ModelStatus) -> Option<HistoryEvent> {
    let died = now.worker_deaths.checked_sub(before.worker_deaths).filter(|died| *died > 0)?;
    let why = now.last_death.as_deref().unwrap_or("no cause is known");
    let text = if died == 1 {
        format!("a worker died: {why}")
    } else {
        format!("{died} workers died; cause of the last death: {why}")
    };
    Some(HistoryEvent::of(now, HistoryEventKind::Death, text))
}

fn change(before: &ModelStatus, now: &ModelStatus, plan: &PlanReport) -> Option<HistoryEvent> {
    let ended = |model: &ModelStatus| {
        let changes = &model.handovers;
        changes.completed + changes.aborted + changes.rolled_back
    };
    let count = ended(now).checked_sub(ended(before)).filter(|count| *count > 0)?;
    let last = now.handovers.last.as_ref()?;
    let plan = plan.models.iter().find(|plan| plan.name == now.name);
    let mut text = change_text(last, plan);
    if count > 1 {
        text.push_str(&format!(" (the last of {count})"));
    }
    let kind = if last.outcome == ChangeOutcome::Completed {
        HistoryEventKind::Change
    } else {
        HistoryEventKind::Failure
    };
    Some(HistoryEvent::of(now, kind, text))
}

/// Returns an event if the model's state has changed. A restart is not reported, because the
/// worker's death has already been reported.
fn state(before: Option<&ModelStatus>, now: &ModelStatus) -> Option<HistoryEvent> {
    let was = before.map(|before| before.state);
    if Some(now.state) == was || matches!(now.state, ReportedState::Restarting | ReportedState::Stopping) {
        return None;
    }
    if was == Some(ReportedState::Restarting) && now.state == ReportedState::Ready {
        return Some(HistoryEvent::of(now, HistoryEventKind::State, "ready again".to_owned()));
    }
    let why = now.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    Some(HistoryEvent::of(now, HistoryEventKind::State, format!("{}{why}", now.state)))
}

impl RefusalTracker {
    fn begin(&mut self, before: &ModelStatus, now: &ModelStatus) -> Option<HistoryEvent> {
        let earlier: BTreeMap<_, _> = before.requests.refused.by_reason().collect();
        let mut begun = Vec::new();
        for (why, count) in now.requests.refused.by_reason() {
            let key = (now.name.clone(), why);
            if count > earlier.get(why).copied().unwrap_or(0) {
                if self.0.insert(key, 0).is_none() {
                    begun.push(why.replace('_', " "));
                }
            } else if let Some(quiet) = self.0.get_mut(&key) {
                *quiet += 1;
                if *quiet >= QUIET_SAMPLES {
                    self.0.remove(&key);
                }
            }
        }
        (!begun.is_empty()).then(|| {
            HistoryEvent::of(
                now,
                HistoryEventKind::Refusals,
                format!("refuses requests: {}", begun.join(", ")),
            )
        })
    }
}
