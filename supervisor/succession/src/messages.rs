//! The messages between two supervisors during an upgrade. Each message is a line of JSON. Later versions
//! may add fields.

use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use shadowslice_control::backend::MpsHandover;
use shadowslice_control::models::Served;
use shadowslice_ingress::Region;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// The environment variable with the descriptor over which a supervisor talks to its predecessor.
pub(crate) const DESCRIPTOR_VARIABLE: &str = "SHADOWSLICE_PREDECESSOR";

/// The maximum length of a message, in bytes.
pub(crate) const MAX_LINE: u64 = 16 << 20;

/// The first message, with which the next supervisor starts.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HandoverState {
    pub(crate) run_dir: PathBuf,
    /// The descriptor of the lock, in the next supervisor.
    pub(crate) lock: RawFd,
    /// The descriptor of the socket to which requests of moved models are relayed.
    pub(crate) relay: RawFd,
    pub(crate) sockets: Vec<(String, RawFd)>,
    #[serde(default)]
    pub(crate) mps: Vec<MpsHandover>,
}

/// A message of the next supervisor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Progress {
    /// The model serves, with these inputs and outputs, or `why` is the reason why it does not.
    Serves { model: String, described: Value, why: Option<String> },
    /// No further model follows.
    Started,
    /// The next supervisor exits, for this reason.
    Failed(String),
}

/// A message of the supervisor that serves.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Instruction {
    /// The workers of the next model may start.
    Next,
    /// The previous supervisor serves the model again.
    Drop { model: String },
    /// The next supervisor accepts connections from now on. This is the last message.
    Go(FinalState),
}

/// The state at the moment when the next supervisor begins to accept connections.
#[derive(Debug, Serialize, Deserialize)]
pub struct FinalState {
    /// True if the host is drained.
    pub drained: bool,
    pub drained_models: Vec<String>,
    /// The shared-memory regions that clients have registered.
    pub regions: Vec<Region>,
}

/// Returns a message as a line.
pub(crate) fn line(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

pub(crate) async fn send(to: &mut OwnedWriteHalf, message: &impl Serialize) -> io::Result<()> {
    to.write_all(&line(message)?).await
}

/// Returns the next message, or `None` if the other supervisor has closed its socket.
pub(crate) async fn receive<T: DeserializeOwned>(
    from: &mut BufReader<OwnedReadHalf>,
) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    from.take(MAX_LINE).read_until(b'\n', &mut line).await?;
    if line.is_empty() { Ok(None) } else { Ok(Some(serde_json::from_slice(&line)?)) }
}

/// Returns the inputs and outputs of a model, as reported by its workers.
pub(crate) fn described(model: &Served) -> Value {
    let metadata = model.pipeline.metadata();
    metadata.and_then(|metadata| serde_json::to_value(&*metadata).ok()).unwrap_or_default()
}
