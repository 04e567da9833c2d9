//! The decision whether a request is retried or fails after its worker died. The number of workers that
//! died while they executed a request is called the request's *deaths*.
//!
//! Only the requests of the batch that was *executing* are blamed for the death. A worker executes
//! batches in the order in which it receives them, so the executing batch is the oldest batch without
//! an answer. A batch that still waits in the worker's socket cannot have killed the worker. The
//! requests of such a batch return to the queue. The caller records no death for them and does not call
//! [`after_death`]. If the supervisor takes a batch away from a live worker, the requests of the batch
//! also return to the queue without blame. If a worker is killed on purpose, or dies before its first
//! batch, no request is blamed.

/// The maximum number of deaths after which a request is retried in a batch with other requests. A
/// single death usually has a cause other than the request.
const DEATHS_IN_COMPANY: u8 = 1;

/// The number of deaths that proves that a request kills its workers, if the request was alone in its
/// batch at the last death. The request then fails.
const DEATHS_THAT_PROVE: u8 = 3;

/// The number of deaths at which a request is on trial. If its worker dies once more while the request
/// is alone in its batch, the request is proved to kill its workers.
pub const ON_TRIAL: u8 = DEATHS_THAT_PROVE - 1;

/// The decision about a request of the batch that was executing when its worker died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// The request is retried. Its batch may contain other requests.
    Again,
    /// The request is retried in a batch without other requests.
    AgainAlone,
    /// The request fails.
    Fail,
}

/// Returns the decision about a request of the batch that was executing. `deaths` is the request's
/// number of deaths, including this one. `was_alone` is true if the batch had no other request.
pub fn after_death(deaths: u8, was_alone: bool) -> Blame {
    match deaths {
        ..=DEATHS_IN_COMPANY => Blame::Again,
        DEATHS_THAT_PROVE.. if was_alone => Blame::Fail,
        _ => Blame::AgainAlone,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn again_then_alone_then_failed() {
        assert_eq!(after_death(1, false), Blame::Again);
        assert_eq!(after_death(2, false), Blame::AgainAlone);
        assert_eq!(after_death(3, true), Blame::Fail);
    }

    #[test]
    fn a_request_that_happened_to_be_alone_gets_as_many_tries() {
        assert_eq!(after_death(1, true), Blame::Again);
        assert_eq!(after_death(2, true), Blame::AgainAlone);
    }

    #[test]
    fn nobody_fails_for_the_company_it_kept() {
        assert_eq!(after_death(3, false), Blame::AgainAlone);
        assert_eq!(after_death(u8::MAX, false), Blame::AgainAlone);
    }
}
