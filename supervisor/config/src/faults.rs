//! The faults of a configuration, each with its file, line and key.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The largest number of faults that a list shows. The list ends with the number of the remaining
/// faults.
const MAX_SHOWN: usize = 50;

/// A position in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The line number. The first line is 1.
    pub line: usize,
    /// The column number in characters. The first column is 1.
    pub column: usize,
}

impl Position {
    /// The position of a fault that concerns the whole file.
    pub const START: Self = Self { line: 1, column: 1 };
}

/// A fault of a configuration, or a note about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFault {
    /// The path of the file as the user wrote it.
    pub file: PathBuf,
    /// The position of the value.
    pub at: Position,
    /// The path of the value, such as `models[0].slo`. It is empty for the whole document.
    pub path: String,
    /// The message: what is wrong, and how to correct it.
    pub message: String,
}

impl fmt::Display for ConfigFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, at, path, message } = self;
        write!(f, "{}:{}:{}: ", file.display(), at.line, at.column)?;
        if !path.is_empty() {
            write!(f, "{path}: ")?;
        }
        f.write_str(message)
    }
}

/// An error of loading a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}; give the path of a YAML file", path.display())]
    Read {
        /// The path of the file as the user wrote it.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The configuration has faults. The error's text lists one fault per line.
    #[error("{}", FaultList(.0))]
    Faults(Vec<ConfigFault>),
}

/// A list of faults to display, one per line. If there are more than 50 faults, the last line gives
/// the number of the remaining faults.
#[derive(Debug)]
pub struct FaultList<'a>(pub &'a [ConfigFault]);

impl fmt::Display for FaultList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.0.iter().take(MAX_SHOWN).enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            write!(f, "{separator}{fault}")?;
        }
        match self.0.len().saturating_sub(MAX_SHOWN) {
            0 => Ok(()),
            more => write!(f, "\nand {more} more"),
        }
    }
}

/// The missing keys for which the reader looked, and the values that differ from their text in the
/// document. An entry has the position of the value (of the map, if the key is missing), the path,
/// and the YAML that [`render`](super::render()) writes instead. `None` means the table's default.
pub(super) type ReadKeys = BTreeMap<(Position, String), Option<String>>;

/// The faults and keys that were found so far in a file.
#[derive(Debug)]
pub(super) struct FaultLog {
    file: PathBuf,
    faults: RefCell<Vec<ConfigFault>>,
    keys: RefCell<ReadKeys>,
}

impl FaultLog {
    pub(super) fn new(file: &Path) -> Self {
        Self { file: file.to_owned(), faults: RefCell::default(), keys: RefCell::default() }
    }

    /// Returns a fault of this file, but does not add the fault to the log.
    pub(super) fn describe(&self, at: Position, path: &str, message: impl Into<String>) -> ConfigFault {
        ConfigFault { file: self.file.clone(), at, path: path.to_owned(), message: message.into() }
    }

    pub(super) fn add(&self, at: Position, path: &str, message: impl Into<String>) {
        let fault = self.describe(at, path, message);
        self.faults.borrow_mut().push(fault);
    }

    /// Records that the reader looked for a missing key.
    pub(super) fn missing(&self, at: Position, path: String) {
        self.keys.borrow_mut().entry((at, path)).or_default();
    }

    /// Sets the YAML that [`render`](super::render()) writes for a value.
    pub(super) fn show(&self, at: Position, path: &str, yaml: String) {
        self.keys.borrow_mut().insert((at, path.to_owned()), Some(yaml));
    }

    pub(super) fn take_keys(&self) -> ReadKeys {
        self.keys.take()
    }

    /// Returns the faults in the order of their positions.
    pub(super) fn into_sorted(self) -> Vec<ConfigFault> {
        let mut faults = self.faults.into_inner();
        faults.sort_by_key(|fault| fault.at);
        unique(faults)
    }

    /// Returns the faults of a text from outside the configuration's file, one per line. Leaves out
    /// their positions, because the sender of the text does not see lines and columns.
    pub(super) fn into_text(self) -> Result<(), String> {
        let faults = self.into_sorted().into_iter().map(|fault| match &fault.path[..] {
            "" => fault.message,
            path => format!("{path}: {}", fault.message),
        });
        let faults: Vec<String> = faults.collect();
        if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
    }
}

/// Removes repeated faults. The reader reads an item of `models` once for each version of the model.
pub(super) fn unique(mut faults: Vec<ConfigFault>) -> Vec<ConfigFault> {
    let mut seen = BTreeSet::new();
    faults.retain(|fault| seen.insert((fault.at, fault.path.clone(), fault.message.clone())));
    faults
}
