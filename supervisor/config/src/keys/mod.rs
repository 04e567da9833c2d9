//! The table of all keys. The reader, `check --print`, `check --schema` and the test of
//! docs/configuration.md take names, kinds, bounds, defaults and descriptions from this table.

mod model;
mod profile;
mod schema;
mod supervisor;
#[cfg(test)]
mod tests;

use std::ops::Bound;
use std::time::Duration;

use super::units::{self, show_duration, show_size};

pub(super) use model::{CLIENT_CHANGES, ENGINES, HANDOVERS, ON_LATE, PROVIDERS, STANDBYS};
pub(super) use profile::PROFILE;
pub use schema::schema;
pub(super) use supervisor::{ACCESS, CONFIG, PARTITIONS, STARTS};

/// A key of a map in the configuration.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) default: KeyDefault,
    /// The description, which docs/configuration.md contains too.
    pub(super) meaning: &'static str,
}

/// The effect of a missing key.
#[derive(Debug)]
pub(super) enum KeyDefault {
    /// The key is required.
    Required,
    /// The default. A list or a map is written as JSON.
    Value(&'static str),
    /// The key has no fixed default. The text says what applies instead. It is empty if the key has
    /// no effect of its own.
    Unset(&'static str),
}

/// The values that a key can have.
#[derive(Debug)]
pub(super) enum Kind {
    Flag,
    /// A text. Numbers and booleans are read as text too.
    Text,
    /// A text that matches this regular expression.
    Pattern(&'static str),
    /// One of these words.
    Word(&'static [&'static str]),
    /// A whole number between two bounds, including them.
    Whole(i64, i64),
    Number(NumberRange),
    /// A duration between two bounds, including them.
    Duration(Duration, Duration),
    /// A size in bytes between two bounds, including them.
    Size(u64, u64),
    /// A whole percentage of a GPU's SMs.
    Share,
    /// A percentage of requests.
    Sample,
    /// A list with the least and the largest number of items.
    List(&'static Kind, usize, usize),
    Map(&'static [Key]),
    /// A map that can have other keys besides those listed, with values of this kind.
    Open(&'static [Key], &'static Kind),
    Either(&'static [Kind]),
}

/// The items of a list: their kind, and the bounds of their number.
pub(super) struct Items {
    pub(super) kind: &'static Kind,
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

/// The words of a key, each with the value that it stands for.
pub(super) type Words<T, const N: usize> = [(&'static str, T); N];

const fn key(name: &'static str, kind: Kind, default: KeyDefault, meaning: &'static str) -> Key {
    Key { name, kind, default, meaning }
}

/// Returns the words without their values.
const fn names<T: Copy, const N: usize>(words: Words<T, N>) -> [&'static str; N] {
    let (mut names, mut index) = ([""; N], 0);
    while index < N {
        names[index] = words[index].0;
        index += 1;
    }
    names
}

/// The largest size that a key can have, in bytes. It only excludes mistakes.
const LARGEST: u64 = 1 << 50;

impl Kind {
    const ANY_DURATION: Self = Self::Duration(Duration::ZERO, units::MAX_DURATION);
    /// An axis of a shape in which every axis has a size.
    const AXIS: Self = Self::Whole(1, i32::MAX as i64);
    const SHAPE: Self = Self::List(&Self::AXIS, 0, 32);

    /// Returns the kind of a duration of at least `least` ms.
    const fn from_ms(least: u64) -> Self {
        Self::Duration(Duration::from_millis(least), units::MAX_DURATION)
    }

    /// Returns what `find` returns for this kind or for the first alternative that fits.
    fn find<T>(&'static self, find: impl Fn(&'static Self) -> Option<T>) -> Option<T> {
        let kinds = if let Self::Either(kinds) = self { kinds } else { std::slice::from_ref(self) };
        kinds.iter().find_map(find)
    }

    /// Returns the known keys of a map.
    pub(super) fn keys(&'static self) -> &'static [Key] {
        let keys = self
            .find(|kind| if let Self::Map(keys) | Self::Open(keys, _) = kind { Some(*keys) } else { None });
        keys.unwrap_or_default()
    }

    pub(super) fn has_key(&'static self, name: &str) -> bool {
        self.keys().iter().any(|key| key.name == name)
    }

    /// Returns the kind of a map's key. A value whose kind the table does not give is a text.
    pub(super) fn of_key(&'static self, name: &str) -> &'static Self {
        let known = self.keys().iter().find(|key| key.name == name).map(|key| &key.kind);
        let others = || self.find(|kind| if let Self::Open(_, others) = kind { Some(*others) } else { None });
        known.or_else(others).unwrap_or(&Self::Text)
    }

    /// Returns the items that the table allows in a list.
    pub(super) fn items(&'static self) -> Items {
        let items = self.find(|kind| match *kind {
            Self::List(kind, least, most) => Some(Items { kind, least, most }),
            _ => None,
        });
        items.unwrap_or(Items { kind: &Self::Text, least: 0, most: usize::MAX })
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

    /// Returns the bounds in the form in which documents state them. Bounds that only exclude mistakes
    /// are left out, such as those of indices.
    fn bounds(&self) -> Vec<String> {
        match self {
            Self::Duration(least, most) => {
                let least = (!least.is_zero()).then(|| show_duration(*least));
                let most = (*most < units::MAX_DURATION).then(|| show_duration(*most));
                least.into_iter().chain(most).collect()
            }
            Self::Size(least, most) => {
                let least = (*least > 1).then(|| show_size(*least));
                let most = (*most < LARGEST).then(|| show_size(*most));
                least.into_iter().chain(most).collect()
            }
            Self::Whole(least, most) => {
                let least = (*least > 0).then(|| least.to_string());
                least.into_iter().chain([most.to_string()]).collect()
            }
            Self::List(_, least, most) if least < most && *most < usize::MAX => vec![most.to_string()],
            _ => Vec::new(),
        }
    }
}
