//! The places that are exempt from a rule, each with its reason.

/// A file, or a folder with its files, that is exempt from a rule.
#[derive(Debug)]
pub(super) struct Exception {
    /// The path relative to the root of the workspace.
    pub(super) place: &'static str,
    #[expect(dead_code, reason = "it is for the reader")]
    reason: &'static str,
}

impl Exception {
    pub(super) fn covers(&self, place: &str) -> bool {
        place.strip_prefix(self.place).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

const fn except(place: &'static str, reason: &'static str) -> Exception {
    Exception { place, reason }
}

/// The places that may use phrases that the rules forbid.
pub(super) const PHRASES: &[Exception] = &[];

/// The places whose comments may begin as fragments.
pub(super) const FRAGMENTS: &[Exception] = &[];

/// The places that may declare a type whose name another type has too.
pub(super) const NAMES: &[Exception] = &[
    except("supervisor/control", "its private types are still to be renamed"),
    except("supervisor/src", "its private types are still to be renamed"),
];
