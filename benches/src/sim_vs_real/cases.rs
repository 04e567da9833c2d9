//! The cases in which the simulator is compared with the supervisor.

use std::fmt;

use serde::Serialize;

/// A combination of a load, a policy and a way to change shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct ReplayCase {
    /// The name of a load of `shadowslice-simulate`.
    pub(crate) load: &'static str,
    /// The policy, as a value of `controller.policy`.
    pub(crate) policy: &'static str,
    /// The way to change shares, as a value of `handover`.
    pub(crate) handover: &'static str,
}

const fn case(load: &'static str, policy: &'static str) -> ReplayCase {
    ReplayCase { load, policy, handover: "shadow" }
}

const fn inside(load: &'static str, policy: &'static str) -> ReplayCase {
    ReplayCase { load, policy, handover: "in-process" }
}

/// All cases. They cover fixed shares with and without admission control, the adaptive policy, and
/// a policy that changes shares continuously (gslice). In some cases, hand-overs change the shares.
/// In the other cases, the workers change their shares in-process, and the five models share the
/// whole GPU, share halves of it, or each use a separate part.
pub(crate) const CASES: [ReplayCase; 15] = [
    case("poisson", "static"),
    case("poisson", "half+admission"),
    case("gamma", "half+admission"),
    case("gamma", "adaptive"),
    case("step", "static"),
    case("step", "adaptive"),
    case("step", "gslice"),
    case("surge", "half+admission"),
    case("surge", "adaptive"),
    inside("poisson", "unpartitioned"),
    inside("poisson", "priority-half+admission"),
    inside("poisson", "equal+admission"),
    inside("gamma", "half+admission"),
    inside("step", "adaptive"),
    inside("step", "gslice"),
];

impl fmt::Display for ReplayCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inside = if self.handover == "shadow" { "" } else { ", inside" };
        write!(f, "{}, {}{inside}", self.load, self.policy)
    }
}
