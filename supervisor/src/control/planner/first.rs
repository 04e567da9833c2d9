//! The shares that models start with.

use shadowslice_policy::sharing::{Choice, Facts, Kind, Live, Seen, Terms};
use shadowslice_shared::units::{Moment, Sms};

/// The SMs that models on these GPUs start with, by what the policy says. Ours starts them with what somebody chose, but
/// where it would change that at once: a hand-over then is a worker started twice.
pub fn sms(choice: Choice, gpus: &[Sms], terms: &[Terms]) -> Vec<Sms> {
    let mut policy = choice.policy(gpus, terms);
    let mut first = policy.initial();
    if choice.kind != Kind::Adaptive {
        return first;
    }
    for (sms, terms) in first.iter_mut().zip(terms).filter(|(_, terms)| terms.initial_given) {
        *sms = terms.initial;
    }
    let models = first.iter().map(|&share| just_started(share)).collect();
    let decision = policy.decide(&Facts { now: Moment::default(), gpus: gpus.to_vec(), models });
    for change in decision.plan.iter().flat_map(|plan| &plan.changes) {
        first[change.model] = terms[change.model].within(change.to);
    }
    first
}

fn just_started(share: Sms) -> Live {
    let (since, seen) = (Moment::default(), Seen::default());
    Live { share, since, coming: None, standing: None, held: false, seen }
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::profile::{Execution, Memory, Profile, Row, Source, Start};

    use super::*;

    const GPU: Sms = Sms(132);

    /// One model whose batches gain from SMs up to 66.
    fn terms(initial: u32, initial_given: bool, max: u32) -> Terms {
        let row = Row { batch: 1, ms: vec![20.0, 10.0] };
        let profile = Profile {
            source: Source::Illustrative,
            memory: Memory::default(),
            start: Start::default(),
            bandwidth: 0.1,
            execution: Execution::new(vec![Sms(33), Sms(66)], vec![row]).unwrap(),
        };
        Terms {
            name: "a".to_owned(),
            gpu: 0,
            initial: Sms(initial),
            initial_given,
            min: Sms(2),
            max: Sms(max),
            slo: std::time::Duration::from_millis(50),
            percentile: 99.0,
            priority: 1,
            max_batch: 1,
            profile: Some(profile),
        }
    }

    fn first(kind: Kind, terms: Terms) -> u32 {
        sms(Choice::of(kind), &[GPU], &[terms])[0].0
    }

    #[test]
    fn nobody_starts_with_a_share_that_ours_would_change_at_once() {
        let level = first(Kind::Adaptive, terms(20, false, 132));
        assert!(level > 100, "{level}");
        assert_eq!(first(Kind::Adaptive, terms(20, true, 132)), level, "less than ours leaves anybody");
        assert_eq!(first(Kind::Adaptive, terms(80, true, 132)), 80, "chosen, and enough for now");
        assert_eq!(first(Kind::Adaptive, terms(20, true, 60)), 60, "bounds");
    }

    #[test]
    fn the_other_policies_say_with_what_they_start() {
        for (kind, share) in [(Kind::Static, 20), (Kind::Gslice, 20), (Kind::Equal, 132), (Kind::Half, 60)] {
            let max = if kind == Kind::Half { 60 } else { 132 };
            assert_eq!(first(kind, terms(20, true, max)), share, "{kind}");
        }
    }
}
