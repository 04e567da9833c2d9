//! Settling: when the objective is kept again after the load has changed.

use std::time::Duration;

use shadowslice_shared::units::Moment;

/// For how long every answer must come in time.
const CLEAN: Duration = Duration::from_secs(1);

/// Measures settling over a window, a change's.
#[derive(Debug, Default)]
pub(crate) struct SettleMeter {
    /// When a request was last answered too late, refused or failed; the origin if no request was.
    last_miss: Moment,
    window: Option<Window>,
}

#[derive(Debug)]
struct Window {
    decided: Moment,
    /// Since when nothing was missed.
    clean_from: Moment,
    settled: Option<Duration>,
}

impl Window {
    fn judge(&mut self, now: Moment) {
        if self.settled.is_none() && now.since(self.clean_from) >= CLEAN {
            self.settled = Some(self.clean_from.since(self.decided));
        }
    }
}

impl SettleMeter {
    /// A request was answered too late, refused or failed.
    pub(crate) fn missed(&mut self, now: Moment) {
        self.last_miss = now;
        if let Some(window) = &mut self.window {
            window.judge(now);
            window.clean_from = now;
        }
    }

    /// Begins a window with a decision at `decided`.
    pub(crate) fn begin(&mut self, decided: Moment) {
        self.window = Some(Window { decided, clean_from: decided.max(self.last_miss), settled: None });
    }

    /// From the decision to the beginning of the first second without a miss; `None` before that
    /// second is over.
    pub(crate) fn read(&mut self, now: Moment) -> Option<Duration> {
        let window = self.window.as_mut()?;
        window.judge(now);
        window.settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(ms))
    }

    fn ms(ms: u64) -> Option<Duration> {
        Some(Duration::from_millis(ms))
    }

    #[test]
    fn it_settles_at_the_beginning_of_the_first_second_without_a_miss() {
        let mut meter = SettleMeter::default();
        assert_eq!(meter.read(at(9000)), None, "nothing has changed");
        meter.missed(at(5100));
        meter.begin(at(5000));
        meter.missed(at(5400));
        meter.missed(at(6300));
        assert_eq!(meter.read(at(7299)), None);
        // The meter is not read between these two misses.
        meter.missed(at(7300));
        meter.missed(at(7400));
        assert_eq!(meter.read(at(7500)), ms(1300));
        assert_eq!(meter.read(at(20_000)), ms(1300), "a later second does not change the result");
        meter.begin(at(20_000));
        assert_eq!(meter.read(at(20_999)), None);
        assert_eq!(meter.read(at(21_000)), ms(0), "no request was missed at all");
    }
}
