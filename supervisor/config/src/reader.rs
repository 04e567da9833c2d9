//! Reads typed values from a YAML tree. The reader records every fault and continues.

use std::fmt;
use std::ops::RangeBounds;
use std::path::Path;
use std::time::Duration;

use strsim::levenshtein;

use super::faults::{ConfigFault, FaultLog, Position};
use super::keys::{Items, Key, Kind, NumberRange, Words};
use super::units::{self, show_duration, show_size};
use super::yaml::{YamlContent, YamlEntry, YamlNode};

/// A value in the tree, with its path and its kind in the table of keys.
#[derive(Debug, Clone)]
pub(super) struct Value<'a> {
    node: &'a YamlNode,
    kind: &'static Kind,
    path: String,
    log: &'a FaultLog,
}

/// The entries of a map with known keys.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    /// The position of the map, or `None` if the value is not a map. In that case missing keys are
    /// not reported.
    at: Option<Position>,
    path: String,
    entries: &'a [YamlEntry],
    keys: &'static [Key],
    log: &'a FaultLog,
}

impl<'a> Value<'a> {
    pub(super) fn root(node: &'a YamlNode, kind: &'static Kind, log: &'a FaultLog) -> Self {
        Self { node, kind, path: String::new(), log }
    }

    pub(super) fn line(&self) -> usize {
        self.node.at.line
    }

    pub(super) fn fault(&self, message: impl Into<String>) {
        self.log.add(self.node.at, &self.path, message);
    }

    pub(super) fn describe(&self, message: impl Into<String>) -> ConfigFault {
        self.log.describe(self.node.at, &self.path, message)
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    pub(super) fn is_list(&self) -> bool {
        matches!(self.node.content, YamlContent::List(_))
    }

    pub(super) fn is_map(&self) -> bool {
        matches!(self.node.content, YamlContent::Map(_))
    }

    pub(super) fn is_scalar(&self) -> bool {
        matches!(self.node.content, YamlContent::Scalar { .. })
    }

    /// Returns the entries of a map, and records a fault for each unknown key. If the value is not
    /// a map, records a fault and returns no entries.
    pub(super) fn fields(&self) -> Fields<'a> {
        let keys = self.kind.keys();
        let known: Vec<_> = keys.iter().map(|key| key.name).collect();
        let example = known.iter().take(3).copied().collect::<Vec<_>>().join(", ");
        let entries = self.entries(&format!("a map (with keys such as {example})"));
        for entry in entries.iter().filter(|entry| !known.contains(&entry.key.as_str())) {
            self.log.add(entry.at, &join(&self.path, &entry.key), unknown_key(&entry.key, &known));
        }
        let at = self.is_map().then_some(self.node.at);
        Fields { at, path: self.path.clone(), entries, keys, log: self.log }
    }

    /// Returns the entries of a map whose keys may have any name. If the value is not a map,
    /// records a fault.
    pub(super) fn any_fields(&self) -> impl Iterator<Item = (&'a str, Value<'a>)> {
        let entries = self.entries("a map of keys and values");
        entries.iter().map(|entry| (entry.key.as_str(), self.child(&entry.key, &entry.node)))
    }

