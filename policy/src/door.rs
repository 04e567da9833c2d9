//! Whether a request can be answered in time, asked as it comes; [`punctual`](crate::punctual) asks once more when batches are sent.
//! What cannot be is not worth the SMs, and is refused while refusing is cheap.
//!
//! The predictions are the mean of what is seen, so this turns away what is more likely late than not.

use std::time::Duration;

use shadowslice_shared::units::Moment;

/// What stands before a request that comes now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    /// When the lane should be through with what it has; not in the past.
    pub lane_free: Moment,
    /// Rows that wait and go first.
    pub rows: u64,
    /// The largest batch in rows, at least 1.
    pub max_batch: u32,
}

impl Ahead {
    /// When a request of one row should be answered, if a batch of so many rows takes that `time`: full
    /// batches go before it, then its own.
    pub fn answered_at(&self, mut time: impl FnMut(u32) -> Duration) -> Moment {
        let max = self.max_batch.max(1);
        let (full, part) = (self.rows / u64::from(max), self.rows % u64::from(max));
        let own = u32::try_from(part).map_or(max, |part| part + 1);
        let mut answered = self.lane_free + time(own);
        if full > 0 {
            let full = u32::try_from(full).unwrap_or(u32::MAX);
            answered = answered + time(max).saturating_mul(full);
        }
        answered
    }
}

/// A batch is on its way this long before the one before it should end. That is several times what the way
/// takes, and a small part of an execution.
pub(crate) const LEAD: Duration = Duration::from_micros(500);

/// When the next batch may be sent to a lane that should be through with what it has then. A batch that goes
/// early is closed early: who comes while it waits there cannot join it.
pub fn send_at(lane_free: Moment) -> Moment {
    lane_free - LEAD
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(ms))
    }

    /// 10 ms, and one more for each row.
    fn time(rows: u32) -> Duration {
        Duration::from_millis(10 + u64::from(rows))
    }

    #[test]
    fn full_batches_go_first_and_then_ones_own() {
        let answered = |rows| Ahead { lane_free: ms(100), rows, max_batch: 4 }.answered_at(time);
        assert_eq!(answered(0), ms(111));
        assert_eq!(answered(3), ms(114));
        assert_eq!(answered(4), ms(114 + 11));
        assert_eq!(answered(9), ms(2 * 14 + 100 + 12));
        assert!(answered(u64::MAX) > ms(1 << 30), "bounded by saturation");
    }

    #[test]
    fn a_lead_ends_the_wait_for_the_lane_early() {
        assert_eq!(send_at(ms(100)) + LEAD, ms(100));
        assert_eq!(send_at(ms(0)), ms(0));
    }

    #[test]
    fn no_batch_at_all_counts_as_one_row() {
        assert_eq!(Ahead { lane_free: ms(0), rows: 2, max_batch: 0 }.answered_at(time), ms(33));
    }
}
