//! Decides when to log dropped spans: at most once a minute during an outage of the collector, and
//! at the end of the outage. This module does no I/O.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

/// The shortest time between two log messages about dropped spans.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// The state of the current outage.
#[derive(Debug, Default)]
pub(super) struct Outage {
    /// The number of dropped spans that have not been reported yet.
    unreported: u64,
    last_report: Option<Timestamp>,
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
    /// Adds a number of dropped spans. Returns a notice if a report is due.
    pub(super) fn dropped(&mut self, spans: u64, now: Timestamp) -> Option<OutageNotice> {
        self.unreported += spans;
        self.failing |= spans > 0;
        let is_due = self.last_report.is_none_or(|last| now.since(last) >= REPORT_INTERVAL);
        (is_due && self.unreported > 0).then(|| {
            self.last_report = Some(now);
            OutageNotice::Dropped(std::mem::take(&mut self.unreported))
        })
    }

    /// Records that the collector accepted all spans. Returns a notice if this is the end of an
    /// outage.
    pub(super) fn sent(&mut self) -> Option<OutageNotice> {
        std::mem::take(&mut self.failing).then(|| OutageNotice::Over(std::mem::take(&mut self.unreported)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_reported_once_a_minute_and_at_its_end() {
        let at = |seconds| Timestamp::after_origin(Duration::from_secs(seconds));
        let mut outage = Outage::default();
        assert_eq!((outage.sent(), outage.dropped(0, at(1))), (None, None));
        assert_eq!(outage.dropped(3, at(1)), Some(OutageNotice::Dropped(3)));
        assert_eq!(outage.dropped(4, at(2)), None);
        assert_eq!(outage.dropped(5, at(60)), None);
        assert_eq!(outage.dropped(0, at(61)), Some(OutageNotice::Dropped(9)));
        assert_eq!(outage.dropped(2, at(62)), None);
        assert_eq!((outage.sent(), outage.sent()), (Some(OutageNotice::Over(2)), None));
        assert_eq!(outage.dropped(1, at(63)), None, "a collector that comes and goes does not fill the log");
    }
}
