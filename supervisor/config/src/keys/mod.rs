//! The table of all keys. It is the JSON Schema in `schema.json`, with which editors complete and check
//! the YAML. The reader and `check --print` take names, kinds, bounds and defaults from it.
//!
//! Some values need more than a schema expresses. `x-minimum` and `x-maximum` are the bounds of a
//! duration, and `title` describes a range of numbers. After `; default: `, a description says what
//! applies if a key without a fixed default is missing.

#[cfg(test)]
mod tests;

use std::ops::Bound;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::engine::EngineName;
use super::faults::FaultLog;
use super::types::{AnswerComparison, HandoverMode, OnLate, Partitioning, ProviderKind, SleepConfig};
use super::units;
use super::yaml::{self, YamlNode};

const SCHEMA: &str = include_str!("schema.json");

static DOCUMENT: LazyLock<Arc<YamlNode>> = LazyLock::new(|| {
    let document = yaml::parse(SCHEMA, "", &FaultLog::new(Path::new("schema.json")));
    document.expect("the schema is valid JSON")
});

/// The keys of a configuration.
pub(super) static CONFIG: LazyLock<Kind> = LazyLock::new(|| Kind::defined("config"));

/// The keys of a profile.
pub(super) static PROFILE: LazyLock<Kind> = LazyLock::new(|| Kind::defined("profile"));

/// The keys of a model's rollout.
pub(super) static ROLLOUT: LazyLock<Kind> = LazyLock::new(|| Kind::defined("rollout"));

/// The keys of the configuration that a client sends with the protocol's `load` call.
pub(super) static CLIENT_CHANGES: LazyLock<Kind> = LazyLock::new(|| Kind::defined("client_changes"));

/// Returns the JSON Schema of configurations and profiles, in draft 2020-12. A document with
/// `execution_ms` is a profile.
pub fn schema() -> &'static str {
    SCHEMA.trim_end()
}

/// The words of a key, each with the value that it stands for.
pub(super) type Words<T, const N: usize> = [(&'static str, T); N];

pub(super) const ENGINES: Words<EngineName, 3> = [
    ("onnxruntime", EngineName::OnnxRuntime),
    ("python", EngineName::Python),
    ("emulated", EngineName::Emulated),
];

pub(super) const PROVIDERS: Words<ProviderKind, 2> =
    [("cuda", ProviderKind::Cuda), ("tensorrt", ProviderKind::TensorRt)];

/// The words of `versions`. True means all versions. Instead of a word, it can be a list of numbers.
pub(super) const VERSIONS: Words<bool, 2> = [("latest", false), ("all", true)];

/// The words of `rollout.compare`. Instead of a word, it can be a map.
pub(super) const COMPARISONS: Words<AnswerComparison, 3> = [
    ("tolerance", AnswerComparison::Tolerance),
    ("argmax", AnswerComparison::Argmax),
    ("none", AnswerComparison::Off),
];

pub(super) const HANDOVERS: Words<HandoverMode, 4> = [
    ("auto", HandoverMode::Auto),
    ("in-process", HandoverMode::InProcess),
    ("shadow", HandoverMode::Shadow),
    ("never", HandoverMode::Never),
];

/// The words of `isolation`. True means a shared worker.
pub(super) const ISOLATIONS: Words<bool, 2> = [("process", false), ("shared", true)];

/// The words of `sleep`. Instead of a word, it can be a map.
pub(super) const SLEEPS: Words<SleepConfig, 2> =
    [("never", SleepConfig::Never), ("on-pressure", SleepConfig::OnPressure)];

pub(super) const STANDBYS: Words<bool, 2> = [("off", false), ("always", true)];

pub(super) const ON_LATE: Words<OnLate, 2> = [("reject", OnLate::Reject), ("serve", OnLate::Serve)];

pub(super) const STARTS: Words<bool, 2> = [("lenient", false), ("strict", true)];

/// The words of `model_control`. True means all clients.
pub(super) const ACCESS: Words<bool, 2> = [("none", false), ("explicit", true)];

pub(super) const PARTITIONS: Words<Partitioning, 2> =
    [("mps", Partitioning::Mps), ("none", Partitioning::None)];

/// A key of a map in the configuration.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) default: Option<&'static YamlNode>,
    /// The description, which docs/configuration.md contains too.
    description: &'static str,
}

/// The values that a key can have.
#[derive(Debug)]
pub(super) enum Kind {
    /// A text of any format. Numbers and booleans are read as text too.
    Text,
    /// A whole number between two bounds, including them.
    Whole(i64, i64),
    Number(NumberRange),
    /// A duration between two bounds, including them.
    Duration(Duration, Duration),
    /// A size in bytes between two bounds, including them.
    Size(u64, u64),
    List(Box<Items>),
    /// A map with known keys. It can have other keys if their kind is given.
    Map(Vec<Key>, Option<Box<Kind>>),
    Either(Vec<Kind>),
}

/// The items of a list: their kind, and the bounds of their number.
#[derive(Debug)]
pub(super) struct Items {
    pub(super) kind: Kind,
    pub(super) least: usize,
    pub(super) most: usize,
}

#[derive(Debug)]
pub(super) struct NumberRange {
    /// The description of the range in errors.
    pub(super) wanted: &'static str,
    pub(super) least: Bound<f64>,
    pub(super) most: Bound<f64>,
}

/// The items of a list whose kind the table does not give.
static ANY_ITEMS: Items = Items { kind: Kind::Text, least: 0, most: usize::MAX };

impl Key {
    /// Returns what applies if a key without a fixed default is missing.
    pub(super) fn instead(&self) -> Option<&'static str> {
        self.description.split_once("; default: ").map(|(_, instead)| instead)
    }
}

