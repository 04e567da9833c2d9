//! Which policy, and whether with our doors.

use std::fmt;
use std::str::FromStr;

use shadowslice_shared::units::Sms;

use super::{Kind, Policy, Terms, UnknownPolicy};

/// Behind a policy's name: with our batching and admission in place of its own.
const WITH_DOORS: &str = "+doors";

/// A policy, with its own doors or ours, as people write it: `gslice`, `half+doors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Choice {
    /// Which policy.
    pub kind: Kind,
    /// Whether our batching and admission come in place of its own.
    pub our_doors: bool,
}

impl Choice {
    /// A policy with its own doors.
    pub const fn of(kind: Kind) -> Self {
        Self { kind, our_doors: false }
    }

    /// Whether it tells priorities apart.
    pub fn heeds_priorities(self) -> bool {
        matches!(self.kind, Kind::Adaptive | Kind::Feedback) || self.our_doors
    }

    /// Whether its shares are caps that may overlap, so that partitions of them lie together and what they leave free does, too.
    pub fn lies_together(self) -> bool {
        self.kind == Kind::Feedback
    }

    /// The policy for these models on these GPUs.
    ///
    /// # Panics
    ///
    /// If a model's GPU is not among `gpus`.
    pub fn policy(self, gpus: &[Sms], terms: &[Terms]) -> Policy {
        let policy = Policy::new(self.kind, gpus, terms);
        if self.our_doors { policy.with_our_doors() } else { policy }
    }
}

impl FromStr for Choice {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let bare = text.strip_suffix(WITH_DOORS);
        Ok(Self { kind: bare.unwrap_or(text).parse()?, our_doors: bare.is_some() })
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.kind, if self.our_doors { WITH_DOORS } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_read_as_it_is_written() {
        for kind in Kind::ALL {
            for our_doors in [false, true] {
                let choice = Choice { kind, our_doors };
                assert_eq!(choice.to_string().parse(), Ok(choice));
            }
        }
        for wrong in ["", "+doors", "gslice+", "gslice+doors+doors", "half doors"] {
            assert!(wrong.parse::<Choice>().is_err(), "{wrong}");
        }
    }
}
