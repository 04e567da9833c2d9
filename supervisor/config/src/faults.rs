//! Faults of a configuration, each with its place.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Further faults are counted.
const MAX_SHOWN: usize = 50;

/// Both count from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    pub line: usize,
    /// The character in the line.
    pub column: usize,
}

impl Position {
    /// For faults of the whole file.
    pub const START: Self = Self { line: 1, column: 1 };
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFault {
    /// As the user named it.
    pub file: PathBuf,
    pub at: Position,
    /// Such as `models[0].slo`; empty for the whole document.
    pub path: String,
    /// The fault and how to mend it.
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

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {}; give the path of a YAML file", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// All faults; every line of the text is a fault.
    #[error("{}", FaultList(.0))]
    Faults(Vec<ConfigFault>),
}

/// One a line and not too many.
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

#[derive(Debug)]
pub(super) struct FaultLog {
    file: PathBuf,
    faults: RefCell<Vec<ConfigFault>>,
}

impl FaultLog {
    pub(super) fn new(file: &Path) -> Self {
        Self { file: file.to_owned(), faults: RefCell::default() }
    }

    /// Not yet in the log.
    pub(super) fn describe(&self, at: Position, path: &str, message: impl Into<String>) -> ConfigFault {
        ConfigFault { file: self.file.clone(), at, path: path.to_owned(), message: message.into() }
    }

    pub(super) fn add(&self, at: Position, path: &str, message: impl Into<String>) {
        let fault = self.describe(at, path, message);
        self.faults.borrow_mut().push(fault);
    }

    pub(super) fn into_sorted(self) -> Vec<ConfigFault> {
        let mut faults = self.faults.into_inner();
        faults.sort_by_key(|fault| fault.at);
        faults
    }
}
