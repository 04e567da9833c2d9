//! What becomes of a request when its worker died.
//!
//! Only the batch that was *executing* is blamed: the oldest one that was sent and not answered,
//! since a worker executes its batches in the order sent. The batch behind it, in the worker's
//! socket, cannot have killed the worker: it is put back without a death and without a call of
//! [`after_death`]. So are batches that are taken away from a worker that lives. If a worker is
//! killed on purpose, or dies before its first batch, no request is blamed.

/// After its first death a request is tried again with others: most deaths are not its fault.
const DEATHS_IN_COMPANY: u8 = 1;

/// Then a request that ran alone has proved that it kills its workers.
const DEATHS_THAT_PROVE: u8 = 3;

/// Deaths of a request of which the next proves that it kills its workers, if it is alone.
pub const ON_TRIAL: u8 = DEATHS_THAT_PROVE - 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    Again,
    AgainAlone,
    Fail,
}

/// Judges a request of the batch that was executing. `deaths` counts this death too.
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
