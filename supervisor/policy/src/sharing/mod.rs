//! Sharing: how many SMs each model gets.
//!
//! ```text
//! facts (what was seen since the last time) ─▶ Policy::decide ─▶ Decision {changes, doors, report}
//! ```
//!
//! A policy is asked once an interval. It sees what any executor can tell it, the supervisor or a
//! simulated world, and nothing else; it answers with all that is to change and with a reason for
//! each model. It has no clock and changes nothing itself.

mod adaptive;
mod baselines;
mod choice;
mod difference;
mod facts;
#[cfg(test)]
mod fixtures;
mod plan;
mod policy;

pub use choice::Choice;
pub use facts::{Executed, Facts, Live, Seen, Terms, leaves_time_for_the_way};
pub use plan::{Change, Decision, Door, Missed, Verdict, Waiting, Why};
pub use policy::{Policy, PolicyName, UnknownPolicy};
