//! The configured choice of a sharing policy.

use std::fmt;
use std::str::FromStr;

use super::{PolicyName, UnknownPolicy};

/// A policy as operators configure it, for example `adaptive` or `static+admission`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Choice {
    /// The policy.
    pub kind: PolicyName,
    /// True if the name has the suffix `+admission`. Requests that cannot be answered in time are then
    /// always refused.
    pub refuses_late: bool,
}

impl Choice {
    /// The suffix of a policy's name that makes it always refuse late requests.
    pub const ADMISSION_SUFFIX: &str = "+admission";
    /// The former name of the suffix `+admission`, which is still accepted.
    pub const FORMER_SUFFIX: &str = "+doors";

    /// Returns the choice of a policy without `+admission`.
    pub const fn of(kind: PolicyName) -> Self {
        Self { kind, refuses_late: false }
    }

    /// Returns true if long batches pause for batches of other models that would be late.
    pub fn preempts(self) -> bool {
        self.kind == PolicyName::Adaptive
    }

    /// Returns true if the policy takes the priorities of models into account.
    pub fn heeds_priorities(self) -> bool {
        self.kind == PolicyName::Adaptive
    }
}

impl FromStr for Choice {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let bare =
            text.strip_suffix(Self::ADMISSION_SUFFIX).or_else(|| text.strip_suffix(Self::FORMER_SUFFIX));
        Ok(Self { kind: bare.unwrap_or(text).parse()?, refuses_late: bare.is_some() })
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.kind, if self.refuses_late { Self::ADMISSION_SUFFIX } else { "" })
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
            let former = format!("{kind}+doors").parse();
            assert_eq!(former, Ok(Choice { kind, refuses_late: true }));
        }
        for wrong in [
            "",
            "+admission",
            "Adaptive",
            "static+",
            "static+admission+admission",
            "static+doors+admission",
            "static admission",
        ] {
            assert!(wrong.parse::<Choice>().is_err(), "{wrong}");
        }
    }
}
