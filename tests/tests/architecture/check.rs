//! Sources and manifests against the rules. Every fault is a line that names the place, the offence
//! and the rule.

use crate::manifests::Dependencies;
use crate::source::{Manifest, Source};
use crate::table::{MAX_LINES, Row};

/// Uses that no row permits.
pub(crate) fn uses(table: &[Row], sources: &[Source]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in sources.iter().filter(|source| source.name.contains("/src/")) {
        let rows = table.iter().filter(|row| starts_with(&source.name, row.part, "/"));
        let Some(row) = rows.max_by_key(|row| row.part.len()) else { continue };
        for used in &source.uses {
            if let Some(why) = fault(row, &used.path) {
                faults.push(format!("{}:{}: `{}` {why}", source.name, used.line, used.path));
            }
        }
    }
    faults
}

fn fault(row: &Row, path: &str) -> Option<String> {
    let root = path.split("::").next().unwrap_or(path);
    let part = row.part;
    if root == "crate" || root.starts_with("shadowslice") {
        // A crate's name alone is an attribute, a string's neighbour or a re-export; nothing is used by it.
        let permitted = starts_with(path, &own_modules(part), "::")
            || row.may.iter().any(|may| starts_with(path, may, "::"))
            || !path.contains("::");
        return (!permitted).then(|| format!("is used, and {part} may only use {:?}", row.may));
    }
    let path = path.trim_end_matches("::*");
    let hit = row.never.iter().find(|never| {
        // An import of `std::time` could bring in any of its clocks.
        starts_with(path, never, "::") || (path.contains("::") && starts_with(never, path, "::"))
    });
    hit.map(|never| format!("is used, and {part} never uses {never}"))
}

/// The path of a part's own modules.
fn own_modules(part: &str) -> String {
    let inside = part.split_once("/src/").map_or("", |(_, inside)| inside);
    format!("crate::{}", inside.trim_end_matches(".rs").replace('/', "::"))
}

/// Whether `path` is `start`, or goes on from there after `separator`.
fn starts_with(path: &str, start: &str, separator: &str) -> bool {
    path.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with(separator))
}

/// Dependencies that a crate may not have.
pub(crate) fn manifests(table: &[(&str, Dependencies)], manifests: &[Manifest]) -> Vec<String> {
    let mut faults = Vec::new();
    for Manifest { name, dependencies } in manifests {
        let Some((_, allowed)) = table.iter().find(|(part, _)| part == name) else {
            faults.push(format!("{name}/Cargo.toml: no row of the table is about it"));
            continue;
        };
        for dependency in dependencies {
            let permitted = match allowed {
                Dependencies::Only(these) => these.contains(&dependency.as_str()),
                Dependencies::Without(these, save) => {
                    let named = |list: &&[&str]| list.contains(&dependency.as_str());
                    save.contains(&dependency.as_str()) || !these.iter().any(named)
                }
            };
            if !permitted {
                faults.push(format!("{name}/Cargo.toml: {dependency} is listed, and the table forbids it"));
            }
        }
    }
    faults
}

/// Unsafe code where none may be, and permits that are no longer needed.
pub(crate) fn unsafe_code(permitted: &[&str], sources: &[Source]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in sources {
        let lines = &source.unsafe_lines;
        match (permitted.contains(&source.name.as_str()), lines.first()) {
            (false, Some(line)) => {
                faults.push(format!("{}:{line}: unsafe code may not be here", source.name))
            }
            (true, None) => faults.push(format!("{}: may hold unsafe code and does not", source.name)),
            _ => {}
        }
    }
    let known = |name: &&&str| !sources.iter().any(|source| source.name == **name);
    let missing = permitted.iter().filter(known);
    faults.extend(missing.map(|name| format!("{name}: may hold unsafe code and is not there")));
    faults
}

/// Files that are too long.
pub(crate) fn lengths(sources: &[Source]) -> Vec<String> {
    let long = sources.iter().filter(|source| source.lines > MAX_LINES);
    long.map(|source| format!("{}: {} lines; {MAX_LINES} is the most", source.name, source.lines)).collect()
}

/// Rows that are about no file any more.
pub(crate) fn stale(table: &[Row], sources: &[Source]) -> Vec<String> {
    let about = |row: &&Row| !sources.iter().any(|source| starts_with(&source.name, row.part, "/"));
    table
        .iter()
        .filter(about)
        .map(|row| format!("{}: a row of the table is about nothing", row.part))
        .collect()
}
