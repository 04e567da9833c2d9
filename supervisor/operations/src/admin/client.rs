//! Asking a running supervisor, from the command line.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{ControlReply, ControlRequest, MAX_ANSWER_BYTES, SOCKET};

#[derive(Debug, thiserror::Error)]
pub enum ControlClientError {
    #[error(
        "no supervisor can be reached at {0}; is it running? --run-dir or SHADOWSLICE_RUN_DIR says where"
    )]
    Connect(PathBuf, #[source] io::Error),
    #[error("the supervisor did not answer; its log says why")]
    Talk(#[source] io::Error),
    #[error("the supervisor did not answer within {} s; it stands still, or its host does", ANSWERED_WITHIN.as_secs())]
    TooLate,
    #[error("the supervisor's answer could not be understood; are both binaries from one build?")]
    Understand(#[source] serde_json::Error),
}

/// How long an answer may take for which nothing else is waited.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// Waits for the answer: a change's for as long as that takes.
pub fn ask(run_dir: &Path, ask: &ControlRequest) -> Result<ControlReply, ControlClientError> {
    let socket = run_dir.join(SOCKET);
    let mut stream =
        UnixStream::connect(&socket).map_err(|error| ControlClientError::Connect(socket, error))?;
    let mut line = serde_json::to_vec(ask).map_err(ControlClientError::Understand)?;
    line.push(b'\n');
    stream.write_all(&line).map_err(ControlClientError::Talk)?;
    let limit = matches!(ask, ControlRequest::Status | ControlRequest::Plan | ControlRequest::Drain { .. })
        .then_some(ANSWERED_WITHIN);
    stream.set_read_timeout(limit).map_err(ControlClientError::Talk)?;
    let mut answer = String::new();
    let read = BufReader::new(stream).take(MAX_ANSWER_BYTES).read_line(&mut answer);
    read.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => ControlClientError::TooLate,
        _ => ControlClientError::Talk(error),
    })?;
    if answer.is_empty() {
        return Err(ControlClientError::Talk(io::ErrorKind::UnexpectedEof.into()));
    }
    serde_json::from_str(&answer).map_err(ControlClientError::Understand)
}
