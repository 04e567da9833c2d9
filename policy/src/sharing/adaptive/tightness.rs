//! Whose SLO leaves no room for a smaller share.
//!
//! A share that carries a demand may be too small for an SLO all the same: what it carries goes by mean times, and a request whose
//! execution takes much of its SLO is late as soon as neighbours execute. While all of them do, each has its proportion of the
//! GPU by the caps, so a share that shrinks beside others that do not is squeezed the more.

use shadowslice_shared::units::Sms;

use super::super::Terms;
use super::model::Model;

/// A request alone may execute for this part of its SLO while all neighbours execute: the batch before comes before it, and either
/// may have several.
const PART: f64 = 0.25;

/// A model, the share that it should have for its demand, and the one that it has if that leaves it no slack.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tenant<'a> {
    pub(super) model: &'a Model,
    pub(super) terms: &'a Terms,
    pub(super) wanted: Sms,
    pub(super) kept: Sms,
}

impl Tenant<'_> {
    fn has_less(&self) -> bool {
        self.wanted < self.kept
    }

    /// Whether a request would take too long with the wanted share, of which this part is left while all execute.
    fn is_late(&self, left: f64) -> bool {
        let time = self.model.time_of_one(f64::from(self.wanted.0) * left);
        time.is_some_and(|seconds| seconds > PART * self.terms.slo.as_secs_f64())
    }
}

/// Which of a GPU's models must keep more than their demand asks for.
pub(super) fn tight(tenants: &[Tenant<'_>], gpu: Sms) -> Vec<bool> {
    let mut tight = vec![false; tenants.len()];
    // Each that keeps its share leaves less to the others.
    loop {
        let caps: u32 = tenants
            .iter()
            .zip(&tight)
            .map(|(tenant, &tight)| if tight { tenant.kept.0 } else { tenant.wanted.0 })
            .sum();
        let left = (f64::from(gpu.0) / f64::from(caps.max(1))).min(1.0);
        let late =
            |(tenant, tight): (&Tenant<'_>, &bool)| !tight && tenant.has_less() && tenant.is_late(left);
        match tenants.iter().zip(&tight).position(late) {
            Some(model) => tight[model] = true,
            None => return tight,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shadowslice_shared::units::Moment;

    use super::super::super::fixtures::{live, profile, terms};
    use super::super::super::{Facts, Kind, Live, Policy, Seen};
    use super::*;

    /// Which are tight of models with 132 SMs that want others, whose row takes 2 ms and 70 ms·SM up to 66 SMs, and with these SLOs in ms.
    fn of(models: &[(u32, u64)]) -> Vec<bool> {
        let terms: Vec<Terms> = models
            .iter()
            .map(|&(_, slo)| Terms { profile: Some(profile(2.0, 70.0, 66)), ..terms("a", slo) })
            .collect();
        let gpu = Sms(132);
        let known: Vec<Model> = terms.iter().map(|terms| Model::new(terms, gpu)).collect();
        let tenant = |((model, terms), &(wanted, _)): ((_, _), &(u32, u64))| Tenant {
            model,
            terms,
            wanted: Sms(wanted),
            kept: gpu,
        };
        tight(&known.iter().zip(&terms).zip(models).map(tenant).collect::<Vec<_>>(), gpu)
    }

    #[test]
    fn who_has_slack_beside_his_neighbours_may_shrink() {
        // 2 + 70 / 52 ms is a quarter of 13.4 ms.
        assert_eq!(of(&[(52, 14)]), [false]);
        assert_eq!(of(&[(52, 13)]), [true]);
        // Two of 100 SMs have 66 each, and more is of no use.
        assert_eq!(of(&[(100, 14), (100, 14)]), [false, false]);
        // Six of 52 have 22 each: 5.2 ms.
        assert_eq!(of(&[(52, 22); 6]), [false; 6]);
        assert_eq!(of(&[(52, 20); 6]), [true; 6]);
    }

    #[test]
    fn who_keeps_his_share_leaves_less_to_the_others() {
        // Of 364 SMs that seven have the 52 of one are 19, and of 444, where the first keeps 132, 15.
        let others = [(52, 26); 6];
        assert_eq!(of(&[&[(52, 100)][..], &others].concat()), [false; 7]);
        assert_eq!(of(&[&[(52, 10)][..], &others].concat()), [true; 7]);
    }

    #[test]
    fn who_does_not_shrink_is_not_asked() {
        assert_eq!(of(&[(132, 3), (132, 3)]), [false, false]);
    }

    #[test]
    fn of_whom_nothing_is_known_nothing_is_said() {
        let terms = terms("a", 1);
        let model = Model::new(&terms, Sms(132));
        let tenant = Tenant { model: &model, terms: &terms, wanted: Sms(20), kept: Sms(132) };
        assert_eq!(tight(&[tenant], Sms(132)), [false]);
    }

    /// The SMs of models with these SLOs in ms after half a minute with forty requests a second for each, if the last one is held.
    fn in_the_end(slos: &[u64], held: bool) -> Vec<u32> {
        let gpu = Sms(132);
        let terms: Vec<Terms> = slos
            .iter()
            .map(|&slo| Terms { profile: Some(profile(2.0, 70.0, 66)), ..terms("a", slo) })
            .collect();
        let mut policy = Policy::new(Kind::Adaptive, &[gpu], &terms);
        let seen = Seen {
            span: Duration::from_millis(500),
            arrived: 20,
            answered: 20,
            in_time: 20,
            ..Seen::default()
        };
        let live = |&share| Live { seen: seen.clone(), ..live(share) };
        let mut facts = Facts {
            now: Moment::after_origin(Duration::from_secs(60)),
            gpus: vec![gpu],
            models: policy.initial().iter().map(live).collect(),
        };
        if let Some(last) = facts.models.last_mut() {
            last.held = held;
        }
        for _ in 0..60 {
            facts.now = facts.now + Duration::from_millis(500);
            for change in policy.decide(&facts).plan.into_iter().flat_map(|plan| plan.changes) {
                facts.models[change.model].share = change.to;
            }
        }
        facts.models.iter().map(|live| live.share.0).collect()
    }

    #[test]
    fn the_policy_leaves_him_his_share() {
        assert_eq!(in_the_end(&[13], false), [132]);
        assert_eq!(in_the_end(&[14], false), [52]);
    }

    #[test]
    fn who_is_held_leaves_what_he_leaves() {
        assert_eq!(in_the_end(&[14, 50], false), [52, 52]);
        assert_eq!(in_the_end(&[14, 50], true), [132, 132], "of 184 SMs the 52 are 37");
    }
}
