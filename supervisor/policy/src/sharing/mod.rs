//! Sharing: how many SMs each model gets.
//!
//! Once an interval a policy gets facts, what was seen since the last time, and answers with all
//! that is to change and a reason for each model. It sees what any executor can tell it, the
//! supervisor or a simulated world, and nothing else; it has no clock and changes nothing itself.

mod adaptive;
mod baselines;
mod choice;
mod difference;
mod facts;
#[cfg(test)]
mod fixtures;
mod layout;
mod plan;
mod policy;

pub use choice::Choice;
pub use facts::{Executed, Facts, Live, Seen, Terms, leaves_time_for_the_way};
pub use layout::Pattern;
pub use plan::{
    AdmissionPolicy, Change, Decision, LayoutReport, LayoutStage, Missed, Tried, Verdict, Waiting, Why,
};
pub use policy::{Policy, PolicyName, UnknownPolicy};
