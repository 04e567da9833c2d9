//! Who may have how many SMs.
//!
//! All models have the same cap where they may, so that those who have more to do than there is room for share alike:
//! who is refused for whom is for the doors to say. The level is the highest at which nobody who has much to do is crowded out by caps that
//! he may not have himself; but for his sake nobody above his priority has less. Only for that, and where caps must fit onto the GPU
//! together, does a lower priority have less than the one above it.

use shadowslice_shared::units::Sms;

use super::super::Terms;
use super::regime::Caps;

/// What each priority weighs against the first where caps must fit; lower ones weigh as the last.
const WEIGHTS: [f64; 3] = [1.0, 0.8, 0.65];

/// The part of its fair share that everybody keeps when all execute.
const FAIR: f64 = 0.9;

/// The part of the level that must be left where caps fit and nobody has less than what is of use to him.
const LEFT_BY_LEAST: f64 = 0.75;

/// One model of a GPU.
#[derive(Debug, Clone, Copy)]
struct Claim {
    /// Its priority's place among those there, from 0.
    rank: usize,
    min: u32,
    max: u32,
    /// Less is of no use to it, as far as that is known. What that costs others is small beside what it would lose; whom it keeps
    /// from his SLO above it, it [makes room](super::yielding) for.
    least: u32,
    /// As much carries its demand, as far as that is known.
    enough: u32,
}

impl Claim {
    /// Its cap at a level.
    fn cap(&self, level: f64) -> u32 {
        even(level).max(self.least).min(self.max).max(self.min)
    }

    /// The same where caps must fit.
    fn fitting_cap(&self, level: f64) -> u32 {
        self.cap(WEIGHTS[self.rank.min(WEIGHTS.len() - 1)] * level)
    }
}

/// The shares that are of use to a model, as far as they are known.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Useful {
    /// With less no request keeps the SLO.
    pub(super) least: Option<Sms>,
    /// As much carries its demand.
    pub(super) enough: Option<Sms>,
}

/// The most that each model of a GPU should have: generous caps, or such as fit.
pub(super) fn levels(
    here: &[usize],
    terms: &[Terms],
    gpu: Sms,
    caps: Caps,
    useful: impl Fn(usize) -> Useful,
) -> Vec<Sms> {
    let claims = claims(here, terms, gpu, useful);
    match caps {
        Caps::Generous => generous(&claims, gpu),
        Caps::Fitting => fitting(&claims, gpu),
    }
}

fn claims(here: &[usize], terms: &[Terms], gpu: Sms, useful: impl Fn(usize) -> Useful) -> Vec<Claim> {
    let mut priorities: Vec<u32> = here.iter().map(|&model| terms[model].priority).collect();
    priorities.sort_unstable();
    priorities.dedup();
    let claim = |&model: &usize| {
        let Terms { min, max, priority, .. } = terms[model];
        let rank = priorities.partition_point(|&other| other < priority);
        let Useful { least, enough } = useful(model);
        let least = least.map_or(0, |sms| sms.0);
        let enough = enough.map_or(gpu.0, |sms| sms.0);
        Claim { rank, min: min.0, max: max.0.min(gpu.0).max(min.0), least, enough }
    };
    here.iter().map(claim).collect()
}

/// The levels that there are, the highest first.
fn steps(gpu: Sms) -> impl Iterator<Item = f64> {
    (1..=(gpu.0 / Sms::STEP).max(1)).rev().map(|step| f64::from(step * Sms::STEP))
}

/// Caps at the highest level that is fair to each priority, the highest first: those below have no more than that.
fn generous(claims: &[Claim], gpu: Sms) -> Vec<Sms> {
    let ranks = claims.iter().map(|claim| claim.rank + 1).max().unwrap_or(0);
    let mut level = f64::from(gpu.0);
    let mut caps = vec![Sms(0); claims.len()];
    for rank in 0..ranks {
        let below: Vec<Claim> = claims.iter().copied().filter(|claim| claim.rank >= rank).collect();
        let partition = f64::from(gpu.0) / below.len() as f64;
        let mut levels = steps(gpu).filter(|&lower| lower <= level).take_while(|&level| level > partition);
        level = levels.find(|&level| fair(&below, rank, gpu, level)).unwrap_or(partition.min(level));
        for (cap, claim) in caps.iter_mut().zip(claims).filter(|(_, claim)| claim.rank == rank) {
            *cap = Sms(claim.cap(level));
        }
    }
    caps
}

