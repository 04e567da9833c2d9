//! The rollout of a model's new version beside the released one: when it moves to the next stage, and
//! when it is rolled back.
//!
//! ```text
//!   Starting ──▶ Mirror ──▶ Timing ──▶ Canary 1, 2, … ──▶ Released
//!      │           │           │            │                │
//!      └───────────┴───────────┴────────────┴────────────────┴──▶ rolled back
//! ```
//!
//! * In `Mirror`, the new version has a small share, and gets copies of requests. Its answers are compared
//!   with those of the released version and thrown away.
//! * In `Timing`, it has the share of the released version, and gets one copy at a time. Its times are
//!   compared, too.
//! * In `Canary`, it answers a part of the requests.
//! * When it is `Released`, it answers all requests. The former version is kept for some time.

mod slowdown;

use std::time::Duration;

pub use slowdown::{BatchTime, slowdown};

/// The requests that a stage needs before it can end. Twenty requests show an error or a difference that
/// concerns at least every seventh request with a probability of 95 %.
pub const MIN_REQUESTS: u64 = 20;

/// The smallest number of requests to which a bound on a fraction applies. With a bound of 1 %, the
/// second error within the first 100 requests is one too many.
const MIN_SAMPLE: u64 = 100;

/// The deaths of workers in one stage after which the new version is rolled back.
const MAX_DEATHS: u64 = 3;

/// The rules of a rollout.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutRules {
    /// The fraction of requests that are copied to the new version, from 0 to 1.
    pub mirror: f64,
    /// The fractions of requests that the new version answers in each step of the canary, ascending, above
    /// 0 and at most 1.
    pub canary: Vec<f64>,
    /// The duration of the mirror and of each step. With `None`, an operator ends them.
    pub step: Option<Duration>,
    /// The bounds on the new version's behaviour.
    pub bounds: RolloutBounds,
}

/// The bounds on a new version's behaviour. It is rolled back if it exceeds one of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RolloutBounds {
    /// The fraction of requests that fail, from 0 to 1.
    pub errors: f64,
    /// The fraction of compared answers that differ, from 0 to 1.
    pub differences: f64,
    /// The execution time of its batches relative to that of the released version.
    pub slowdown: f64,
}

/// The stage of a rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RolloutStage {
    /// The new version's worker starts and proves itself.
    Starting,
    /// The new version gets copies of requests at a small share.
    Mirror,
    /// The new version gets copies of requests at the released version's share.
    Timing,
    /// The new version answers a part of the requests.
    Canary {
        /// The index in [`RolloutRules::canary`].
        step: usize,
    },
    /// The new version answers all requests.
    Released,
}

/// The requests of a version since the stage began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageCounts {
    /// The requests that have ended.
    pub requests: u64,
    /// The requests that failed.
    pub errors: u64,
    /// The requests that violated the SLO, with those that were refused.
    pub late: u64,
    /// The answers that were compared.
    pub compared: u64,
    /// The compared answers that differ.
    pub differences: u64,
    /// The deaths of workers.
    pub deaths: u64,
}

impl StageCounts {
    /// Returns the counts, with late requests only if the stage's share is in force.
    #[must_use]
    pub fn late_only_if(self, is_in_force: bool) -> Self {
        Self { late: if is_in_force { self.late } else { 0 }, ..self }
    }
}

/// The start of the new version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CandidateHealth {
    /// No worker serves yet, or the share of the stage is not in force yet.
    Starting,
    /// A worker serves at the stage's share.
    Serving,
    /// No worker serves, for this reason.
    Failed(String),
}

/// The observed state of a rollout.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutView {
    /// The time since the stage began.
    pub elapsed: Duration,
    /// The state of the new version's worker.
    pub health: CandidateHealth,
    /// The reason why requests for the released version do not fit the new one. `None` if they fit, or
    /// if it is not known yet.
    pub incompatibility: Option<String>,
    /// False if answers cannot be copied and compared, as those of streams.
    pub can_mirror: bool,
    /// The new version's requests in this stage, with copies.
    pub candidate: StageCounts,
    /// The released version's requests in this stage.
    pub released: StageCounts,
    /// The fraction of requests that must meet the SLO, from 0 to 1.
    pub target: f64,
    /// The execution time of the new version's batches in this stage relative to that of the released
    /// version on the same SMs. `None` if it is not known.
    pub slowdown: Option<f64>,
    /// True if an operator ends the stage.
    pub is_promoted: bool,
}

