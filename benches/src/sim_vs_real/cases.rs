//! The cases in which the simulator is compared with the supervisor.

use std::fmt;

use serde::Serialize;

/// A combination of a load, a policy and a way to change shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct ReplayCase {
    /// The name of a load of `shadowslice-simulate`.
    pub(crate) load: &'static str,
    /// The name of the policy on the page.
    pub(crate) policy: &'static str,
    /// The policy, as a value of `controller.policy`.
    #[serde(skip)]
    pub(crate) configured: &'static str,
    /// The initial shares of the five models.
    #[serde(skip)]
    pub(crate) shares: ReplayShares,
    /// The way to change shares, as a value of `handover`.
    pub(crate) handover: &'static str,
    /// The value of `gpus[].memory` if models sleep for each other, in a shared worker.
    #[serde(skip)]
    pub(crate) memory: Option<&'static str>,
}

/// The initial shares of the models of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplayShares {
    /// The shares of the configuration file.
    OfFile,
    /// The policy chooses the shares.
    OfPolicy,
    /// These percentages of the GPU, in the order of the models.
    Percent([u32; 5]),
}

/// A policy: its name on the page, its value of `controller.policy`, and the initial shares.
#[derive(Debug, Clone, Copy)]
struct ReplayPolicy(&'static str, &'static str, ReplayShares);

const STATIC: ReplayPolicy = ReplayPolicy("static", "static", ReplayShares::OfFile);
const ADAPTIVE: ReplayPolicy = ReplayPolicy("adaptive", "adaptive", ReplayShares::OfPolicy);
const WHOLE: ReplayPolicy = ReplayPolicy("unpartitioned", "static", ReplayShares::Percent([100; 5]));
const SLEEP: ReplayPolicy = ReplayPolicy("unpartitioned+sleep", "static", ReplayShares::Percent([100; 5]));
const HALF: ReplayPolicy = ReplayPolicy("half+admission", "static+admission", ReplayShares::Percent([40; 5]));
const EQUAL: ReplayPolicy =
    ReplayPolicy("equal+admission", "static+admission", ReplayShares::Percent([20; 5]));
const PRIORITY_HALF: ReplayPolicy = ReplayPolicy(
    "priority-half+admission",
    "static+admission",
    ReplayShares::Percent([50, 100, 100, 50, 50]),
);

const fn case(load: &'static str, ReplayPolicy(policy, configured, shares): ReplayPolicy) -> ReplayCase {
    ReplayCase { load, policy, configured, shares, handover: "shadow", memory: None }
}

const fn inside(load: &'static str, policy: ReplayPolicy) -> ReplayCase {
    ReplayCase { handover: "in-process", ..case(load, policy) }
}

/// Returns a case in which the models do not fit into the GPU's memory together. They need 4910 MiB, and
/// their weights are 1070 MiB of it.
const fn short_of_memory(load: &'static str, policy: ReplayPolicy) -> ReplayCase {
    ReplayCase { memory: Some("4700Mi"), ..inside(load, policy) }
}

/// All cases. They cover fixed shares with and without admission control, and the adaptive policy. In
/// some cases, hand-overs change the shares. In the other cases, the workers change their shares
/// in-process, and the five models share the whole GPU, share halves of it, or each use a separate
/// part. In the last case, models sleep.
pub(crate) const CASES: [ReplayCase; 14] = [
    case("poisson", STATIC),
    case("poisson", HALF),
    case("gamma", HALF),
    case("gamma", ADAPTIVE),
    case("step", STATIC),
    case("step", ADAPTIVE),
    case("surge", HALF),
    case("surge", ADAPTIVE),
    inside("poisson", WHOLE),
    inside("poisson", PRIORITY_HALF),
    inside("poisson", EQUAL),
    inside("gamma", HALF),
    inside("step", ADAPTIVE),
    short_of_memory("poisson", SLEEP),
];

impl fmt::Display for ReplayCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inside = if self.handover == "shadow" { "" } else { ", inside" };
        write!(f, "{}, {}{inside}", self.load, self.policy)
    }
}