/// Caps at the highest level at which they fit onto the GPU, if any does; by the level alone, where it would be much lower for the sake of
/// those to whom that is of no use.
fn fitting(claims: &[Claim], gpu: Sms) -> Vec<Sms> {
    let even: Vec<Claim> = claims.iter().map(|&claim| Claim { least: 0, ..claim }).collect();
    let highest = |claims: &[Claim]| {
        let sum = |level: f64| claims.iter().map(|claim| u64::from(claim.fitting_cap(level))).sum::<u64>();
        steps(gpu).find(|&level| sum(level) <= u64::from(gpu.0))
    };
    let by_level = highest(&even).unwrap_or(f64::from(Sms::STEP));
    let (claims, level) = match highest(claims).filter(|level| *level >= LEFT_BY_LEAST * by_level) {
        Some(level) => (claims, level),
        None => (&even[..], by_level),
    };
    claims.iter().map(|claim| Sms(claim.fitting_cap(level))).collect()
}

/// Whether everybody of that rank has about his fair share at this level when all of these execute, or what he may have of it, or what is
/// enough for him.
fn fair(claims: &[Claim], rank: usize, gpu: Sms, level: f64) -> bool {
    let whole = f64::from(gpu.0);
    let caps: f64 = claims.iter().map(|claim| f64::from(claim.cap(level))).sum();
    let fits = (whole / caps.max(1.0)).min(1.0);
    let share = whole / claims.len() as f64;
    claims.iter().filter(|claim| claim.rank == rank).all(|claim| {
        f64::from(claim.cap(level)) * fits >= FAIR * share.min(f64::from(claim.max.min(claim.enough)))
    })
}

