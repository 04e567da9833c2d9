//! Tests of the table: the reference has each key, and words and bounds in code are those of the table.

use shadowslice_shared::batch::MAX_REQUESTS;
use shadowslice_shared::tensor::Datatype;

use super::*;
use crate::units::{show_duration, show_size};

/// The largest size that a key can have, in bytes. It only excludes mistakes.
const LARGEST: u64 = 1 << 50;

/// Calls `visit` with each key below this kind, after the names of the maps in which it is.
fn walk(kind: &'static Kind, path: &[&'static str], visit: &mut impl FnMut(&[&'static str], &'static Key)) {
    match kind {
        Kind::Map(keys, others) => {
            for key in keys {
                visit(path, key);
                walk(&key.kind, &[path, &[key.name]].concat(), visit);
            }
            if let Some(others) = others {
                walk(others, path, visit);
            }
        }
        Kind::List(items) => walk(&items.kind, path, visit),
        Kind::Either(kinds) => kinds.iter().for_each(|kind| walk(kind, path, visit)),
        _ => {}
    }
}

/// Returns the bounds in the form in which documents state them. Bounds that only exclude mistakes
/// are left out, such as those of indices.
fn bounds(kind: &Kind) -> Vec<String> {
    match kind {
        Kind::Duration(least, most) => {
            let least = (!least.is_zero()).then(|| show_duration(*least));
            let most = (*most < units::MAX_DURATION).then(|| show_duration(*most));
            least.into_iter().chain(most).collect()
        }
        Kind::Size(least, most) => {
            let least = (*least > 1).then(|| show_size(*least));
            let most = (*most < LARGEST).then(|| show_size(*most));
            least.into_iter().chain(most).collect()
        }
        Kind::Whole(least, most) => {
            let least = (*least > 0).then(|| least.to_string());
            least.into_iter().chain([most.to_string()]).collect()
        }
        Kind::List(items) if items.least < items.most && items.most < usize::MAX => {
            vec![items.most.to_string()]
        }
        _ => Vec::new(),
    }
}

#[test]
fn descriptions_state_the_bounds() {
    for kind in [&*CONFIG, &*PROFILE] {
        walk(kind, &[], &mut |path, key| {
            let stated = key.description.split_once("; bounds: ").map_or("", |(_, rest)| rest);
            let stated = stated.split("; ").next().unwrap_or_default();
            assert_eq!(stated, bounds(&key.kind).join(", "), "{path:?} {}", key.name);
        });
    }
}

/// Returns the words of the schema for a key in a map that is defined with this name.
fn words(definition: &str, path: &[&str]) -> Vec<&'static str> {
    let mut schema = DOCUMENT.get("$defs").and_then(|definitions| definitions.get(definition)).unwrap();
    for key in path {
        schema = schema.get(if schema.get("items").is_some() { "items" } else { "" }).unwrap_or(schema);
        schema = schema.get("properties").and_then(|keys| keys.get(key)).unwrap();
    }
    schema = schema.get("items").unwrap_or(schema);
    schema = schema.get("anyOf").map_or(schema, |kinds| &kinds.items()[0]);
    schema.get("enum").unwrap().items().iter().filter_map(|word| word.text()).collect()
}

#[test]
fn words_and_limits_in_code_are_those_of_the_schema() {
    fn names<T, const N: usize>(words: &Words<T, N>) -> Vec<&'static str> {
        words.iter().map(|(name, _)| *name).collect()
    }
    assert_eq!(words("model", &["engine"]), names(&ENGINES));
    assert_eq!(words("model", &["providers"]), names(&PROVIDERS));
    assert_eq!(words("model", &["versions"]), names(&VERSIONS));
    assert_eq!(words("rollout", &["compare"]), names(&COMPARISONS));
    assert_eq!(words("model", &["handover"]), names(&HANDOVERS));
    assert_eq!(words("model", &["standby"]), names(&STANDBYS));
    assert_eq!(words("model", &["queue", "on_late"]), names(&ON_LATE));
    assert_eq!(words("model", &["tensors", "datatype"]), Datatype::ALL.map(Datatype::name));
    assert_eq!(words("config", &["start"]), names(&STARTS));
    assert_eq!(words("config", &["model_control"]), names(&ACCESS));
    assert_eq!(words("config", &["gpus", "partition"]), names(&PARTITIONS));
    let model = &CONFIG.of_key("models").items().kind;
    assert_eq!(model.of_key("batch").of_key("max").whole(), (0, MAX_REQUESTS as i64));
    assert_eq!(model.of_key("versions").items().most, crate::versions::MAX_VERSIONS);
    assert_eq!(model.of_key("versions").items().kind.whole(), (1, i64::from(u32::MAX)));
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
    for (kind, within) in [(&*CONFIG, reference.as_str()), (&*PROFILE, profiles)] {
        walk(kind, &[], &mut |path, key| {
            let Entry { rows, text } = entry(&reference, within, path, key.name);
            let mut wants = |found: bool, what: &str| {
                if !found {
                    faults.push(format!("{}.{}: {what}", path.join("."), key.name));
                }
            };
            wants(text.contains(key.name), "is missing");
            let row = plain(&rows);
            let meaning = key.description.split("; ").next().unwrap_or_default();
            wants(row.is_empty() || row.contains(meaning), &format!("has other words: {meaning}"));
            for bound in bounds(&key.kind) {
                let is_word =
                    |text: &str| text.split(|c: char| !c.is_alphanumeric()).any(|word| word == bound);
                wants(is_word(&text), &format!("does not state the bound {bound}"));
            }
            if let Some(value) = key.default.and_then(YamlNode::text) {
                let is_listed = defaults.contains(&format!("{}: {value}", key.name));
                wants(is_listed || text.contains(value), &format!("does not state the default {value}"));
            }
        });
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