    fn entries(&self, wanted: &str) -> &'a [YamlEntry] {
        match &self.node.content {
            YamlContent::Map(entries) => entries,
            _ => {
                self.wrong(wanted);
                &[]
            }
        }
    }

    /// Returns the value of a key of a map. Never records a fault.
    pub(super) fn entry(&self, key: &str) -> Option<Value<'a>> {
        Some(self.child(key, self.node.get(key)?))
    }

    fn child(&self, key: &str, node: &'a YamlNode) -> Value<'a> {
        Value { node, kind: self.kind.of_key(key), path: join(&self.path, key), log: self.log }
    }

    /// Returns the items of a list. If the value is not a list, or the table does not allow this
    /// number of items, records a fault and returns no items.
    pub(super) fn items(&self) -> Vec<Value<'a>> {
        let YamlContent::List(items) = &self.node.content else {
            self.wrong("a list");
            return Vec::new();
        };
        let &Items { ref kind, least, most } = self.kind.items();
        if !(least..=most).contains(&items.len()) {
            self.fault(match items.len() {
                0 => "the list is empty; add an item, or remove the key".to_owned(),
                few if few < least => format!("the list has too few items: {few}; use at least {least}"),
                many => format!("the list has too many items: {many}; use at most {most}"),
            });
            return Vec::new();
        }
        let item = |(index, node)| {
            let path = format!("{}[{index}]", self.path);
            Value { node, kind, path, log: self.log }
        };
        items.iter().map(|node| &**node).enumerate().map(item).collect()
    }

    /// Returns the values of a list's items without those that have a fault. Records a fault for each
    /// value that occurs twice.
    pub(super) fn distinct<T: PartialEq>(&self, read: impl Fn(&Value<'a>) -> Option<T>) -> Vec<T> {
        let mut values = Vec::new();
        for item in self.items() {
            let Some(value) = read(&item) else { continue };
            if values.contains(&value) {
                item.fault("this is already in the list; remove it");
            }
            values.push(value);
        }
        values
    }

    /// Sets the YAML that [`render`](super::render()) writes instead of this value.
    pub(super) fn show(&self, yaml: String) {
        self.log.show(self.node.at, &self.path, yaml);
    }

    /// Returns a text. Records a fault if the text is empty or contains a control character.
    pub(super) fn text(&self) -> Option<&'a str> {
        match self.word() {
            None => self.wrong("text"),
            Some("") => self.fault("empty text; write a text, or remove the key"),
            Some(text) if text.contains(char::is_control) => {
                self.fault("the text has a line break or another control character; remove it")
            }
            good => return good,
        }
        None
    }

    /// Returns the text of a scalar. Never records a fault.
    pub(super) fn word(&self) -> Option<&'a str> {
        match &self.node.content {
            YamlContent::Scalar { text, .. } if !self.node.is_null() => Some(text),
            _ => None,
        }
    }

    pub(super) fn parsed<T, E: fmt::Display>(&self, parse: impl FnOnce(&str) -> Result<T, E>) -> Option<T> {
        parse(self.text()?).map_err(|error| self.fault(error.to_string())).ok()
    }

    pub(super) fn whole<T: TryFrom<i64>>(&self) -> Option<T> {
        let (least, most) = self.kind.whole();
        let kind = format!("a whole number from {least} to {most}");
        let number = self.number_text(&kind)?.parse().ok();
        let number =
            number.filter(|number| (least..=most).contains(number)).and_then(|n| T::try_from(n).ok());
        if number.is_none() {
            self.wrong(&kind);
        }
        number
    }

    pub(super) fn number(&self) -> Option<f64> {
        let NumberRange { wanted, least, most } = self.kind.number();
        let number = self.number_text(wanted)?.parse().ok();
        let number = number.filter(|number: &f64| number.is_finite() && (*least, *most).contains(number));
        if number.is_none() {
            self.wrong(wanted);
        }
        number
    }

    pub(super) fn duration(&self) -> Option<Duration> {
        let duration = self.parsed(units::duration)?;
        let (least, most) = self.kind.duration();
        if (least..=most).contains(&duration) {
            return Some(duration);
        }
        let (least, is_open) = (show_duration(least), most == units::MAX_DURATION);
        self.fault(match is_open {
            true => format!("too short; use at least {least}"),
            false => format!("must be from {least} to {}", show_duration(most)),
        });
        None
    }

    pub(super) fn size(&self) -> Option<u64> {
        self.size_from(self.kind.size().0)
    }

    /// Returns a size of at least `least` bytes and at most the table's bound.
    pub(super) fn size_from(&self, least: u64) -> Option<u64> {
        let (size, (_, most)) = (self.parsed(units::size)?, self.kind.size());
        if !(least..=most).contains(&size) {
            self.fault(format!("must be from {} to {}", show_size(least), show_size(most)));
            return None;
        }
        Some(size)
    }

    fn number_text(&self, kind: &str) -> Option<&'a str> {
        match &self.node.content {
            YamlContent::Scalar { text, plain: true } => Some(text),
            _ => {
                self.wrong(kind);
                None
            }
        }
    }

    pub(super) fn flag(&self) -> Option<bool> {
        match &self.node.content {
            YamlContent::Scalar { text, plain: true } if text == "true" => Some(true),
            YamlContent::Scalar { text, plain: true } if text == "false" => Some(false),
            _ => {
                self.wrong("true or false");
                None
            }
        }
    }

    pub(super) fn one_of<T: Copy, const N: usize>(&self, known: &Words<T, N>) -> Option<T> {
        let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
        let Some(text) = self.word() else {
            self.wrong(&alternatives(&names));
            return None;
        };
        let found = known.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        if found.is_none() {
            let advice = match similar(text, &names) {
                Some(name) => format!("did you mean `{name}`?"),
                None => format!("use {}", alternatives(&names)),
            };
            self.fault(format!("unknown value `{}`; {advice}", shortened(text)));
        }
        found
    }

    /// Returns a message that suggests one of these words if the value is similar to it.
    pub(super) fn similar_word(&self, words: &[&str]) -> Option<String> {
        let text = self.word().filter(|_| self.is_plain())?;
        let word = similar(text, words)?;
        Some(format!("unknown value `{}`; did you mean `{word}`?", shortened(text)))
    }

    fn wrong(&self, wanted: &str) {
        let got = match &self.node.content {
            _ if self.node.is_null() => {
                return self.fault(format!("the key has no value; write {wanted}, or remove the key"));
            }
            YamlContent::Scalar { text, plain: true } => format!("`{}`", shortened(text)),
            YamlContent::Scalar { text, .. } => format!("the text \"{}\"", shortened(text)),
            YamlContent::List(_) => "a list".to_owned(),
            YamlContent::Map(_) => "a map".to_owned(),
        };
        self.fault(format!("must be {wanted}, not {got}"));
    }

    pub(super) fn is_plain(&self) -> bool {
        matches!(self.node.content, YamlContent::Scalar { plain: true, .. })
    }
}

