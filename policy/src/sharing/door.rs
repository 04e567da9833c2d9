//! Doors: how a model batches, and whom it turns away.

use std::time::Duration;

/// A batch is on its way this long before the one before it should end. That is several times what the way
/// takes, and a small part of an execution.
pub(super) const LEAD: Duration = Duration::from_micros(500);

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
    use super::*;

    #[test]
    fn a_search_that_nothing_fits_ends_at_one() {
        assert_eq!(largest(16, |_| false), 1);
        assert_eq!(largest(16, |_| true), 16);
        assert_eq!(largest(0, |_| true), 1);
    }
}