/// The nearest number of SMs that there is.
pub(super) fn even(sms: f64) -> u32 {
    ((sms / f64::from(Sms::STEP)).round() as u32) * Sms::STEP
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::super::fixtures::terms;
    use super::*;

    const GPU: Sms = Sms(132);

    fn of_all(models: &[Terms], caps: Caps) -> Vec<Sms> {
        levels(&(0..models.len()).collect::<Vec<_>>(), models, GPU, caps, |_| Useful::default())
    }

    #[test]
    fn where_generous_caps_do_not_pay_they_fit() {
        let model = |&priority: &u32| Terms { priority, ..terms("a", 50) };
        let models: Vec<Terms> = [1, 2, 2, 3].iter().map(model).collect();
        let caps: Vec<u32> = of_all(&models, Caps::Fitting).iter().map(|sms| sms.0).collect();
        assert!(caps.iter().sum::<u32>() <= 132 && caps.iter().sum::<u32>() > 120, "{caps:?}");
        assert!(caps.is_sorted_by(|a, b| a >= b), "{caps:?}");
        let crowd = vec![models[0].clone(); 100];
        assert!(of_all(&crowd, Caps::Fitting).iter().all(|&sms| sms == Sms(2)));
    }

    fn of(models: &[(u32, u32)]) -> Vec<u32> {
        let model = |&(priority, max): &(u32, u32)| Terms { priority, max: Sms(max), ..terms("a", 50) };
        let models: Vec<Terms> = models.iter().map(model).collect();
        levels(&(0..models.len()).collect::<Vec<_>>(), &models, GPU, Caps::Generous, |_| Useful::default())
            .iter()
            .map(|sms| sms.0)
            .collect()
    }

    #[test]
    fn all_may_have_the_whole_gpu_whatever_their_priority() {
        assert_eq!(of(&[(1, 132), (1, 132), (1, 132)]), [132, 132, 132]);
        assert_eq!(of(&[(3, 132), (7, 132), (3, 132), (9, 132), (12, 132)]), [132; 5]);
        assert_eq!(of(&[(5, 132)]), [132]);
        assert!(of(&[]).is_empty());
    }

    #[test]
    fn who_may_have_little_is_not_crowded_out() {
        let caps = of(&[(1, 40), (1, 132), (1, 132), (1, 132), (1, 132), (1, 132)]);
        let sum: u32 = caps.iter().sum();
        assert_eq!(caps[0], 40);
        assert!(f64::from(caps[0]) * 132.0 / f64::from(sum) >= 0.9 * 22.0, "{caps:?}");
    }

    #[test]
    fn who_may_have_little_takes_nothing_from_priorities_above_his() {
        assert_eq!(of(&[(1, 132), (2, 132), (3, 40)]), [132, 132, 40]);
        // Beside 106 the 40 are 36, which is nine tenths of them, and so they are beside twice 52.
        assert_eq!(of(&[(1, 132), (2, 40), (3, 132)]), [132, 40, 106]);
        assert_eq!(of(&[(1, 40), (2, 132), (3, 132)]), [40, 52, 52]);
    }

    #[test]
    fn who_may_have_little_and_has_little_to_do_is_in_nobodys_way() {
        let models: Vec<Terms> =
            [26, 132, 132, 132, 132].map(|max| Terms { max: Sms(max), ..terms("a", 50) }).to_vec();
        let beside = |enough: Option<Sms>| {
            let of = |model: usize| Useful { least: None, enough: enough.filter(|_| model == 0) };
            levels(&[0, 1, 2, 3, 4], &models, GPU, Caps::Generous, of)[1]
        };
        assert!(beside(None) < Sms(40) && beside(Some(Sms(26))) < Sms(40));
        assert_eq!([2, 6].map(|enough| beside(Some(Sms(enough)))), [GPU; 2]);
        assert!(beside(Some(Sms(12))) < GPU && beside(Some(Sms(12))) > beside(None));
    }

    #[test]
    fn nobody_has_a_share_that_is_of_no_use_to_him() {
        let models = |limited: u32| {
            [limited, 132, 132, 132].map(|max| Terms { max: Sms(max), ..terms("a", 50) }).to_vec()
        };
        let with = |models: &[Terms], caps: Caps, least: Option<u32>| {
            let of = |model: usize| Useful { least: least.filter(|_| model == 1).map(Sms), enough: None };
            levels(&[0, 1, 2, 3], models, GPU, caps, of).iter().map(|sms| sms.0).collect::<Vec<_>>()
        };
        let (crowded, free) = (models(32), models(132));
        let (before, after) =
            (with(&crowded, Caps::Generous, None), with(&crowded, Caps::Generous, Some(66)));
        assert!(before[1] < 66 && after[1] == 66 && after[2] < 66, "{before:?} {after:?}");
        assert_eq!(with(&free, Caps::Generous, Some(66)), [132; 4]);
        let fitting = with(&free, Caps::Fitting, Some(44));
        assert!(fitting[1] == 44 && fitting.iter().sum::<u32>() <= 132, "{fitting:?}");
        let too_much = with(&free, Caps::Fitting, Some(100));
        assert_eq!(too_much, with(&free, Caps::Fitting, None), "the others would have a third");
    }

    #[test]
    fn more_models_than_sms_have_at_least_their_minimum() {
        assert!(of(&[(1, 132); 100]).iter().all(|&sms| sms >= 2));
        let odd = Terms { min: Sms(1), max: Sms(1), ..terms("a", 50) };
        assert_eq!(levels(&[0], &[odd], Sms(1), Caps::Generous, |_| Useful::default()), [Sms(1)]);
    }

    proptest! {
        #[test]
        fn bounds_are_kept_and_a_lower_priority_never_has_more(
            models in prop::collection::vec((1..5_u32, 1..30_u32, 0..132_u32), 1..30)
        ) {
            let model = |&(priority, min, more): &(u32, u32, u32)| {
                Terms { priority, min: Sms(min), max: Sms(min + more), ..terms("a", 50) }
            };
            let models: Vec<Terms> = models.iter().map(model).collect();
            for caps in [Caps::Generous, Caps::Fitting] {
                let shares = of_all(&models, caps);
                for (one, &share) in models.iter().zip(&shares) {
                    prop_assert!(share >= one.min && share <= one.max);
                    for (other, &others) in models.iter().zip(&shares) {
                        let bound = share == one.min || other.max < share;
                        let as_much = others.0 + Sms::STEP > share.0;
                        prop_assert!(other.priority > one.priority || bound || as_much);
                    }
                }
            }
        }
    }
}