impl<'a> Fields<'a> {
    /// Returns the names of the keys that the table allows.
    pub(super) fn names(&self) -> Vec<&'static str> {
        self.keys.iter().map(|key| key.name).collect()
    }

    fn key(&self, name: &str) -> &'static Key {
        let key = self.keys.iter().find(|key| key.name == name);
        key.expect("the table has each key that is read")
    }

    pub(super) fn get(&self, name: &'static str) -> Option<Value<'a>> {
        let value = self.written(name);
        if let (None, Some(at)) = (&value, self.at) {
            self.log.missing(at, join(&self.path, name));
        }
        value
    }

    fn written(&self, name: &'static str) -> Option<Value<'a>> {
        let kind = &self.key(name).kind;
        let entry = self.entries.iter().find(|entry| entry.key == name)?;
        Some(Value { node: &entry.node, kind, path: join(&self.path, name), log: self.log })
    }

    /// Returns whether the document has the key.
    pub(super) fn has(&self, name: &'static str) -> bool {
        self.written(name).is_some()
    }

    /// Sets the YAML that [`render`](super::render()) writes for a key, whether or not the document has
    /// the key.
    pub(super) fn show(&self, name: &'static str, yaml: String) {
        match (self.written(name), self.at) {
            (Some(value), _) => value.show(yaml),
            (None, Some(at)) => self.log.show(at, &join(&self.path, name), yaml),
            (None, None) => {}
        }
    }

    pub(super) fn required(&self, key: &'static str, why: &str) -> Option<Value<'a>> {
        let value = self.get(key);
        if value.is_none() {
            self.fault(key, format!("missing; {why}"));
        }
        value
    }

    /// Records a fault for each of these keys that the map has.
    pub(super) fn forbid(&self, keys: &[&'static str], why: &str) {
        for value in keys.iter().filter_map(|key| self.written(key)) {
            value.fault(format!("{why}; remove the key"));
        }
    }

    /// Returns the value of a key, or the table's default if the key is missing or its value has a
    /// fault.
    pub(super) fn read<T>(&self, name: &'static str, read: impl Fn(&Value<'_>) -> Option<T>) -> T {
        let written = self.get(name).and_then(|value| read(&value));
        written.unwrap_or_else(|| self.default(name, read))
    }

    /// Returns the default of a key in the table.
    pub(super) fn default<T>(&self, name: &'static str, read: impl Fn(&Value<'_>) -> Option<T>) -> T {
        let (key, log) = (self.key(name), FaultLog::new(Path::new("")));
        let value = key.default.and_then(|node| read(&Value::root(node, &key.kind, &log)));
        value.expect("the defaults in the table are valid")
    }

    /// Returns the value of a key, or `None` if the key is missing or its value has a fault.
    pub(super) fn optional<T>(
        &self,
        name: &'static str,
        read: impl FnOnce(&Value<'a>) -> Option<T>,
    ) -> Option<T> {
        self.get(name).and_then(|value| read(&value))
    }

    /// Returns the entries of the map with this key. Returns no entries if the key is missing.
    pub(super) fn section(&self, name: &'static str) -> Self {
        match self.get(name) {
            Some(value) => value.fields(),
            None => {
                let keys = self.key(name).kind.keys();
                Self { at: self.at, path: join(&self.path, name), entries: &[], keys, log: self.log }
            }
        }
    }

    /// Records a fault of a key. If the key is missing, the fault gets the position of the map.
    pub(super) fn fault(&self, key: &'static str, message: impl Into<String>) {
        match self.written(key) {
            Some(value) => value.fault(message),
            None => {
                if let Some(at) = self.at {
                    self.log.add(at, &join(&self.path, key), message);
                }
            }
        }
    }
}

pub(super) fn join(path: &str, key: &str) -> String {
    let key = shortened(key);
    if path.is_empty() { key } else { format!("{path}.{key}") }
}

/// The largest number of characters of a user's text that a message quotes.
const MAX_QUOTED: usize = 60;

fn shortened(text: &str) -> String {
    let mut start: String =
        text.chars().take(MAX_QUOTED).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if start.len() < text.len() {
        start.push_str("...");
    }
    start
}

fn unknown_key(key: &str, known: &[&str]) -> String {
    if key == "<<" {
        return "YAML merge keys are not supported; write out the keys".to_owned();
    }
    match similar(key, known) {
        Some(name) => format!("unknown key; did you mean `{name}`?"),
        None => format!("unknown key; use one of {}", known.join(", ")),
    }
}

/// Returns the known name that is most similar to the text, ignoring case. Returns `None` if no
/// name is similar enough.
fn similar<'n>(text: &str, known: &[&'n str]) -> Option<&'n str> {
    // A long text would take long to compare, and no known name is that long.
    if text.len() > MAX_QUOTED {
        return None;
    }
    let text = text.to_lowercase();
    let (distance, name) =
        known.iter().map(|name| (levenshtein(&text, &name.to_lowercase()), *name)).min()?;
    (distance <= 1 + name.len() / 4).then_some(name)
}

fn alternatives(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [only] => format!("`{only}`"),
        [rest @ .., last] => {
            let rest: Vec<_> = rest.iter().map(|name| format!("`{name}`")).collect();
            format!("{} or `{last}`", rest.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_misses_are_recognised() {
        assert_eq!(unknown_key("modles", &["models", "gpus"]), "unknown key; did you mean `models`?");
        assert_eq!(unknown_key("colour", &["models", "gpus"]), "unknown key; use one of models, gpus");
        assert_eq!(unknown_key("SLO", &["share", "slo"]), "unknown key; did you mean `slo`?");
    }

    #[test]
    fn long_texts_are_shortened() {
        assert_eq!(shortened("short"), "short");
        assert_eq!(shortened(&"é".repeat(1000)), format!("{}...", "é".repeat(MAX_QUOTED)));
        assert_eq!(shortened("two\nlines"), "two lines");
    }
}
