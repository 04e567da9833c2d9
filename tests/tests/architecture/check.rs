//! The checks of sources and manifests. Each fault is a line that names the place, the violation
//! and the rule.

use crate::manifests::Dependencies;
use crate::source::{Manifest, Source};
use crate::table::{MAX_LINES, MAX_SPARE_LINES, Row};

/// Returns the uses that the table does not permit.
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
        // A crate name without a path is an attribute, a string prefix or a re-export, so it does
        // not count as a use.
        let permitted = starts_with(path, &own_modules(part), "::")
            || row.may.iter().any(|may| starts_with(path, may, "::"))
            || !path.contains("::");
        return (!permitted).then(|| format!("is used, but {part} may only use {:?}", row.may));
    }
    let path = path.trim_end_matches("::*");
    let hit = row.never.iter().find(|never| {
        // An import of `std::time` could include any of its clocks, so it counts as a use of each
        // clock.
        starts_with(path, never, "::") || (path.contains("::") && starts_with(never, path, "::"))
    });
    hit.map(|never| format!("is used, but {part} must not use {never}"))
}

/// Returns the module path of a part.
fn own_modules(part: &str) -> String {
    let inside = part.split_once("/src/").map_or("", |(_, inside)| inside);
    format!("crate::{}", inside.trim_end_matches(".rs").replace('/', "::"))
}

/// Returns true if `path` equals `start`, or continues after `start` with `separator`.
fn starts_with(path: &str, start: &str, separator: &str) -> bool {
    path.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with(separator))
}

/// Returns the dependencies that the table forbids.
pub(crate) fn manifests(table: &[(&str, Dependencies)], manifests: &[Manifest]) -> Vec<String> {
    let mut faults = Vec::new();
    for Manifest { name, dependencies } in manifests {
        let Some((_, allowed)) = table.iter().find(|(part, _)| part == name) else {
            faults.push(format!("{name}/Cargo.toml: the table has no row for this crate"));
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
                faults.push(format!("{name}/Cargo.toml: lists {dependency}, which the table forbids"));
            }
        }
    }
    faults
}

/// Returns the places with forbidden unsafe code. Also returns the files that the rule lists
/// although they contain no unsafe code.
pub(crate) fn unsafe_code(permitted: &[&str], sources: &[Source]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in sources {
        let lines = &source.unsafe_lines;
        match (permitted.contains(&source.name.as_str()), lines.first()) {
            (false, Some(line)) => {
                faults.push(format!("{}:{line}: this file must not contain unsafe code", source.name))
            }
            (true, None) => {
                faults.push(format!("{}: listed for unsafe code, but contains none", source.name))
            }
            _ => {}
        }
    }
    let is_missing = |name: &&&str| !sources.iter().any(|source| source.name == **name);
    let missing = permitted.iter().filter(is_missing);
    faults.extend(missing.map(|name| format!("{name}: listed for unsafe code, but does not exist")));
    faults
}

/// Returns the files that have too many lines.
pub(crate) fn lengths(sources: &[Source]) -> Vec<String> {
    let long = sources.iter().filter(|source| source.lines > MAX_LINES);
    long.map(|source| format!("{}: {} lines; the maximum is {MAX_LINES}", source.name, source.lines))
        .collect()
}

/// Returns the crates with more code than their limit, and the crates whose limit is too generous.
pub(crate) fn sizes(limits: &[(&str, usize)], sources: &[Source]) -> Vec<String> {
    let size = |part: &str| {
        let inside = sources.iter().filter(|source| starts_with(&source.name, &format!("{part}/src"), "/"));
        inside.map(|source| source.code_lines).sum::<usize>()
    };
    let judge = |&(part, limit): &(&str, usize)| match size(part) {
        size if size > limit => Some(format!("{part}: {size} lines of code; the limit is {limit}")),
        size if size + MAX_SPARE_LINES < limit => {
            Some(format!("{part}: {size} lines of code; lower the limit of {limit}"))
        }
        _ => None,
    };
    limits.iter().filter_map(judge).collect()
}

/// Returns the table rows that match no file.
pub(crate) fn stale(table: &[Row], sources: &[Source]) -> Vec<String> {
    let is_stale = |row: &&Row| !sources.iter().any(|source| starts_with(&source.name, row.part, "/"));
    table
        .iter()
        .filter(is_stale)
        .map(|row| format!("{}: this row of the table matches no file", row.part))
        .collect()
}
