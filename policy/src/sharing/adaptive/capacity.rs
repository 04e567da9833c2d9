//! What a model carries at each share.

use shadowslice_shared::units::Sms;

use super::super::Terms;
use super::batching::Batching;
use super::curve::Curve;

/// The part of the time in which a lane may execute, if requests that come at random are to be in time.
const FULL: f64 = 0.9;

/// Shares are looked at in steps of about this factor.
const STEP: f64 = 1.12;

/// More SMs that carry less than this many times as much are past the knee.
const KNEE: f64 = 1.08;

/// Shares, and what the model carries there in rows a second within its SLO. Both ascend.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Capacity(Vec<(Sms, f64)>);

impl Capacity {
    pub(super) fn of(terms: &Terms, curve: &Curve, gpu: Sms) -> Self {
        let mut points: Vec<(Sms, f64)> = Vec::new();
        for sms in grid(terms.min, terms.max.min(gpu).max(terms.min)) {
            let batching = Batching { terms, curve, sms: f64::from(sms.0), rate: 0.0, each: 1.0 };
            let carried = FULL * batching.most();
            match points.last() {
                Some(&(_, before)) if carried <= before * KNEE => {}
                _ => points.push((sms, carried)),
            }
        }
        Self(points)
    }

    /// What the model carries with so many SMs; nothing where more would be of no use.
    pub(super) fn of_less(&self, share: Sms) -> Option<f64> {
        let above = self.0.partition_point(|&(sms, _)| sms <= share);
        let below = above.checked_sub(1).map_or(0.0, |index| self.0[index].1);
        (above < self.0.len()).then_some(below)
    }

    /// The smallest share at which one row keeps the SLO; nothing where none does, or while nothing is known.
    pub(super) fn least(&self) -> Option<Sms> {
        self.0.iter().find(|&&(_, carried)| carried > 0.0).map(|&(sms, _)| sms)
    }

    /// What the model carries at most; nothing while nothing is known.
    pub(super) fn most(&self) -> Option<f64> {
        self.0.last().map(|&(_, carried)| carried)
    }

    /// What the model executes at most, in batches one after the other that keep the SLO by themselves; nothing while nothing is known.
    pub(super) fn limit(&self) -> Option<f64> {
        self.most().map(|most| most / FULL)
    }

    /// The smallest share that carries so many rows a second, or the largest that is of use.
    pub(super) fn share_for(&self, rate: f64) -> Option<Sms> {
        let index = self.0.partition_point(|&(_, carried)| carried < rate);
        self.0.get(index).or(self.0.last()).map(|&(sms, _)| sms)
    }
}

/// Shares from one to the other, both included.
fn grid(min: Sms, max: Sms) -> impl Iterator<Item = Sms> {
    let next = move |sms: &Sms| {
        let even = (f64::from(sms.0) * STEP / f64::from(Sms::STEP)).ceil() as u32 * Sms::STEP;
        (sms.0 < max.0).then_some(Sms(even.max(sms.0 + Sms::STEP).min(max.0)))
    };
    std::iter::successors(Some(min), next)
}

#[cfg(test)]
mod tests {
    use super::super::super::fixtures::{profile, terms};
    use super::*;

    /// 2 ms and 70 ms·SM a row, up to 66 SMs; 50 ms.
    fn capacity(min: u32, max: u32) -> Capacity {
        let terms = Terms { min: Sms(min), max: Sms(max), ..terms("a", 50) };
        Capacity::of(&terms, &Curve::new(Some(&profile(2.0, 70.0, 66).execution)), Sms(132))
    }

    #[test]
    fn more_is_carried_by_more_up_to_the_knee() {
        let capacity = capacity(2, 132);
        assert!(capacity.0.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1));
        assert!(capacity.0.last().unwrap().0 <= Sms(74));
        // Eleven rows take 32 ms on 26 SMs: 0.9 · 346 requests a second.
        let share = capacity.share_for(310.0).unwrap();
        assert!((24..=28).contains(&share.0), "{share:?}");
        assert_eq!(capacity.share_for(1e9), capacity.0.last().map(|point| point.0));
    }

    #[test]
    fn less_carries_less_until_more_is_of_no_use() {
        let capacity = capacity(2, 132);
        for &(sms, carried) in &capacity.0[..capacity.0.len() - 1] {
            assert_eq!(capacity.of_less(sms), Some(carried));
            assert_eq!(capacity.of_less(Sms(sms.0 + 1)), Some(carried));
        }
        let (knee, _) = capacity.0[capacity.0.len() - 1];
        assert_eq!([knee, Sms(132)].map(|sms| capacity.of_less(sms)), [None; 2]);
        assert_eq!(capacity.of_less(Sms(1)), Some(0.0));
    }

    #[test]
    fn bounds_are_kept() {
        assert_eq!(capacity(8, 20).share_for(0.0), Some(Sms(8)));
        assert_eq!(capacity(8, 20).share_for(1e9), Some(Sms(20)));
        assert_eq!(capacity(7, 7).share_for(1.0), Some(Sms(7)));
        assert_eq!(Capacity::default().share_for(1.0), None);
    }
}
