//! Whether a model has come to rest: for a while it has wanted no other share under the same demand.
//!
//! Whether a share should shrink hangs on what is known of a rate, of bursts and of what neighbours leave, and that goes up and down by
//! chance for as long as one looks. So a share shrinks soon after something changed, or stays: a cap reserves nothing, and a hand-over
//! for nothing disturbs others. Who needs more has it all the same, and who is to leave SMs to others leaves them.

use shadowslice_shared::units::Sms;

use super::super::Live;
use super::demand::Demand;

/// After so many seconds it has: three times a dwell time.
const AFTER_S: f64 = 15.0;

/// What a model has had since something changed.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rest {
    share: Option<Sms>,
    /// The demand then, in requests a second; once rest is reached, that at which it was.
    rate: f64,
    seconds: f64,
}

impl Rest {
    /// Learns from an interval, after the demand has, and whether it `may` bring rest.
    pub(super) fn observe(&mut self, live: &Live, demand: &Demand, may: bool) {
        let moves = live.held || live.coming.is_some() || self.share != Some(live.share);
        if moves || !may || demand.is_another_than(self.rate) {
            *self = Self { share: Some(live.share), rate: demand.rate(), seconds: 0.0 };
            return;
        }
        let rested = self.is_reached();
        self.seconds += live.seen.span.as_secs_f64();
        if !rested && self.is_reached() {
            // What a rate was when something changed was known from a moment only.
            self.rate = demand.rate();
        }
    }

    pub(super) fn is_reached(self) -> bool {
        self.seconds >= AFTER_S
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::Seen;
    use super::super::super::fixtures::live;
    use super::*;

    /// So many requests in half a second.
    fn came(arrived: u64) -> Live {
        let seen = Seen { span: Duration::from_millis(500), arrived, ..Seen::default() };
        Live { seen, ..live(Sms(100)) }
    }

    #[derive(Default)]
    struct Watched {
        demand: Demand,
        rest: Rest,
    }

    impl Watched {
        fn see(&mut self, live: &Live, may: bool) -> bool {
            self.demand.observe(&live.seen);
            self.rest.observe(live, &self.demand, may);
            self.rest.is_reached()
        }

        /// One to which fifty requests have come in each half of a second for a minute.
        fn at_rest() -> Self {
            let mut new = Self::default();
            (0..120).for_each(|_| _ = new.see(&came(50), true));
            assert!(new.rest.is_reached());
            new
        }

        /// The intervals in which nothing changes until it is at rest again.
        fn rests_after(mut self, live: &Live) -> Option<u32> {
            (0..200).find(|_| self.see(live, true))
        }
    }

    #[test]
    fn what_stays_for_long_is_at_rest() {
        assert_eq!(Watched::default().rests_after(&came(50)), Some(30), "an interval, and fifteen seconds");
        assert_eq!(Watched::default().rests_after(&came(0)), Some(30));
    }

    #[test]
    fn chance_disturbs_nobody() {
        let mut watched = Watched::at_rest();
        let chance = |at: u32| 50 + 7 * u64::from(at % 3) - 7;
        assert!((0..1_000).all(|at| watched.see(&came(chance(at)), true)));
    }

    #[test]
    fn who_changes_or_may_not_is_not_at_rest() {
        let changes = [
            came(100),
            came(25),
            Live { share: Sms(80), ..came(50) },
            Live { held: true, ..came(50) },
            Live { coming: Some(Sms(80)), ..came(50) },
        ];
        for changed in changes {
            let mut watched = Watched::at_rest();
            (0..8).for_each(|_| _ = watched.see(&changed, true));
            assert!(!watched.rest.is_reached(), "{changed:?}");
        }
        let mut watched = Watched::at_rest();
        assert!(!watched.see(&came(50), false));
        assert_eq!(watched.rests_after(&came(50)), Some(29));
    }

    #[test]
    fn a_rate_is_held_against_what_is_known_of_it_in_the_end() {
        let mut watched = Watched::default();
        assert!(!watched.see(&came(16), true));
        assert!((0..30).any(|_| watched.see(&came(22), true)));
        assert!((0..1_000).all(|_| watched.see(&came(22), true)));
    }

    #[test]
    fn a_demand_that_creeps_is_another_one_day() {
        let mut watched = Watched::at_rest();
        assert!((0..400).any(|at| !watched.see(&came(50 + at / 8), true)));
    }
}
