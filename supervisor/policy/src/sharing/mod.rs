//! Sharing: how many SMs each model gets.
//!
//! Once an interval a policy gets facts, what was seen since the last time, and answers with all
//! that is to change and a reason for each model. It sees what any executor can tell it, the
//! supervisor or a simulated world, and nothing else; it has no clock and changes nothing itself.

mod adaptive;
mod baselines;
mod changes;
mod choice;
#[cfg(test)]
mod fixtures;
mod input;
mod layout;
mod plan;
mod policy;

pub use choice::Choice;
pub use input::{BatchStats, ModelSnapshot, ModelSpec, Observation, PolicyInput, leaves_time_for_delivery};
pub use layout::Pattern;
pub use plan::{
    AdmissionPolicy, Blocker, Decision, LayoutReport, LayoutResult, LayoutStage, MissRate, ShareChange,
    Verdict, VerdictReason,
};
pub use policy::{Policy, PolicyName, UnknownPolicy};
