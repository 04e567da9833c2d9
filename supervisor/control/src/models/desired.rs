//! The desired state of a model, and its difference from what runs.

use std::path::Path;
use std::sync::Arc;

use shadowslice_config::ModelConfig;
use shadowslice_policy::reconcile::{Goal, Presence, SpecDifference};
use shadowslice_shared::units::Percent;
use tokio::sync::watch;

use super::config_diff;

/// The desired state of a model, which commands change and the model's reconciler brings about.
#[derive(Debug, Clone)]
pub(super) struct DesiredModel {
    pub(super) spec: InstanceSpec,
    pub(super) presence: DesiredPresence,
    /// The share that the workers must have. With `None`, any share within the configured bounds is
    /// allowed, so that a sharing policy or an operator can choose it.
    pub(super) share: Option<Percent>,
}

/// The specification of an instance.
#[derive(Debug, Clone)]
pub(super) struct InstanceSpec {
    pub(super) model: Arc<ModelConfig>,
    /// A number that increases whenever new workers must load the model's files, even if the
    /// configuration stays the same.
    pub(super) load: u64,
}

#[derive(Debug, Clone)]
pub(super) enum DesiredPresence {
    /// Workers of this supervisor serve the model. The first of them have this share if no other
    /// workers serve. If `relay_is_lost`, the supervisor that served the model has died.
    Served { first: FirstShare, relay_is_lost: bool },
    /// The previous supervisor serves the model. The first workers here will have this share.
    NotStarted { first: FirstShare },
    /// No workers serve the model, for this reason.
    Unloaded { why: &'static str, is_removed: bool },
    /// The supervisor at this socket serves the model. If `returns` is false, the model never comes
    /// back.
    Relayed { socket: Arc<Path>, returns: bool },
}

/// The share with which a model's first workers start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FirstShare {
    pub(super) share: Percent,
    /// True if an operator holds the share.
    pub(super) held: bool,
}

impl DesiredModel {
    pub(super) fn presence(&self) -> Presence {
        match self.presence {
            DesiredPresence::Served { .. } => Presence::Served,
            DesiredPresence::NotStarted { .. } | DesiredPresence::Unloaded { .. } => Presence::Unloaded,
            DesiredPresence::Relayed { .. } => Presence::Relayed,
        }
    }

    /// Changes the configuration. Without a sharing policy, a new initial share applies immediately.
    /// Otherwise the share stays. `is_settled` is true if no earlier change waits for its outcome.
    pub(super) fn reconfigure(&mut self, model: ModelConfig, policy_acts: bool, is_settled: bool) {
        let (old, new) = (self.spec.model.share.initial, model.share.initial);
        let share = (!policy_acts && old != new).then_some(new);
        self.share = share.or(self.share.filter(|_| !is_settled));
        self.spec.model = Arc::new(model);
    }

    /// Returns the share that workers must have instead of `share`.
    pub(super) fn share_instead_of(&self, share: Percent) -> Percent {
        let bounds = self.spec.model.share;
        self.share.unwrap_or(share).clamp(bounds.min, bounds.max)
    }
}

impl InstanceSpec {
    /// Returns the change that an instance with this specification needs to get the `desired` one.
    pub(super) fn difference(&self, desired: &Self) -> SpecDifference {
        if self.load != desired.load {
            return SpecDifference::NewWorkers;
        }
        match config_diff::change(&self.model, &desired.model) {
            Some(change) if !change.needs_workers.is_empty() => SpecDifference::NewWorkers,
            Some(_) => SpecDifference::InPlace,
            None => SpecDifference::None,
        }
    }
}

/// The goal of a model, which its commands and its reconciler share.
pub(super) type SharedGoal = Arc<watch::Sender<Goal<DesiredModel>>>;

/// The wait for the outcome of a command.
#[derive(Debug)]
pub(super) struct PendingOutcome {
    goal: watch::Receiver<Goal<DesiredModel>>,
    generation: u64,
}

impl PendingOutcome {
    /// Returns the wait for the desired state with which the goal was created.
    pub(super) fn first(goal: &SharedGoal) -> Self {
        Self { goal: goal.subscribe(), generation: 1 }
    }

    /// Changes the desired state, and returns the wait for the outcome. `change` learns whether the
    /// outcome of the earlier desired state is known.
    pub(super) fn change(goal: &SharedGoal, change: impl FnOnce(&mut DesiredModel, bool)) -> Self {
        let mut generation = 0;
        goal.send_modify(|goal| {
            generation = goal.change(change);
        });
        Self { goal: goal.subscribe(), generation }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Waits for the outcome. If a later command has changed the desired state meanwhile, its outcome
    /// counts.
    pub(super) async fn outcome(mut self) -> Result<(), String> {
        let settled = self.goal.wait_for(|goal| goal.settled().generation >= self.generation).await;
        match settled {
            Ok(goal) => goal.settled().outcome.clone(),
            // The reconciler ends only with the supervisor, or after the model was removed.
            Err(_) => Err("the model was removed, or the supervisor is stopping".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_that_a_command_requires_replaces_the_share_in_force_within_the_bounds() {
        let percent = |percent| Percent::new(percent).unwrap();
        for (required, [min, max], expected) in [
            (None, [2, 100], 55),
            (Some(40), [2, 100], 40),
            (None, [60, 100], 60),
            (None, [2, 50], 50),
            (Some(40), [2, 45], 40),
            (Some(40), [2, 35], 35),
        ] {
            let keys = format!("share: {{initial: {max}%, min: {min}%, max: {max}%}}");
            let config = config_diff::tests::one(&keys);
            let desired = DesiredModel {
                spec: InstanceSpec { model: Arc::new(config.models[0].clone()), load: 0 },
                presence: DesiredPresence::Unloaded { why: "", is_removed: false },
                share: required.map(percent),
            };
            assert_eq!(desired.share_instead_of(percent(55)), percent(expected), "{required:?} {min} {max}");
        }
    }
}
