use std::fmt;

/// A client's text in a message. Long texts are cut.
pub(crate) struct Clipped<'a>(pub(crate) &'a str);

impl fmt::Display for Clipped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const CHARACTERS: usize = 128;
        match self.0.char_indices().nth(CHARACTERS) {
            Some((end, _)) => write!(f, "{}..", &self.0[..end]),
            None => f.write_str(self.0),
        }
    }
}
