//! Errors as the supervisor reads them, in whose hands they are text.

use std::error::Error;

/// An error and all its causes, joined by colons.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
