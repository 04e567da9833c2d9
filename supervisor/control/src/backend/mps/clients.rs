//! The number of processes that an MPS server accepts. The documentation says 48 or 60, depending on the
//! driver (`shadowslice doctor` checks that), and processes of other programs count too. The supervisor
//! therefore learns the number when the server refuses a process.

use std::time::{Duration, Instant};

/// The time after which the supervisor tries again whether the server accepts more processes, because
/// processes of other programs may have exited.
const LIMIT_LIFETIME: Duration = Duration::from_mins(5);

/// The supervisor's processes on a GPU, and the limit that the server has shown.
#[derive(Debug, Default)]
pub(super) struct Clients {
    used: usize,
    limit: Option<Limit>,
}

#[derive(Debug, Clone, Copy)]
struct Limit {
    clients: usize,
    found: Instant,
}

impl Clients {
    /// Admits a process. Returns the number of processes if the server would refuse another one.
    pub(super) fn enter(&mut self, now: Instant) -> Result<(), usize> {
        let limit = self.limit.filter(|limit| now.duration_since(limit.found) < LIMIT_LIFETIME);
        if limit.is_some_and(|limit| self.used >= limit.clients) {
            return Err(self.used);
        }
        self.used += 1;
        Ok(())
    }

    pub(super) fn leave(&mut self) {
        self.used = self.used.saturating_sub(1);
    }

    /// Records that the server has refused one of the admitted processes.
    pub(super) fn refused(&mut self, now: Instant) {
        self.limit = Some(Limit { clients: self.used.saturating_sub(1), found: now });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_refusal_only_as_many_enter_as_the_server_accepted() {
        let (mut clients, now) = (Clients::default(), Instant::now());
        for _ in 0..3 {
            clients.enter(now).unwrap();
        }
        clients.refused(now);
        clients.leave();
        assert_eq!(clients.enter(now), Err(2));
        clients.leave();
        assert_eq!(clients.enter(now), Ok(()), "one has left");
        assert_eq!(clients.enter(now), Err(2));
        assert_eq!(clients.enter(now + LIMIT_LIFETIME), Ok(()), "other programs may have exited");
    }
}
