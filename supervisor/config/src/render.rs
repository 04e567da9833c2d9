//! Writes the whole configuration as YAML, including all defaults. Loading this text gives the same
//! configuration.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;

use super::faults::{FaultLog, Position, ReadKeys};
use super::keys::{CONFIG, Key, KeyDefault, Kind};
use super::reader::join;
use super::types::Config;
use super::yaml::{self, YamlContent, YamlEntry, YamlNode};

/// The largest number of columns of a map that is written in one line.
const MAX_COLUMNS: usize = 100;

/// The document from which a configuration was read. All documents are equal, because their form
/// does not matter.
#[derive(Debug, Clone)]
pub struct Document {
    pub(super) file: PathBuf,
    pub(super) root: Arc<YamlNode>,
    pub(super) keys: ReadKeys,
}

impl PartialEq for Document {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// Returns the configuration as YAML. Paths are absolute, so that the text is valid in any folder.
pub fn render(config: &Config) -> String {
    let mut text = String::new();
    let root = &config.document.root;
    if let Printed::Map(entries) = config.document.value(&CONFIG, root, "") {
        block(&mut text, 0, "", &entries);
    }
    text
}

/// A value as it is printed.
enum Printed {
    /// YAML in one line.
    Text(String),
    List(Vec<Printed>),
    Map(Vec<PrintedEntry>),
}

struct PrintedEntry {
    name: String,
    value: Option<Printed>,
    /// The text on what applies if there is no value.
    instead: &'static str,
}

impl Document {
    fn value(&self, kind: &'static Kind, node: &YamlNode, path: &str) -> Printed {
        if let Some(Some(text)) = self.keys.get(&(node.at, path.to_owned())) {
            return Printed::Text(text.clone());
        }
        match &node.content {
            YamlContent::Scalar { text, plain } => Printed::Text(scalar(text, *plain)),
            YamlContent::List(items) => {
                let item = |(index, item): (usize, &Arc<YamlNode>)| {
                    self.value(kind.items().kind, item, &format!("{path}[{index}]"))
                };
                Printed::List(items.iter().enumerate().map(item).collect())
            }
            YamlContent::Map(entries) => Printed::Map(self.map(kind, node.at, entries, path)),
        }
    }

    /// Returns the entries of a map: first the known keys in the order of the table, then the others.
    fn map(&self, kind: &'static Kind, at: Position, entries: &[YamlEntry], path: &str) -> Vec<PrintedEntry> {
        let known = kind.keys().iter().map(|key| {
            let path = join(path, key.name);
            let value = match entries.iter().find(|entry| entry.key == key.name) {
                Some(entry) => Some(self.value(&key.kind, &entry.node, &path)),
                None => self.missing(key, at, &path),
            };
            let instead = match key.default {
                KeyDefault::Unset(text) if self.keys.contains_key(&(at, path)) => text,
                _ => "",
            };
            PrintedEntry { name: key.name.to_owned(), value, instead }
        });
        let others = entries.iter().filter(|entry| kind.keys().iter().all(|key| key.name != entry.key));
        let others = others.map(|YamlEntry { key, node, .. }| PrintedEntry {
            name: quoted(key),
            value: Some(self.value(kind.of_key(key), node, &join(path, key))),
            instead: "",
        });
        known.chain(others).collect()
    }

    fn missing(&self, key: &'static Key, at: Position, path: &str) -> Option<Printed> {
        match (self.keys.get(&(at, path.to_owned())), &key.default, &key.kind) {
            (Some(Some(text)), ..) => Some(Printed::Text(text.clone())),
            (Some(None), KeyDefault::Value(text), _) => {
                let default = yaml::parse(text, "", &FaultLog::new(Path::new("")))?;
                Some(self.value(&key.kind, &default, path))
            }
            (_, _, kind @ Kind::Map(_)) => {
                let entries = self.map(kind, at, &[], path);
                let is_read = entries.iter().any(|entry| entry.value.is_some() || !entry.instead.is_empty());
                is_read.then_some(Printed::Map(entries))
            }
            _ => None,
        }
    }
}

/// Writes the keys of a map, one per line. A comment replaces each key without a value.
fn block(text: &mut String, indent: usize, path: &str, entries: &[PrintedEntry]) {
    let margin = " ".repeat(indent);
    for PrintedEntry { name, value, instead } in entries {
        let Some(value) = value else {
            if !instead.is_empty() {
                *text += &format!("{margin}# {path}{name}: not set; {instead}\n");
            }
            continue;
        };
        let line = format!("{margin}{name}: {}\n", flow(value));
        match value {
            Printed::List(items) if items.iter().any(|item| matches!(item, Printed::Map(_))) => {
                *text += &format!("{margin}{name}:\n");
                items.iter().for_each(|item| listed(text, indent + 2, item));
            }
            Printed::Map(entries) if line.len() > MAX_COLUMNS => {
                *text += &format!("{margin}{name}:\n");
                block(text, indent + 2, &format!("{path}{name}."), entries);
            }
            Printed::Map(entries) => {
                let (set, unset): (Vec<_>, Vec<_>) = entries.iter().partition(|entry| entry.value.is_some());
                if unset.is_empty() || !set.is_empty() {
                    *text += &line;
                }
                for PrintedEntry { name: key, instead, .. } in unset {
                    if !instead.is_empty() {
                        *text += &format!("{margin}# {path}{name}.{key}: not set; {instead}\n");
                    }
                }
            }
            Printed::List(_) | Printed::Text(_) => *text += &line,
        }
    }
}

/// Writes a list's item: in one line if it fits, otherwise one line per key.
fn listed(text: &mut String, indent: usize, item: &Printed) {
    let line = format!("{}- {}\n", " ".repeat(indent), flow(item));
    match item {
        Printed::Map(entries) if line.len() > MAX_COLUMNS => {
            let start = text.len();
            block(text, indent + 2, "", entries);
            text.replace_range(start + indent..=start + indent, "-");
        }
        _ => *text += &line,
    }
}

/// Returns a value in one line.
fn flow(value: &Printed) -> String {
    match value {
        Printed::Text(text) => text.clone(),
        Printed::List(items) => format!("[{}]", items.iter().map(flow).collect::<Vec<_>>().join(", ")),
        Printed::Map(entries) => {
            let entries = entries.iter().filter_map(|PrintedEntry { name, value, .. }| {
                Some(format!("{name}: {}", flow(value.as_ref()?)))
            });
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
    }
}

/// Returns a scalar. A number stays without quotes, and a text in quotes keeps them.
fn scalar(text: &str, is_plain: bool) -> String {
    let is_safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '_' | '.' | '-' | '+' | '%');
    if is_plain && text.chars().all(is_safe) { text.to_owned() } else { json!(text).to_string() }
}

/// Returns the text. Adds quotes if YAML could read the text as another type.
pub(super) fn quoted(text: &str) -> String {
    let starts_plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
    let words_of_yaml = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let is_word = words_of_yaml.iter().any(|word| text.eq_ignore_ascii_case(word));
    scalar(text, starts_plain && !is_word)
}