/// The next step of a rollout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RolloutStep {
    /// The stage continues.
    Stay,
    /// The next stage begins.
    Enter(RolloutStage),
    /// The released version answers all requests again, for this reason.
    RollBack(String),
}

/// Returns the next step of a rollout in this stage.
pub fn next(rules: &RolloutRules, stage: RolloutStage, view: &RolloutView) -> RolloutStep {
    if let Some(why) = fault(rules, stage, view) {
        return RolloutStep::RollBack(why);
    }
    let has_ended = match stage {
        RolloutStage::Released => false,
        _ if view.health == CandidateHealth::Starting => false,
        RolloutStage::Starting => true,
        _ if view.is_promoted => true,
        RolloutStage::Timing => view.candidate.requests >= MIN_REQUESTS,
        RolloutStage::Mirror | RolloutStage::Canary { .. } => {
            let enough = view.candidate.requests >= MIN_REQUESTS;
            rules.step.is_some_and(|step| enough && view.elapsed >= step)
        }
    };
    if has_ended { RolloutStep::Enter(after(rules, stage, view.can_mirror)) } else { RolloutStep::Stay }
}

fn after(rules: &RolloutRules, stage: RolloutStage, can_mirror: bool) -> RolloutStage {
    let next_step = match stage {
        RolloutStage::Starting if can_mirror && rules.mirror > 0.0 => return RolloutStage::Mirror,
        RolloutStage::Mirror => return RolloutStage::Timing,
        RolloutStage::Starting | RolloutStage::Timing => 0,
        RolloutStage::Canary { step } => step + 1,
        RolloutStage::Released => return RolloutStage::Released,
    };
    if next_step < rules.canary.len() {
        RolloutStage::Canary { step: next_step }
    } else {
        RolloutStage::Released
    }
}

/// Returns the reason to roll back, if there is one.
fn fault(rules: &RolloutRules, stage: RolloutStage, view: &RolloutView) -> Option<String> {
    if let CandidateHealth::Failed(why) = &view.health {
        return Some(format!("the new version does not serve: {why}"));
    }
    if let Some(incompatibility) = &view.incompatibility {
        return Some(incompatibility.clone());
    }
    let StageCounts { requests, errors, late, compared, differences, deaths } = view.candidate;
    if deaths >= MAX_DEATHS {
        return Some(format!("{deaths} of its workers died"));
    }
    if exceeds(errors, requests, rules.bounds.errors) {
        return Some(format!("{errors} of {requests} requests failed"));
    }
    if exceeds(differences, compared, rules.bounds.differences) {
        return Some(format!("{differences} of {compared} answers differ"));
    }
    // At the small share of the mirror, even a good version may be late.
    if matches!(stage, RolloutStage::Timing | RolloutStage::Canary { .. }) {
        if late as f64 > allowed_late(view) {
            return Some(format!("{late} of {requests} requests violated the SLO"));
        }
        let is_measured = requests >= MIN_REQUESTS;
        if let Some(slowdown) =
            view.slowdown.filter(|slowdown| is_measured && *slowdown > rules.bounds.slowdown)
        {
            return Some(format!(
                "its batches take {slowdown:.1} times as long as those of the released version"
            ));
        }
    }
    None
}

fn exceeds(events: u64, of: u64, bound: f64) -> bool {
    events as f64 > bound * of.max(MIN_SAMPLE) as f64
}

/// Returns the number of late requests that two standard deviations explain, if the new version is late as
/// often as its SLO allows, or as the released version is.
fn allowed_late(view: &RolloutView) -> f64 {
    let released = view.released.late as f64 / view.released.requests.max(1) as f64;
    let expected = (1.0 - view.target).max(released) * view.candidate.requests as f64;
    expected + 2.0 * expected.sqrt() + 1.0
}

#[cfg(test)]
mod tests;
