//! Errors as operators read them: what failed, why, and what to do.

use std::error::Error;
use std::fmt::Write;

/// An error and all its causes, joined by colons. A cause that an error already quotes is not
/// repeated.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let why = error.to_string();
        if !text.ends_with(&why) {
            // Writing to a String cannot fail.
            write!(text, ": {why}").ok();
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Failed {
        #[error("the door is shut")]
        Quiet(#[source] std::fmt::Error),
        #[error("the door is shut: {0}")]
        Quoting(#[source] std::fmt::Error),
    }

    #[test]
    fn causes_are_told_once() {
        let told = format!("the door is shut: {}", std::fmt::Error);
        assert_eq!(chain(&Failed::Quiet(std::fmt::Error)), told);
        assert_eq!(chain(&Failed::Quoting(std::fmt::Error)), told);
    }
}
