//! Formats an error and its causes for operators.

use std::error::Error;
use std::fmt::Write;

/// Returns the texts of an error and of all its causes, joined by colons. Omits the text of a cause if
/// the preceding text already ends with the same words.
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
