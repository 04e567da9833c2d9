//! The judgement of requests whose worker died.
//!
//! Only the batch that was *executing* is blamed: the oldest batch without an answer, because a
//! worker executes batches in the order in which they are sent. A batch that still waits in the
//! worker's socket cannot have killed the worker. It returns to the queue without a recorded death
//! and without a call of [`after_death`]; so do batches that are taken away from a live worker. If
//! a worker is killed on purpose, or dies before its first batch, no request is blamed.

/// The number of deaths after which a request is still retried together with others: most deaths are
/// not its fault.
const DEATHS_IN_COMPANY: u8 = 1;

/// The number of deaths from which a request that ran alone is proved to kill its workers.
const DEATHS_THAT_PROVE: u8 = 3;

/// The number of deaths after which one more death proves that a request kills its workers, if it
/// runs alone then.
pub const ON_TRIAL: u8 = DEATHS_THAT_PROVE - 1;

/// The fate of a request of the batch that was executing when its worker died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// The request is retried, in a batch with others if they fit.
    Again,
    /// The request is retried in a batch that has no other request.
    AgainAlone,
    /// The request fails.
    Fail,
}

/// Judges a request of the batch that was executing. `deaths` includes this death; `was_alone` is true
/// if the batch had no other request.
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
