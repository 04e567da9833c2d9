//! That less than the level was too little for a demand: while as much comes the level is kept, and for a while whatever comes.

use super::lasting::{FORGOTTEN_S, Lasting};

/// Intervals in which it shows how large a demand is.
const SHOWN_IN: u32 = 4;

/// A demand of at least this part of one for which less than the level was too little is as large.
const AS_LARGE: f64 = 0.6;

/// A demand for which less than the level was too little.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pressed {
    /// Rows a second: the most in the intervals in which it shows.
    rate: f64,
    intervals: u32,
    /// How long the level is kept for one.
    lasting: Lasting,
    /// Until when the level is kept whatever comes, in seconds of observation.
    until: f64,
}

impl Pressed {
    /// Less than the level turned out to be too little for so many rows a second, after so many seconds of observation; once more if it did
    /// `before`. It is known for as long as it was before if that is not over yet: an order that cannot be carried out is given again and
    /// again.
    pub(super) fn again(before: Option<Self>, rate: f64, now: f64) -> Self {
        let recent = before.filter(|pressed| now < pressed.until + FORGOTTEN_S);
        let mut lasting = recent.map_or_else(Lasting::default, |pressed| pressed.lasting);
        let last = before.map(|pressed| pressed.until).filter(|&until| now < until);
        let until = last.unwrap_or_else(|| now + lasting.again());
        Self { rate, intervals: 0, lasting, until }
    }

    /// Learns from an interval in which so many rows a second came.
    pub(super) fn observe(&mut self, rate: f64) {
        if self.intervals < SHOWN_IN {
            self.intervals += 1;
            self.rate = self.rate.max(rate);
        }
    }

    /// Whether the level is kept where so many rows a second come, after so many seconds of observation.
    pub(super) fn keeps(&self, rate: f64, now: f64) -> bool {
        rate >= AS_LARGE * self.rate || now < self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lasts_longer_each_time_unless_a_day_is_over() {
        let first = Pressed::again(None, 10.0, 0.0);
        let lasts = |pressed: Pressed, from: f64| {
            (1..=40).map(|n| 60.0 * f64::from(n)).find(|span| !pressed.keeps(0.0, from + span))
        };
        assert_eq!(lasts(first, 0.0), Some(120.0));
        let [soon, next_day] = [200.0, 120.0 + FORGOTTEN_S];
        assert_eq!(lasts(Pressed::again(Some(first), 10.0, soon), soon), Some(240.0));
        assert_eq!(lasts(Pressed::again(Some(first), 10.0, next_day), next_day), Some(120.0));
    }
}
