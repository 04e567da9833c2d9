//! Sharing policies, which decide the number of SMs of each model.
//!
//! Once per interval, a policy gets a [`PolicyInput`]. The policy returns a [`Decision`], which
//! contains all changes of shares and a reason for each model. The input comes from the supervisor or
//! from a simulation. A policy reads no clock and has no side effects.

mod adaptive;
mod changes;
mod choice;
#[cfg(test)]
mod fixtures;
mod input;
mod layout;
mod plan;
mod policy;

pub use changes::{ShareTarget, plan_changes};
pub use choice::Choice;
pub use input::{BatchStats, ModelSnapshot, ModelSpec, Observation, PolicyInput};
pub use layout::{Layout, LayoutShare, LayoutTenant, Pattern, candidates};
pub use plan::{
    AdmissionPolicy, Blocker, Decision, LayoutReport, LayoutResult, LayoutStage, MissRate, ShareChange,
    Verdict, VerdictReason,
};
pub use policy::{Policy, PolicyName, UnknownPolicy};
