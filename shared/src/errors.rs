//! The text of an error with its causes, as operators read it.

use std::error::Error;
use std::fmt::Write;

/// Returns an error's text and those of all its causes, joined by colons. A cause is left out if the
/// text before it already ends with it.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let why = error.to_string();
        if !text.ends_with(&why) {
            // Writing to a `String` cannot fail.
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
        #[error("cannot open the file")]
        Quiet(#[source] std::fmt::Error),
        #[error("cannot open the file: {0}")]
        Quoting(#[source] std::fmt::Error),
    }

    #[test]
    fn a_cause_appears_once() {
        let expected = format!("cannot open the file: {}", std::fmt::Error);
        assert_eq!(chain(&Failed::Quiet(std::fmt::Error)), expected);
        assert_eq!(chain(&Failed::Quoting(std::fmt::Error)), expected);
    }
}
