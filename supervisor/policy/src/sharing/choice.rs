//! Which policy, and whether it turns late requests away.

use std::fmt;
use std::str::FromStr;

use super::{PolicyName, UnknownPolicy};

const WITH_DOORS: &str = "+doors";

/// As operators write it: `gslice`, `half+doors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Choice {
    pub kind: PolicyName,
    /// `+doors`: requests that cannot be answered in time are turned away.
    pub refuses_late: bool,
}

impl Choice {
    pub const fn of(kind: PolicyName) -> Self {
        Self { kind, refuses_late: false }
    }

    pub fn heeds_priorities(self) -> bool {
        self.kind == PolicyName::Adaptive
    }
}

impl FromStr for Choice {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let bare = text.strip_suffix(WITH_DOORS);
        Ok(Self { kind: bare.unwrap_or(text).parse()?, refuses_late: bare.is_some() })
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.kind, if self.refuses_late { WITH_DOORS } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_read_as_it_is_written() {
        for kind in PolicyName::ALL {
            for refuses_late in [false, true] {
                let choice = Choice { kind, refuses_late };
                assert_eq!(choice.to_string().parse(), Ok(choice));
            }
        }
        for wrong in ["", "+doors", "gslice+", "gslice+doors+doors", "half admissions"] {
            assert!(wrong.parse::<Choice>().is_err(), "{wrong}");
        }
    }
}
