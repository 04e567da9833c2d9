//! When a door narrows.
//!
//! Some of what comes at once is over as soon as it came, and much of what it brought is answered in time. So a part is refused for the sake of
//! others only where three looks in a row ask for it; more is let in at once. That costs higher priorities a little of the first moments of a
//! flood, for lower ones that would have been in time.

use std::time::Duration;

use shadowslice_shared::units::Moment;

/// For so long less has to be asked for: more than one look at the doors after the first, and less than two.
const INSISTS: Duration = Duration::from_millis(150);

/// The part of a model's requests that is let in, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) enum Admitted {
    /// Nobody has asked.
    #[default]
    Unknown,
    Part(f64),
    /// Less has been asked for since then, and not for long enough.
    Narrows {
        part: f64,
        since: Moment,
    },
}

impl Admitted {
    /// This part is asked for; returns the one that is let in from now on.
    pub(super) fn ask(&mut self, asked: f64, now: Moment) -> f64 {
        *self = match *self {
            Self::Part(part) if asked < part => Self::Narrows { part, since: now },
            Self::Narrows { part, since } if asked < part && now.since(since) < INSISTS => *self,
            _ => Self::Part(asked),
        };
        match *self {
            Self::Part(part) | Self::Narrows { part, .. } => part,
            Self::Unknown => asked,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is let in when these are asked for, at so many milliseconds.
    fn let_in(asked: &[(u64, f64)]) -> Vec<f64> {
        let mut admitted = Admitted::default();
        let moment = |ms| Moment::after_origin(Duration::from_millis(ms));
        asked.iter().map(|&(at, part)| admitted.ask(part, moment(at))).collect()
    }

    #[test]
    fn less_is_let_in_once_it_has_been_asked_for_three_times() {
        let looks = [(0, 1.0), (100, 0.3), (200, 0.4), (300, 0.2), (400, 0.2)];
        assert_eq!(let_in(&looks), [1.0, 1.0, 1.0, 0.2, 0.2]);
        let looks = [(0, 0.8), (100, 0.3), (200, 0.4), (300, 0.5), (400, 0.4)];
        assert_eq!(let_in(&looks), [0.8, 0.8, 0.8, 0.5, 0.5]);
    }

    #[test]
    fn what_is_not_asked_for_again_is_let_go() {
        let looks = [(0, 1.0), (100, 0.3), (200, 0.3), (300, 1.0), (400, 0.3), (500, 0.3)];
        assert_eq!(let_in(&looks), [1.0; 6]);
    }

    #[test]
    fn looks_that_follow_each_other_at_once_are_one() {
        assert_eq!(
            let_in(&[(0, 1.0), (100, 0.3), (110, 0.3), (120, 0.3), (260, 0.3)]),
            [1.0, 1.0, 1.0, 1.0, 0.3]
        );
    }

    #[test]
    fn more_is_let_in_at_once_and_so_is_what_is_asked_for_first() {
        assert_eq!(let_in(&[(0, 0.2), (100, 0.6), (200, 0.6)]), [0.2, 0.6, 0.6]);
    }
}
