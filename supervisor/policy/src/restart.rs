//! When a worker that died is started again, and when its model is given up.

use std::time::Duration;

/// Long enough that a worker that dies at once does not keep the host busy, short enough that a
/// client hardly notices a single death beside the start itself.
const FIRST_BACKOFF: Duration = Duration::from_millis(10);

/// In a row, with nothing served between them; then the model is unready. By then (1.3 s of
/// back-off and seven starts) an accident of the host is over, so the cause is the model or its
/// configuration. The number bounds the back-off, too: 640 ms.
const MAX_DEATHS: u32 = 8;

/// If so many requests in a row kill their workers, and none is answered between them, the cause is
/// the model and not the requests.
const PROVEN_IN_A_ROW: u32 = 8;

/// A worker that was ready for so long without work died neither of its start nor of its work.
pub const STOOD: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterDeath {
    After(Duration),
    GiveUp { deaths: u32 },
}

/// Since one of the model's workers served.
#[derive(Debug, Clone, Default)]
pub struct Restarts {
    deaths: u32,
    /// Requests in a row that were proved to kill their workers.
    poisonous: u32,
}

impl Restarts {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn died(&mut self) -> AfterDeath {
        self.deaths = self.deaths.saturating_add(1);
        if self.deaths >= MAX_DEATHS {
            return AfterDeath::GiveUp { deaths: self.deaths };
        }
        AfterDeath::After(FIRST_BACKOFF * 2_u32.pow(self.deaths - 1))
    }

    /// A worker that was `ready` for so long without work is about to be counted as dead. If that
    /// is long, what killed earlier workers is over: rare accidents must not add up because no
    /// client asks the model.
    pub fn idled(&mut self, ready: Duration) {
        if ready >= STOOD {
            self.deaths = 0;
        }
    }

    pub fn deaths(&self) -> u32 {
        self.deaths
    }

    /// A batch was answered: what killed earlier workers is over.
    pub fn served(&mut self) {
        self.reset();
    }

    /// An operator tries the model again, or the model has another share.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// A request was proved to kill its workers. Their deaths count against the request and not
    /// against the model, unless there are too many such requests.
    pub fn poisonous(&mut self) {
        self.poisonous = self.poisonous.saturating_add(1);
        if self.poisonous < PROVEN_IN_A_ROW {
            self.deaths = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_and_the_eighth_death_in_a_row_is_the_last() {
        let mut restarts = Restarts::new();
        for ms in [10, 20, 40, 80, 160, 320, 640] {
            assert_eq!(restarts.died(), AfterDeath::After(Duration::from_millis(ms)));
        }
        assert_eq!(restarts.died(), AfterDeath::GiveUp { deaths: 8 });
        assert_eq!(restarts.died(), AfterDeath::GiveUp { deaths: 9 });
    }

    #[test]
    fn accidents_far_apart_do_not_add_up() {
        let mut restarts = Restarts::new();
        for _ in 0..MAX_DEATHS {
            restarts.idled(STOOD);
            assert_eq!(restarts.died(), AfterDeath::After(FIRST_BACKOFF));
        }
        for _ in 2..MAX_DEATHS {
            restarts.idled(STOOD - Duration::from_millis(1));
            restarts.died();
        }
        assert_eq!(restarts.died(), AfterDeath::GiveUp { deaths: MAX_DEATHS });
    }

    #[test]
    fn who_has_served_starts_afresh() {
        let mut restarts = Restarts::new();
        for _ in 1..MAX_DEATHS {
            restarts.died();
        }
        restarts.served();
        assert_eq!(restarts.died(), AfterDeath::After(FIRST_BACKOFF));
    }

    #[test]
    fn requests_that_kill_workers_are_to_blame_until_there_are_too_many_of_them() {
        let mut restarts = Restarts::new();
        let killed_by_one = |restarts: &mut Restarts| {
            let deaths = [(); 3].map(|()| restarts.died());
            restarts.poisonous();
            deaths
        };
        let first = killed_by_one(&mut restarts);
        for _ in 2..=PROVEN_IN_A_ROW {
            assert_eq!(killed_by_one(&mut restarts), first);
        }
        assert_ne!(killed_by_one(&mut restarts), first, "it is the model");
        restarts.served();
        assert_eq!(killed_by_one(&mut restarts), first, "an answer between them says that it is not");
    }
}
