//! The places that a rule leaves out, each with its reason.

/// A file, or a folder with its files, that a rule leaves out.
#[derive(Debug)]
pub(super) struct Exception {
    /// The path from the workspace's root.
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

/// Crates whose code is redesigned before its comments and names are translated.
pub(super) const REDESIGNED: &[Exception] = &[
    except("supervisor/control", "one reconciler for each model replaces it"),
    except("supervisor/ingress", "its protocols get one form"),
    except("supervisor/src", "a lifecycle replaces the wiring"),
];

/// Places with phrases that plain English does without.
pub(super) const PHRASES: &[Exception] = &[];

/// Places with comments that begin as fragments.
pub(super) const FRAGMENTS: &[Exception] = &[];

/// Places that declare a type by a name that another type has.
pub(super) const NAMES: &[Exception] = &[];
