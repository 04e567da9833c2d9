//! Doors: how a model batches, and whom it turns away.

use std::time::Duration;

use shadowslice_shared::units::Sms;

use super::{Door, Terms};

/// A batch is on its way this long before the one before it should end. That is several times what the way
/// takes, and a small part of an execution.
pub(super) const LEAD: Duration = Duration::from_micros(500);

/// The door of a model at a share, by its profile: the largest batch that executes within half of the
/// SLO, because a request may come when one has just started. Late requests are refused.
pub(super) fn of(terms: &Terms, share: Sms) -> Door {
    let Some(profile) = &terms.profile else {
        return Door { max_batch: terms.max_batch, refuse_late: true, lead: LEAD };
    };
    let fits = |batch: u32| profile.execution.time(batch, f64::from(share.0)) <= terms.slo / 2;
    Door { max_batch: largest(terms.max_batch, fits), refuse_late: true, lead: LEAD }
}

/// The largest batch up to `limit` that fits, where smaller ones fit if larger ones do; at least 1.
pub(super) fn largest(limit: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut fitting, mut above) = (1, limit.max(1) + 1);
    while above - fitting > 1 {
        let middle = fitting + (above - fitting) / 2;
        if fits(middle) { fitting = middle } else { above = middle }
    }
    fitting
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{profile, terms};
    use super::*;

    #[test]
    fn more_sms_allow_larger_batches() {
        let terms = Terms { profile: Some(profile(1.0, 100.0, 132)), ..terms("a", 50) };
        let batch = |sms| of(&terms, Sms(sms)).max_batch;
        assert_eq!([2, 26, 66, 132].map(batch), [1, 6, 15, 16]);
    }

    #[test]
    fn a_search_that_nothing_fits_ends_at_one() {
        assert_eq!(largest(16, |_| false), 1);
        assert_eq!(largest(16, |_| true), 16);
        assert_eq!(largest(0, |_| true), 1);
    }
}