impl Kind {
    fn defined(name: &str) -> Self {
        let definition = DOCUMENT.get("$defs").and_then(|definitions| definitions.get(name));
        Self::of(definition.expect("the schema has each definition that is used"))
    }

    fn of(schema: &'static YamlNode) -> Self {
        let text = |key: &str| schema.get(key).and_then(YamlNode::text);
        let whole = |key: &str| text(key).and_then(|text| text.parse::<u64>().ok());
        let count =
            |key: &str, otherwise| text(key).map_or(otherwise, |text| text.parse().unwrap_or(otherwise));
        let definition = text("$ref").and_then(|reference| reference.strip_prefix("#/$defs/"));
        match (definition, text("type")) {
            (Some("duration"), _) => {
                let bound = |key| text(key).and_then(|text| units::duration(text).ok());
                let least = bound("x-minimum").unwrap_or_default();
                Self::Duration(least, bound("x-maximum").unwrap_or(units::MAX_DURATION))
            }
            (Some("size"), _) => {
                Self::Size(whole("minimum").unwrap_or(0), whole("maximum").unwrap_or(u64::MAX))
            }
            (Some(name), _) => Self::defined(name),
            (None, Some("integer")) => {
                let bound = |key| text(key).and_then(|text| text.parse().ok());
                Self::Whole(bound("minimum").unwrap_or(i64::MIN), bound("maximum").unwrap_or(i64::MAX))
            }
            (None, Some("number")) => Self::Number(NumberRange::of(schema)),
            (None, Some("array")) => Self::List(Box::new(Items {
                kind: schema.get("items").map_or(Self::Text, Self::of),
                least: count("minItems", 0),
                most: count("maxItems", usize::MAX),
            })),
            (None, Some("object")) => {
                let others = schema.get("additionalProperties").filter(|others| others.text().is_none());
                let keys = schema.get("properties").map_or(&[][..], YamlNode::entries);
                let key = |entry: &'static yaml::YamlEntry| Key {
                    name: &entry.key,
                    kind: Self::of(&entry.node),
                    default: entry.node.get("default"),
                    description: entry.node.get("description").and_then(YamlNode::text).unwrap_or_default(),
                };
                Self::Map(keys.iter().map(key).collect(), others.map(|others| Box::new(Self::of(others))))
            }
            _ => match schema.get("anyOf") {
                Some(kinds) => Self::Either(kinds.items().iter().map(|kind| Self::of(kind)).collect()),
                None => Self::Text,
            },
        }
    }

    /// Returns what `find` returns for this kind or for the first alternative that fits.
    fn find<T>(&'static self, find: impl Fn(&'static Self) -> Option<T>) -> Option<T> {
        let kinds = if let Self::Either(kinds) = self { &kinds[..] } else { std::slice::from_ref(self) };
        kinds.iter().find_map(find)
    }

    /// Returns the known keys of a map.
    pub(super) fn keys(&'static self) -> &'static [Key] {
        self.find(|kind| if let Self::Map(keys, _) = kind { Some(&keys[..]) } else { None })
            .unwrap_or_default()
    }

    pub(super) fn key(&'static self, name: &str) -> Option<&'static Key> {
        self.keys().iter().find(|key| key.name == name)
    }

    /// Returns the kind of a map's key. A value whose kind the table does not give is a text.
    pub(super) fn of_key(&'static self, name: &str) -> &'static Self {
        let others =
            || self.find(|kind| if let Self::Map(_, others) = kind { others.as_deref() } else { None });
        self.key(name).map(|key| &key.kind).or_else(others).unwrap_or(&Self::Text)
    }

    /// Returns the items that the table allows in a list.
    pub(super) fn items(&'static self) -> &'static Items {
        self.find(|kind| if let Self::List(items) = kind { Some(&**items) } else { None })
            .unwrap_or(&ANY_ITEMS)
    }

    pub(super) fn whole(&'static self) -> (i64, i64) {
        let range =
            self.find(|kind| if let Self::Whole(least, most) = kind { Some((*least, *most)) } else { None });
        range.expect("the table gives the range of each whole number that is read")
    }

    pub(super) fn number(&'static self) -> &'static NumberRange {
        let range = self.find(|kind| if let Self::Number(range) = kind { Some(range) } else { None });
        range.expect("the table gives the range of each number that is read")
    }

    pub(super) fn duration(&'static self) -> (Duration, Duration) {
        let range = self
            .find(|kind| if let Self::Duration(least, most) = kind { Some((*least, *most)) } else { None });
        range.expect("the table gives the range of each duration that is read")
    }

    pub(super) fn size(&'static self) -> (u64, u64) {
        let range =
            self.find(|kind| if let Self::Size(least, most) = kind { Some((*least, *most)) } else { None });
        range.expect("the table gives the range of each size that is read")
    }
}

impl NumberRange {
    fn of(schema: &'static YamlNode) -> Self {
        let number = |key| schema.get(key).and_then(YamlNode::text).and_then(|text| text.parse().ok());
        let bound = |included, excluded| match (number(included), number(excluded)) {
            (Some(bound), _) => Bound::Included(bound),
            (None, Some(bound)) => Bound::Excluded(bound),
            (None, None) => Bound::Unbounded,
        };
        Self {
            wanted: schema.get("title").and_then(YamlNode::text).unwrap_or("a number"),
            least: bound("minimum", "exclusiveMinimum"),
            most: bound("maximum", "exclusiveMaximum"),
        }
    }
}
