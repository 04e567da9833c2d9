//! Errors as people read them: what failed, why, and what to do.

use std::error::Error;
use std::fmt::Write;

/// An error and all its causes, joined by colons.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Writing to a String cannot fail.
        write!(text, ": {error}").ok();
        cause = error.source();
    }
    text
}
