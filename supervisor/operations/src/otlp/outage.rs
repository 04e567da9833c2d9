//! Decides when to log dropped spans: at most once in an interval during an outage of the collector,
//! and at the end of the outage.

use std::time::Duration;

use shadowslice_datapath::log_throttle::LogThrottle;

/// The state of the current outage.
#[derive(Debug)]
pub(super) struct Outage {
    /// The number of dropped spans that have not been reported yet.
    unreported: u64,
    throttle: LogThrottle,
    failing: bool,
}

/// A message that the exporter must log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutageNotice {
    /// Spans were dropped. The value is their number since the last report.
    Dropped(u64),
    /// The collector accepts spans again. The value is the number of dropped spans that have not
    /// been reported yet.
    Over(u64),
}

impl Outage {
    /// Creates the state without an outage. `interval` is the shortest time between two reports.
    pub(super) fn new(interval: Duration) -> Self {
        Self { unreported: 0, throttle: LogThrottle::new(interval), failing: false }
    }

    /// Adds the number of spans that were dropped in an export. Returns a notice if a report is due.
    pub(super) fn exported(&mut self, dropped: u64) -> Option<OutageNotice> {
        self.unreported += dropped;
        let was_failing = std::mem::replace(&mut self.failing, dropped > 0);
        if self.unreported > 0 && self.throttle.is_due() {
            self.failing |= was_failing;
            return Some(OutageNotice::Dropped(std::mem::take(&mut self.unreported)));
        }
        (was_failing && dropped == 0).then(|| OutageNotice::Over(std::mem::take(&mut self.unreported)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_reported_once_in_an_interval_and_at_its_end() {
        let mut outage = Outage::new(Duration::from_secs(3600));
        assert_eq!(outage.exported(0), None);
        assert_eq!(outage.exported(3), Some(OutageNotice::Dropped(3)));
        assert_eq!((outage.exported(4), outage.exported(5)), (None, None));
        assert_eq!(outage.exported(0), Some(OutageNotice::Over(9)));
        assert_eq!(outage.exported(0), None);
        assert_eq!(outage.exported(1), None, "a collector that comes and goes does not fill the log");
    }

    #[test]
    fn spans_that_waited_for_their_report_are_reported_when_it_is_due() {
        let mut outage = Outage::new(Duration::ZERO);
        assert_eq!(outage.exported(3), Some(OutageNotice::Dropped(3)));
        assert_eq!(outage.exported(2), Some(OutageNotice::Dropped(2)));
        assert_eq!((outage.exported(0), outage.exported(0)), (Some(OutageNotice::Over(0)), None));
    }
}
