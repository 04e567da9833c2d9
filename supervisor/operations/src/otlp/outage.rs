//! The log's lines about a collector that is away: not a line for every batch, but for every
//! change. Pure.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

/// The log is told of dropped spans this often at most.
const QUIET: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Outage {
    unsaid: u64,
    said: Option<Timestamp>,
    failing: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutageNotice {
    /// So many since this was last said.
    Dropped(u64),
    /// It works again; so many were dropped that were not reported yet.
    Over(u64),
}

impl Outage {
    pub(super) fn dropped(&mut self, spans: u64, now: Timestamp) -> Option<OutageNotice> {
        self.unsaid += spans;
        self.failing |= spans > 0;
        let due = self.said.is_none_or(|said| now.since(said) >= QUIET);
        (due && self.unsaid > 0).then(|| {
            self.said = Some(now);
            OutageNotice::Dropped(std::mem::take(&mut self.unsaid))
        })
    }

    /// Spans were taken, and no span was dropped since the last time.
    pub(super) fn sent(&mut self) -> Option<OutageNotice> {
        std::mem::take(&mut self.failing).then(|| OutageNotice::Over(std::mem::take(&mut self.unsaid)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_told_once_a_minute_and_at_its_end() {
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
