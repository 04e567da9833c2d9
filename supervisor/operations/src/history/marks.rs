//! What happened between two statuses, with its reason.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::status::{ModelStatus, Status, change_text};
use shadowslice_control::controller::PlanReport;
use shadowslice_datapath::readiness::HostState;

/// Refusals that go on are told again after so many samples without one.
const QUIET: u32 = 15;

/// The longest text, in characters.
const LONGEST: usize = 300;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    /// A share changed.
    Change,
    /// A share was to change, and did not, or was changed back.
    Failure,
    Death,
    /// A model begins to refuse requests.
    Refusals,
    /// What a model, a GPU or the host says of itself.
    State,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Mark {
    kind: Kind,
    /// `None` of a GPU, and of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    text: String,
}

impl Mark {
    /// This supervisor serves from now on.
    pub(super) fn begin() -> Self {
        let text =
            format!("supervisor {}, version {}, begins", std::process::id(), env!("CARGO_PKG_VERSION"));
        Self::of_host(Kind::State, text)
    }

    fn of(model: &ModelStatus, kind: Kind, text: String) -> Self {
        Self { model: Some(model.name.clone()), ..Self::of_host(kind, text) }
    }

    fn of_host(kind: Kind, mut text: String) -> Self {
        if let Some((cut, _)) = text.char_indices().nth(LONGEST) {
            text.truncate(cut);
            text.push('…');
        }
        Self { kind, model: None, text }
    }
}

/// The samples since the last refusal, by model and reason.
#[derive(Debug, Default)]
pub(super) struct Refusing(BTreeMap<(String, &'static str), u32>);

pub(super) fn between(
    before: &Status,
    now: &Status,
    plan: &PlanReport,
    refusing: &mut Refusing,
) -> Vec<Mark> {
    let mut marks = Vec::new();
    marks.extend(host(before, now));
    for gpu in &now.gpus {
        let earlier = before.gpus.get(gpu.index).and_then(|earlier| earlier.why.as_ref());
        if let Some(why) = gpu.why.as_ref().filter(|why| Some(*why) != earlier) {
            marks.push(Mark::of_host(Kind::State, format!("GPU {} takes no workers: {why}", gpu.index)));
        }
    }
    for model in &now.models {
        let nothing = ModelStatus { name: model.name.clone(), ..ModelStatus::default() };
        let earlier = before.models.iter().find(|earlier| earlier.name == model.name);
        // Another instance of the model counts from zero.
        let same = earlier.filter(|earlier| model.requests.since(&earlier.requests).is_some());
        let counted = same.unwrap_or(&nothing);
        marks.extend(death(counted, model));
        marks.extend(change(counted, model, plan));
        marks.extend(state(earlier, model));
        marks.extend(refusing.begin(counted, model));
    }
    let gone = |earlier: &&ModelStatus| now.models.iter().all(|model| model.name != earlier.name);
    let gone = before.models.iter().filter(gone);
    marks.extend(gone.map(|model| Mark::of(model, Kind::State, "removed".to_owned())));
    refusing.0.retain(|(name, _), _| now.models.iter().any(|model| model.name == *name));
    marks
}

fn host(before: &Status, now: &Status) -> Option<Mark> {
    let told = match now.host {
        host if host == before.host => return None,
        HostState::Serving => "the host serves",
        HostState::Drained => "the host is drained",
        HostState::Stopping => "the host is stopping",
    };
    Some(Mark::of_host(Kind::State, told.to_owned()))
}

fn death(before: &ModelStatus, now: &ModelStatus) -> Option<Mark> {
    let died = now.worker_deaths.checked_sub(before.worker_deaths).filter(|died| *died > 0)?;
    let why = now.last_death.as_deref().unwrap_or("no cause is known");
    let text = if died == 1 {
        format!("a worker died: {why}")
    } else {
        format!("{died} workers died; the last: {why}")
    };
    Some(Mark::of(now, Kind::Death, text))
}

fn change(before: &ModelStatus, now: &ModelStatus, plan: &PlanReport) -> Option<Mark> {
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
    let kind = if last.outcome == "completed" { Kind::Change } else { Kind::Failure };
    Some(Mark::of(now, kind, text))
}

/// Restarts are told by the deaths before them.
fn state(before: Option<&ModelStatus>, now: &ModelStatus) -> Option<Mark> {
    let was = before.map_or("", |before| before.state.as_str());
    if now.state == was || matches!(now.state.as_str(), "restarting" | "stopping") {
        return None;
    }
    if was == "restarting" && now.state == "ready" {
        return Some(Mark::of(now, Kind::State, "serves again".to_owned()));
    }
    let why = now.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    Some(Mark::of(now, Kind::State, format!("{}{why}", now.state)))
}

impl Refusing {
    fn begin(&mut self, before: &ModelStatus, now: &ModelStatus) -> Option<Mark> {
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
                if *quiet >= QUIET {
                    self.0.remove(&key);
                }
            }
        }
        (!begun.is_empty())
            .then(|| Mark::of(now, Kind::Refusals, format!("refuses requests: {}", begun.join(", "))))
    }
}
