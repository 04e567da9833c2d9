//! Which MPS this is. For display only: every generation is driven by percentages, like the second.

use std::fmt;

use super::answers;
use super::control::{Control, ControlError};

/// The first version of the control program that speaks the third protocol.
const THIRD: u32 = 13040;

/// A generation of MPS, by what its control program can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// Shares by percentage.
    Percentages {
        /// Its control program's version, e.g. 13000.
        version: u32,
    },
    /// Static partitions of whole SMs besides.
    StaticPartitions {
        /// Its control program's version.
        version: u32,
    },
    /// Named servers and namespaces besides.
    Namespaces {
        /// Its control program's version.
        version: u32,
    },
    /// The control program does not say its version.
    Unknown,
}

impl Generation {
    /// Asks the control program, and the daemon if one runs.
    pub async fn of(control: &Control) -> Result<Self, ControlError> {
        let Some(version) = answers::version(&control.version().await?) else { return Ok(Self::Unknown) };
        if version >= THIRD {
            return Ok(Self::Namespaces { version });
        }
        // Without a daemon the command gets no answer, and static partitions count as missing.
        let lists = control.say("lspart").await.is_ok_and(|text| answers::knows(&text));
        Ok(if lists { Self::StaticPartitions { version } } else { Self::Percentages { version } })
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percentages { version } => write!(f, "v2, version {version}"),
            Self::StaticPartitions { version } => write!(f, "v2 with static partitions, version {version}"),
            Self::Namespaces { version } => write!(f, "v3, version {version}"),
            Self::Unknown => f.write_str("of an unknown version"),
        }
    }
}
