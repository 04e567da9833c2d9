//! The cases that are run.

use std::fmt;

use serde::Serialize;

/// A load under a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct ReplayCase {
    /// A named load of `shadowslice-simulate`.
    pub(crate) load: &'static str,
    /// A policy of `controller.policy`.
    pub(crate) policy: &'static str,
    /// How shares change, as `handover` says it.
    pub(crate) handover: &'static str,
}

const fn case(load: &'static str, policy: &'static str) -> ReplayCase {
    ReplayCase { load, policy, handover: "shadow" }
}

const fn inside(load: &'static str, policy: &'static str) -> ReplayCase {
    ReplayCase { load, policy, handover: "in-process" }
}

/// All cases: shares that stay, with and without doors; doors and shares of this project's
/// policies; and shares that move all the time, as under gslice. By percentages and shadows, and
/// inside the workers: there five models meet on the whole GPU, in halves and on their own parts.
pub(crate) const CASES: [ReplayCase; 15] = [
    case("poisson", "static"),
    case("poisson", "half+doors"),
    case("gamma", "half+doors"),
    case("gamma", "adaptive"),
    case("step", "static"),
    case("step", "adaptive"),
    case("step", "gslice"),
    case("surge", "half+doors"),
    case("surge", "adaptive"),
    inside("poisson", "unpartitioned"),
    inside("poisson", "priority-half+doors"),
    inside("poisson", "equal+doors"),
    inside("gamma", "half+doors"),
    inside("step", "adaptive"),
    inside("step", "gslice"),
];

impl fmt::Display for ReplayCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inside = if self.handover == "shadow" { "" } else { ", inside" };
        write!(f, "{}, {}{inside}", self.load, self.policy)
    }
}
