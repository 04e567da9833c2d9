//! What a CUDA process finds in given surroundings, asked of one: `shadowslice-worker --probe`. The
//! supervisor opens no CUDA context of its own.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use super::Environment;
use super::command::{self, CommandError};

/// How long a probe may take: a driver that is not kept loaded takes seconds to come up.
const LIMIT: Duration = Duration::from_secs(60);

/// What a CUDA process finds.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Probed {
    /// The SMs that it was given.
    pub sms: u32,
    /// The GPU's UUID.
    pub uuid: String,
    /// The GPU's name.
    pub name: String,
    /// The version of CUDA that the driver speaks, e.g. 13000.
    pub driver: u32,
    /// Bytes of the GPU's memory.
    pub memory_total: u64,
    /// Bytes that nobody uses.
    pub memory_free: u64,
}

/// Why a probe found nothing.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// It did not run.
    #[error("the GPU cannot be probed")]
    Run(#[source] CommandError),
    /// It said no.
    #[error("no CUDA process can use the GPU: {0}")]
    Refused(String),
    /// It said something else.
    #[error("the probe said {said:?}; install both binaries from one build")]
    Unclear {
        /// Its words.
        said: String,
        /// What is wrong with them.
        #[source]
        source: serde_json::Error,
    },
}

/// Runs the probe in these surroundings.
pub async fn probe(program: &Path, environment: &Environment) -> Result<Probed, ProbeError> {
    let said = command::run(program, &["--probe"], environment, "", LIMIT).await.map_err(ProbeError::Run)?;
    if !said.status.success() {
        let why = said.err.trim().trim_start_matches("error: ");
        let why = if why.is_empty() { said.status.to_string() } else { why.to_owned() };
        return Err(ProbeError::Refused(why));
    }
    serde_json::from_str(said.out.trim())
        .map_err(|source| ProbeError::Unclear { said: said.out.trim().to_owned(), source })
}
