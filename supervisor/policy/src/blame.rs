//! What becomes of a request when its worker died.
//!
//! Only the batch that was *executing* is blamed: the oldest one that was sent and not answered,
//! since a worker executes its batches one after another, in the order sent. A death counts for each
//! request of that batch. The batch behind it, in the worker's socket, cannot have killed the
//! worker: it is put back as it is, without a death and without a call of [`after_death`]. The same
//! goes for batches that are taken away from a worker that lives, as when draining takes too long.
//! If a worker is killed on purpose, or dies before its first batch, no request is blamed.

/// After its first death a request is tried once more together with others: most deaths are not its
/// fault.
const DEATHS_IN_COMPANY: u8 = 1;

/// Deaths after which a request that ran alone has proved that it kills its workers.
const DEATHS_THAT_PROVE: u8 = 3;

/// What to do with the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// Back to the head of the queue.
    Again,
    /// Back to the head of the queue, to run by itself.
    AgainAlone,
    /// Answer it with an error.
    Fail,
}

/// Judges a request of the batch that was executing when its worker died. `deaths` counts this death
/// too; `was_alone` says whether the batch held this request only.
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
