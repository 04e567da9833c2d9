//! Tests of the table: the reference has each key.

use super::*;

/// Calls `visit` with each key below this kind, after the names of the maps in which it is.
fn walk(kind: &'static Kind, path: &[&'static str], visit: &mut impl FnMut(&[&'static str], &'static Key)) {
    match kind {
        Kind::Map(keys) | Kind::Open(keys, _) => {
            for key in *keys {
                visit(path, key);
                walk(&key.kind, &[path, &[key.name]].concat(), visit);
            }
            if let Kind::Open(_, others) = kind {
                walk(others, path, visit);
            }
        }
        Kind::List(item, ..) => walk(item, path, visit),
        Kind::Either(kinds) => kinds.iter().for_each(|kind| walk(kind, path, visit)),
        _ => {}
    }
}

/// Returns Markdown as plain text: without code marks and the targets of links.
fn plain(markdown: &str) -> String {
    let mut parts = markdown.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    let text = parts.fold(first, |text, part| text + part.split_once(')').map_or(part, |(_, after)| after));
    text.replace(['[', ']', '`', '*'], "").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the section with this title. The title of a key's section begins with the key.
fn section<'a>(reference: &'a str, title: &str) -> Option<&'a str> {
    let text = &reference[reference.find(&format!("# {title}"))?..];
    Some(text.split_once("\n##").map_or(text, |(text, _)| text))
}

/// Returns the part of a line of a table or a list that names keys.
fn head(line: &str) -> &str {
    match line.strip_prefix("| ") {
        Some(row) => row.split(" | ").next().unwrap_or_default(),
        None => line.strip_prefix("* **").and_then(|item| item.split("**").next()).unwrap_or_default(),
    }
}

/// The parts of the reference that document a key.
struct Entry {
    /// The rows of tables and the items of lists that begin with the key.
    rows: String,
    /// The rows, the key's own section, and the section that contains the rows.
    text: String,
}

fn entry(reference: &str, within: &str, path: &[&str], name: &str) -> Entry {
    let (outer, around) = match path {
        [] => (String::new(), within.to_owned()),
        [outer @ .., parent] => (format!("{parent}."), entry(reference, within, outer, parent).text),
    };
    let names = [format!("`{name}`"), format!("`{name}."), format!("`{outer}{name}`")];
    let is_row = |line: &&str| names.iter().any(|name| head(line).contains(name));
    let rows: String = around.lines().filter(is_row).map(|line| format!("{line}\n")).collect();
    let own = section(reference, &format!("`{name}`")).unwrap_or_default();
    let lists = if rows.contains("[lists]") || rows.contains("(#users-and-groups)") {
        section(reference, "Users and groups")
    } else {
        None
    };
    let around = if path.is_empty() { "" } else { around.as_str() };
    Entry { text: [&rows, own, lists.unwrap_or_default(), around].concat(), rows }
}

#[test]
fn the_reference_has_each_key_with_its_description_default_and_bounds() {
    let reference = std::fs::read_to_string("../../docs/configuration.md").unwrap();
    let defaults = section(&reference, "All defaults").unwrap().replace('\'', "");
    let mut faults = Vec::new();
    // A line that continues a list's item belongs to the item.
    let reference = reference.replace("\n  ", " ");
    let profiles = section(&reference, "Profiles").unwrap();
    for (kind, within) in [(&CONFIG, reference.as_str()), (&PROFILE, profiles)] {
        walk(kind, &[], &mut |path, key| {
            let Entry { rows, text } = entry(&reference, within, path, key.name);
            let mut wants = |found: bool, what: &str| {
                if !found {
                    faults.push(format!("{}.{}: {what}", path.join("."), key.name));
                }
            };
            wants(text.contains(key.name), "is missing");
            let row = plain(&rows);
            wants(row.is_empty() || row.contains(key.meaning), &format!("has other words: {}", key.meaning));
            for bound in key.kind.bounds() {
                let is_word =
                    |text: &str| text.split(|c: char| !c.is_alphanumeric()).any(|word| word == bound);
                wants(is_word(&text), &format!("does not state the bound {bound}"));
            }
            if let KeyDefault::Value(value) = key.default
                && !value.starts_with(['[', '{'])
            {
                let value = value.trim_matches('"');
                let is_listed = defaults.contains(&format!("{}: {value}", key.name));
                wants(is_listed || text.contains(value), &format!("does not state the default {value}"));
            }
        });
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
