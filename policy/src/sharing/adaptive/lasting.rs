//! For how long what was found out is taken for true.

use super::loads::Loads;

/// The first time, in seconds; each time that it is found out again twice as long,
const FIRST_S: f64 = 120.0;

/// up to this: who is so now and then is to come to rest.
const LONGEST_S: f64 = 3_600.0;

/// What was not found out again for so many seconds, a day, begins anew: a bad hour is not held against anybody for months.
pub(super) const FORGOTTEN_S: f64 = 86_400.0;

/// How often something was found out.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lasting {
    times: i32,
    /// Seconds since the last time.
    since_s: f64,
}

impl Lasting {
    /// It is found out once more: for so many seconds it is taken for true.
    pub(super) fn again(&mut self) -> f64 {
        let seconds = (FIRST_S * 2_f64.powi(self.times)).min(LONGEST_S);
        *self = Self { times: self.times.saturating_add(1), since_s: 0.0 };
        seconds
    }

    /// So many seconds are over.
    pub(super) fn age(&mut self, seconds: f64) {
        self.since_s += seconds;
        if self.since_s >= FORGOTTEN_S {
            *self = Self::default();
        }
    }
}

/// What was found out under some loads: true for a while, and then until they change; for an hour more at most.
#[derive(Debug, Clone, Default)]
pub(super) struct Finding {
    lasting: Lasting,
    left_s: f64,
    under: Option<Loads>,
}

impl Finding {
    /// It was found out, once more perhaps.
    pub(super) fn again(&mut self, loads: &Loads) {
        (self.left_s, self.under) = (self.lasting.again(), Some(loads.clone()));
    }

    /// Nothing was found out, and it is not looked at again for a while.
    pub(super) fn put_off(&mut self) {
        (self.left_s, self.under) = (self.lasting.again(), None);
    }

    /// So many seconds are over.
    pub(super) fn age(&mut self, seconds: f64) {
        self.left_s -= seconds;
        self.lasting.age(seconds);
    }

    /// It is true no longer.
    pub(super) fn forget(&mut self) {
        (self.left_s, self.under) = (0.0, None);
    }

    /// Whether it is still true under these loads.
    pub(super) fn holds(&self, loads: &Loads) -> bool {
        let alike = |under: &Loads| self.left_s > -LONGEST_S && under.is_like(loads);
        self.left_s > 0.0 || self.under.as_ref().is_some_and(alike)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lasts_twice_as_long_each_time_up_to_an_hour() {
        let mut lasting = Lasting::default();
        assert_eq!(
            [(); 7].map(|()| lasting.again()),
            [120.0, 240.0, 480.0, 960.0, 1_920.0, 3_600.0, 3_600.0]
        );
        assert!((0..10_000).all(|_| lasting.again() == 3_600.0));
    }

    #[test]
    fn what_is_not_found_out_again_for_a_day_begins_anew() {
        let found_after = |hours: u32| {
            let mut lasting = Lasting::default();
            (0..7).for_each(|_| _ = lasting.again());
            (0..hours).for_each(|_| lasting.age(3_600.0));
            lasting.again()
        };
        assert_eq!([1, 23, 24, 1_000].map(found_after), [3_600.0, 3_600.0, 120.0, 120.0]);
    }

    #[test]
    fn so_does_a_finding() {
        let mut finding = Finding::default();
        (0..7).for_each(|_| finding.put_off());
        finding.age(FORGOTTEN_S);
        finding.put_off();
        assert_eq!(finding.left_s, 120.0);
    }
}
