//! Writes the whole configuration as YAML, including all defaults. Loading this text gives the same
//! configuration.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;

use super::faults::{Position, ReadKeys};
use super::keys::{CONFIG, Key, Kind};
use super::reader::join;
use super::types::Config;
use super::yaml::{YamlContent, YamlEntry, YamlNode};

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
    config.document.value(&CONFIG, &config.document.root, "", "").trim_start().to_owned()
}

impl Document {
    /// Returns a value as it follows its key: a scalar or a list of scalars in the same line, and other
    /// values in lines with this margin.
    fn value(&self, kind: &'static Kind, node: &YamlNode, path: &str, margin: &str) -> String {
        if let Some(Some(text)) = self.keys.get(&(node.at, path.to_owned())) {
            return format!(" {text}\n");
        }
        match &node.content {
            YamlContent::Scalar { text, plain } => {
                let has_unit = matches!(kind, Kind::Duration(..) | Kind::Size(..));
                format!(" {}\n", scalar(text, *plain || has_unit))
            }
            YamlContent::List(items) => {
                let item = |(index, item): (usize, &Arc<YamlNode>)| {
                    self.value(&kind.items().kind, item, &format!("{path}[{index}]"), &format!("{margin}  "))
                };
                let has_maps = items.iter().any(|item| matches!(item.content, YamlContent::Map(_)));
                let items = items.iter().enumerate().map(item);
                if has_maps {
                    return items
                        .fold("\n".to_owned(), |list, item| list + margin + "- " + item.trim_start());
                }
                format!(" [{}]\n", items.map(|item| item.trim().to_owned()).collect::<Vec<_>>().join(", "))
            }
            YamlContent::Map(entries) => match self.map(kind, node.at, entries, path, margin) {
                empty if empty.is_empty() => " {}\n".to_owned(),
                entries => format!("\n{entries}"),
            },
        }
    }

    /// Returns the entries of a map: first the known keys in the order of the table, then the others. A
    /// comment replaces each known key without a value.
    fn map(
        &self,
        kind: &'static Kind,
        at: Position,
        entries: &[YamlEntry],
        path: &str,
        margin: &str,
    ) -> String {
        let below = format!("{margin}  ");
        let mut text = String::new();
        for key in kind.keys() {
            let (name, path) = (key.name, join(path, key.name));
            let value = match entries.iter().find(|entry| entry.key == name) {
                Some(entry) => Some(self.value(&key.kind, &entry.node, &path, &below)),
                None => self.missing(key, at, &path, &below),
            };
            match (value, key.instead()) {
                // A map needs a key. Without one, its comments move to the map around it.
                (Some(value), _) if value.trim().lines().all(|line| line.trim_start().starts_with('#')) => {
                    for line in value.trim().lines() {
                        text += &format!("{margin}# {name}.{}\n", line.trim_start_matches([' ', '#']));
                    }
                }
                (Some(value), _) => text += &format!("{margin}{name}:{value}"),
                (None, Some(instead)) if self.keys.contains_key(&(at, path)) => {
                    text += &format!("{margin}# {name}: not set; {instead}\n");
                }
                (None, _) => {}
            }
        }
        for YamlEntry { key, node, .. } in entries.iter().filter(|entry| kind.key(&entry.key).is_none()) {
            let value = self.value(kind.of_key(key), node, &join(path, key), &below);
            text += &format!("{margin}{}:{value}", quoted(key));
        }
        text
    }

    fn missing(&self, key: &'static Key, at: Position, path: &str, margin: &str) -> Option<String> {
        match (self.keys.get(&(at, path.to_owned())), key.default, &key.kind) {
            (Some(Some(text)), ..) => Some(format!(" {text}\n")),
            (Some(None), Some(default), _) => Some(self.value(&key.kind, default, path, margin)),
            (_, _, kind @ Kind::Map(..)) => {
                let entries = self.map(kind, at, &[], path, margin);
                (!entries.is_empty()).then(|| format!("\n{entries}"))
            }
            _ => None,
        }
    }
}

/// Returns the text. Adds quotes if YAML could read the text as another type.
pub(super) fn quoted(text: &str) -> String {
    scalar(text, false)
}

/// Returns a scalar, which was written without quotes or not.
fn scalar(text: &str, is_plain: bool) -> String {
    let is_any = |words: &[&str]| words.iter().any(|word| text.eq_ignore_ascii_case(word));
    let starts_plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
    let is_plain = is_plain || starts_plain && !is_any(&["true", "false", "null"]);
    let is_safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '_' | '.' | '-' | '+' | '%');
    // Other programs read these words as booleans.
    if is_plain && !is_any(&["yes", "no", "on", "off", "y", "n"]) && text.chars().all(is_safe) {
        return text.to_owned();
    }
    json!(text).to_string()
}
