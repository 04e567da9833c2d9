//! The policies that are compared, and the order in which they run.

/// A policy to compare: its name in the figures, and its configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contestant {
    pub(super) name: &'static str,
    pub(super) policy: &'static str,
    pub(super) handover: &'static str,
    /// True if models share the GPU through MPS. False if the driver gives them time slices.
    pub(super) mps: bool,
    /// True if the policy runs when neither the mix nor the command line names policies.
    by_default: bool,
}

const fn by_default(name: &'static str, policy: &'static str, handover: &'static str) -> Contestant {
    Contestant { name, policy, handover, mps: true, by_default: true }
}

/// Makes a policy that runs only if the mix or the command line names it.
const fn if_named(name: &'static str, policy: &'static str, handover: &'static str) -> Contestant {
    Contestant { by_default: false, ..by_default(name, policy, handover) }
}

/// The policy with fixed shares, which the mix sets for each model.
const BY_HAND: Contestant = by_default("by hand+admission", "static+admission", "auto");

const CONTESTANTS: [Contestant; 14] = [
    by_default("unpartitioned", "unpartitioned", "auto"),
    by_default("adaptive", "adaptive", "auto"),
    by_default("adaptive, shadows", "adaptive", "shadow"),
    by_default("unpartitioned+admission", "unpartitioned+admission", "auto"),
    by_default("half+admission", "half+admission", "auto"),
    Contestant { mps: false, ..by_default("time slicing", "unpartitioned", "never") },
    by_default("unpartitioned, again", "unpartitioned", "auto"),
    BY_HAND,
    if_named("half", "half", "auto"),
    if_named("equal+admission", "equal+admission", "auto"),
    if_named("priority-half+admission", "priority-half+admission", "auto"),
    if_named("gslice+admission", "gslice+admission", "auto"),
    if_named("gpulet+admission", "gpulet+admission", "auto"),
    if_named("unpartitioned+admission, shadows", "unpartitioned+admission", "shadow"),
];

impl Contestant {
    /// Returns true if the policy takes the shares from the mix.
    pub(super) fn is_by_hand(self) -> bool {
        self.name == BY_HAND.name
    }

    /// Returns the policies to run, in order: those of the command line, otherwise those of the
    /// mix, otherwise the default policies.
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

/// Returns the names of all policies as they appear in the figures.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    CONTESTANTS.iter().map(|contestant| contestant.name)
}

/// The text between the name of a policy and the number of the round. Names in the first round have
/// neither.
pub(crate) const ROUND: &str = ", round ";

/// Returns the policies of all rounds, each with its name in the figures. Every second round has
/// the reverse order.
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
    fn every_other_round_is_reversed() {
        let names = |count: u32| -> Vec<String> {
            let contestants = [by_default("a", "x", "auto"), by_default("b", "y", "auto")];
            rounds(&contestants, count).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(1), ["a", "b"]);
        assert_eq!(names(3), ["a", "b", "b, round 2", "a, round 2", "a, round 3", "b, round 3"]);
    }

    #[test]
    fn the_command_line_has_precedence_over_the_mix() {
        let chosen = |wanted: &[&str], of_mix: &[&str], has_shares| -> Vec<&str> {
            let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
            let chosen = Contestant::chosen(&owned(wanted), &owned(of_mix), has_shares);
            chosen.into_iter().map(|contestant| contestant.name).collect()
        };
        assert_eq!(chosen(&["half"], &["adaptive"], false), ["half"]);
        assert_eq!(chosen(&[], &["adaptive", "by hand+admission"], false), ["adaptive"]);
        assert_eq!(chosen(&[], &[], true).len(), 8);
        assert_eq!(chosen(&[], &[], false).len(), 7);
    }
}
