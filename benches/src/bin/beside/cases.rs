//! What is run.

use std::fmt;

use serde::Serialize;

/// A load under a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Case {
    /// A named load of `shadowslice simulate`.
    pub(crate) load: &'static str,
    /// A policy of `controller.policy`.
    pub(crate) policy: &'static str,
}

const fn case(load: &'static str, policy: &'static str) -> Case {
    Case { load, policy }
}

/// All of them: shares that stay, with and without doors; doors and shares of ours; and shares that move
/// all the time, which is what gslice does.
pub(crate) const CASES: [Case; 9] = [
    case("poisson", "static"),
    case("poisson", "half+doors"),
    case("gamma", "half+doors"),
    case("gamma", "adaptive"),
    case("step", "static"),
    case("step", "adaptive"),
    case("step", "gslice"),
    case("surge", "half+doors"),
    case("surge", "adaptive"),
];

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.load, self.policy)
    }
}
