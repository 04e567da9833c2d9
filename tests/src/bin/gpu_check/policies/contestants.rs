//! The policies that are compared, and the order in which they run.

/// A policy as it is called in the figures, and how the configuration has it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contestant {
    pub(super) name: &'static str,
    pub(super) policy: &'static str,
    pub(super) handover: &'static str,
    /// Whether models share the GPU by MPS, or take turns as the driver has it.
    pub(super) mps: bool,
    /// Whether it runs if neither the mix nor the command line names policies.
    by_default: bool,
}

const fn contestant(name: &'static str, policy: &'static str, handover: &'static str) -> Contestant {
    Contestant { name, policy, handover, mps: true, by_default: true }
}

/// A policy that only runs by name.
const fn named(name: &'static str, policy: &'static str, handover: &'static str) -> Contestant {
    Contestant { by_default: false, ..contestant(name, policy, handover) }
}

/// With the shares that a mix gives its models by hand.
const BY_HAND: Contestant = contestant("by hand+doors", "static+doors", "auto");

const CONTESTANTS: [Contestant; 14] = [
    contestant("unpartitioned", "unpartitioned", "auto"),
    contestant("adaptive", "adaptive", "auto"),
    contestant("adaptive, shadows", "adaptive", "shadow"),
    contestant("unpartitioned+doors", "unpartitioned+doors", "auto"),
    contestant("half+doors", "half+doors", "auto"),
    Contestant { mps: false, ..contestant("time slicing", "unpartitioned", "never") },
    contestant("unpartitioned, again", "unpartitioned", "auto"),
    BY_HAND,
    named("half", "half", "auto"),
    named("equal+doors", "equal+doors", "auto"),
    named("priority-half+doors", "priority-half+doors", "auto"),
    named("gslice+doors", "gslice+doors", "auto"),
    named("gpulet+doors", "gpulet+doors", "auto"),
    named("unpartitioned+doors, shadows", "unpartitioned+doors", "shadow"),
];

impl Contestant {
    /// Whether it takes the shares from the mix.
    pub(super) fn is_by_hand(self) -> bool {
        self.name == BY_HAND.name
    }

    /// Returns those to run, in order: the ones on the command line, else the mix's, else the
    /// default ones.
    pub(super) fn chosen(wanted: &[String], of_mix: &[String], has_shares: bool) -> Vec<Self> {
        let names = if wanted.is_empty() { of_mix } else { wanted };
        let named = |name: &String| CONTESTANTS.into_iter().find(|of| of.name == name);
        let chosen: Vec<Self> = match names {
            [] => CONTESTANTS.into_iter().filter(|of| of.by_default).collect(),
            names => names.iter().filter_map(named).collect(),
        };
        chosen.into_iter().filter(|of| has_shares || !of.is_by_hand()).collect()
    }
}

/// The names of all policies in the figures.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    CONTESTANTS.iter().map(|contestant| contestant.name)
}

/// The suffix of a policy's name from the second round on.
pub(crate) const ROUND: &str = ", round ";

/// These policies in turn, and back in every other round, each with its name in the figures.
pub(super) fn rounds(contestants: &[Contestant], rounds: u32) -> Vec<(String, Contestant)> {
    let round = |round: u32| {
        let mut contestants = contestants.to_vec();
        if round % 2 == 1 {
            contestants.reverse();
        }
        let named = move |contestant: Contestant| match round {
            0 => (contestant.name.to_owned(), contestant),
            _ => (format!("{}{ROUND}{}", contestant.name, round + 1), contestant),
        };
        contestants.into_iter().map(named)
    };
    (0..rounds).flat_map(round).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_other_round_goes_back() {
        let names = |count: u32| -> Vec<String> {
            let contestants = [contestant("a", "x", "auto"), contestant("b", "y", "auto")];
            rounds(&contestants, count).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(1), ["a", "b"]);
        assert_eq!(names(3), ["a", "b", "b, round 2", "a, round 2", "a, round 3", "b, round 3"]);
    }

    #[test]
    fn the_command_line_goes_before_the_mix() {
        let chosen = |wanted: &[&str], of_mix: &[&str], has_shares| -> Vec<&str> {
            let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
            let chosen = Contestant::chosen(&owned(wanted), &owned(of_mix), has_shares);
            chosen.into_iter().map(|contestant| contestant.name).collect()
        };
        assert_eq!(chosen(&["half"], &["adaptive"], false), ["half"]);
        assert_eq!(chosen(&[], &["adaptive", "by hand+doors"], false), ["adaptive"]);
        assert_eq!(chosen(&[], &[], true).len(), 8);
        assert_eq!(chosen(&[], &[], false).len(), 7);
    }
}
