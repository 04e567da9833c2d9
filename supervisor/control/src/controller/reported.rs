//! The states, roles and causes in reports. Each value has one word, which the JSON of `status`,
//! labels of metrics and logs use. A word of another version is read as `Unknown`.

use std::fmt;

use serde::{Deserialize, Serialize};
use shadowslice_policy::workers::{Cause, HandoverMode, WorkerPhase, WorkerRole, Workers};

use super::reports::ModelState;
use crate::backend::BackendKind;
use crate::models::ChangeKind;

/// The state of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReportedState {
    Loading,
    Ready,
    /// The worker is being replaced, and requests wait.
    Restarting,
    /// Requests are refused.
    Unready,
    Stopping,
    /// A client unloaded the model, and accepted requests are still answered.
    Unloading,
    Unloaded,
    /// The next supervisor serves the model.
    Moved,
    #[default]
    #[serde(other)]
    Unknown,
}

impl From<&ModelState> for ReportedState {
    fn from(state: &ModelState) -> Self {
        match state {
            ModelState::Loading => Self::Loading,
            ModelState::Ready => Self::Ready,
            ModelState::Restarting | ModelState::Waiting(_) => Self::Restarting,
            ModelState::Unready { .. } => Self::Unready,
            ModelState::Stopping => Self::Stopping,
        }
    }
}

/// The role of a worker (see [`WorkerRole`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReportedRole {
    Incumbent,
    Shadow,
    Standby,
    Parked,
    Reference,
    Leaving,
    #[serde(other)]
    Unknown,
}

impl From<WorkerRole> for ReportedRole {
    fn from(role: WorkerRole) -> Self {
        match role {
            WorkerRole::Incumbent => Self::Incumbent,
            WorkerRole::Shadow => Self::Shadow,
            WorkerRole::Standby => Self::Standby,
            WorkerRole::Parked => Self::Parked,
            WorkerRole::Reference => Self::Reference,
            WorkerRole::Leaving => Self::Leaving,
        }
    }
}

/// The phase of a worker's life (see [`WorkerPhase`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReportedPhase {
    Starting,
    Warming,
    Serving,
    Draining,
    Standing,
    Stopping,
    #[serde(other)]
    Unknown,
}

impl From<WorkerPhase> for ReportedPhase {
    fn from(phase: WorkerPhase) -> Self {
        match phase {
            WorkerPhase::Starting => Self::Starting,
            WorkerPhase::Warming => Self::Warming,
            WorkerPhase::Serving => Self::Serving,
            WorkerPhase::Draining => Self::Draining,
            WorkerPhase::Standing => Self::Standing,
            WorkerPhase::Stopping => Self::Stopping,
        }
    }
}

/// The mechanism that changes a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    /// The worker's batches move to other SMs.
    InProcess,
    /// Another worker takes the traffic over.
    Shadow,
    /// The share does not change.
    Never,
    /// The model was down, and starts with the new share.
    Restart,
    /// The model has no workers at this supervisor.
    #[default]
    #[serde(rename = "")]
    Absent,
    #[serde(other)]
    Unknown,
}

impl Mechanism {
    pub(super) fn of(workers: &Workers) -> Self {
        match (workers.no_partition(), workers.handover_mode()) {
            (None, _) => Self::InProcess,
            (Some(_), HandoverMode::Never) => Self::Never,
            (Some(_), _) => Self::Shadow,
        }
    }
}

/// The outcome of a change of share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeOutcome {
    Completed,
    /// The change began, and the share did not come into force.
    Aborted,
    /// The share came into force, and was taken back in its probation.
    #[serde(rename = "rolled back")]
    RolledBack,
    /// The standby replaced a worker that died.
    #[serde(rename = "taken over")]
    TakenOver,
    #[serde(other)]
    Unknown,
}

/// The cause of a change of share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeCause {
    /// An operator's command, or a changed configuration.
    Hand,
    Policy,
    /// The serving worker lost its share.
    Worker,
    /// The serving worker died.
    Death,
    #[serde(other)]
    Unknown,
}

impl From<Cause> for ChangeCause {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Hand => Self::Hand,
            Cause::Policy => Self::Policy,
            Cause::Worker => Self::Worker,
        }
    }
}

/// The policy's verdict on the share of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReportedVerdict {
    Keep,
    Grow,
    Shrink,
    /// The policy wants another share, which must wait.
    Wait,
    #[serde(other)]
    Unknown,
}

/// Displays values as their words in JSON.
macro_rules! display_as_json {
    ($($name:ident),*) => {
        $(impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.serialize(f)
            }
        })*
    };
}

display_as_json!(
    ReportedState,
    ReportedRole,
    ReportedPhase,
    Mechanism,
    ChangeOutcome,
    ChangeCause,
    ReportedVerdict,
    BackendKind,
    ChangeKind
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_other_versions_are_unknown() {
        let read = |word: &str| serde_json::from_value::<ChangeOutcome>(word.into()).unwrap();
        assert_eq!(
            [read("rolled back"), read("postponed")],
            [ChangeOutcome::RolledBack, ChangeOutcome::Unknown]
        );
        let mechanism = |word: &str| serde_json::from_value::<Mechanism>(word.into()).unwrap();
        assert_eq!(
            ["", "in-process", "x"].map(mechanism),
            [Mechanism::Absent, Mechanism::InProcess, Mechanism::Unknown]
        );
        assert_eq!(format!("{:<11}|", ChangeOutcome::TakenOver), "taken over |");
    }
}
