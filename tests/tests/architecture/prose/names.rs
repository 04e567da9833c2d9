//! The names of types in the whole workspace.

use std::collections::BTreeMap;

use crate::source::Source;

/// Returns a fault for each declaration of a visible type that has the same name as another visible
/// type.
pub(super) fn duplicates(sources: &[Source]) -> Vec<String> {
    let mut places: BTreeMap<&str, Vec<(&str, usize)>> = BTreeMap::new();
    for source in sources {
        for declared in &source.types {
            places.entry(&declared.name).or_default().push((&source.name, declared.line));
        }
    }
    let mut faults = Vec::new();
    for (name, places) in places.iter().filter(|(_, places)| places.len() > 1) {
        for (file, line) in places {
            faults.push(format!("{file}:{line}: `{name}` names {} types", places.len()));
        }
    }
    faults
}
