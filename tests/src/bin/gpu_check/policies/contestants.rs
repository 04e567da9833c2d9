//! The policies that are compared, and the order in which they run.

use super::mix::MixModel;

/// A policy to compare: its name in the figures, and its configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contestant {
    pub(super) name: &'static str,
    pub(super) policy: &'static str,
    pub(super) shares: InitialShares,
    pub(super) handover: &'static str,
    /// True if models share the GPU through MPS. False if the driver gives them time slices.
    pub(super) mps: bool,
    /// True if long batches can pause between two pieces.
    pub(super) preempt: bool,
    /// True if the policy runs when neither the mix nor the command line names policies.
    by_default: bool,
}

/// The initial shares of a mix's models. Under `static`, models keep these shares.
#[derive(Debug, Clone, Copy)]
pub(super) enum InitialShares {
    /// The policy chooses the shares.
    OfPolicy,
    /// The mix sets the shares.
    OfMix,
    /// Every model has the whole GPU.
    Whole,
    /// Models have equal shares, which add up to this percentage of the GPU.
    Equal(u32),
    /// Models with the highest priority have the whole GPU, and all other models half of it.
    PriorityHalf,
}

const fn by_default(
    name: &'static str,
    policy: &'static str,
    shares: InitialShares,
    handover: &'static str,
) -> Contestant {
    Contestant { name, policy, shares, handover, mps: true, preempt: true, by_default: true }
}

/// Makes a policy with fixed shares that runs only if the mix or the command line names it.
const fn if_named(name: &'static str, policy: &'static str, shares: InitialShares) -> Contestant {
    Contestant { by_default: false, ..by_default(name, policy, shares, "auto") }
}

const CONTESTANTS: [Contestant; 13] = [
    by_default("unpartitioned", "static", InitialShares::Whole, "auto"),
    by_default("adaptive", "adaptive", InitialShares::OfPolicy, "auto"),
    by_default("adaptive, shadows", "adaptive", InitialShares::OfPolicy, "shadow"),
    by_default("unpartitioned+admission", "static+admission", InitialShares::Whole, "auto"),
    by_default("half+admission", "static+admission", InitialShares::Equal(200), "auto"),
    Contestant { mps: false, ..by_default("time slicing", "static", InitialShares::Whole, "never") },
    by_default("unpartitioned, again", "static", InitialShares::Whole, "auto"),
    by_default("by hand+admission", "static+admission", InitialShares::OfMix, "auto"),
    Contestant { preempt: false, ..if_named("adaptive, no preemption", "adaptive", InitialShares::OfPolicy) },
    if_named("half", "static", InitialShares::Equal(200)),
    if_named("equal+admission", "static+admission", InitialShares::Equal(100)),
    if_named("priority-half+admission", "static+admission", InitialShares::PriorityHalf),
    Contestant {
        handover: "shadow",
        ..if_named("unpartitioned+admission, shadows", "static+admission", InitialShares::Whole)
    },
];

impl Contestant {
    /// Returns true if the policy takes the shares from the mix.
    fn is_by_hand(self) -> bool {
        matches!(self.shares, InitialShares::OfMix)
    }

    /// Returns the initial share of a model, in percent. Returns `None` if the policy chooses it.
    pub(super) fn share_of(self, model: &MixModel, models: &[MixModel]) -> Option<u32> {
        let first = models.iter().map(|other| other.priority).min();
        match self.shares {
            InitialShares::OfPolicy => None,
            InitialShares::OfMix => model.share_percent,
            InitialShares::Whole => Some(100),
            InitialShares::Equal(sum) => Some((sum / models.len() as u32).clamp(1, 100)),
            InitialShares::PriorityHalf => Some(if Some(model.priority) == first { 100 } else { 50 }),
        }
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
            let contestants = ["a", "b"].map(|name| by_default(name, "static", InitialShares::Whole, "auto"));
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
