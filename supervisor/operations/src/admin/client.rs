//! The client of the control socket. The command line uses it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{ControlReply, ControlRequest, MAX_REPLY_BYTES, SOCKET};

#[derive(Debug, thiserror::Error)]
pub enum ControlClientError {
    #[error(
        "cannot reach a supervisor at {0}; start one, or give its run directory with --run-dir or SHADOWSLICE_RUN_DIR"
    )]
    Connect(PathBuf, #[source] io::Error),
    #[error(
        "the connection to the supervisor failed; check that `control` admits this user, and see the supervisor's log"
    )]
    Exchange(#[source] io::Error),
    #[error("the supervisor did not answer within {} s; check whether the supervisor or its host hangs", REPLY_TIMEOUT.as_secs())]
    Timeout,
    #[error("cannot read the supervisor's reply; use the `shadowslice` program that the supervisor runs")]
    Decode(#[source] serde_json::Error),
}

/// The time within which the supervisor must reply to a request that it can answer immediately.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends a request and waits for the reply. If the request changes something, the reply arrives
/// when the change is complete.
pub fn send(run_dir: &Path, request: &ControlRequest) -> Result<ControlReply, ControlClientError> {
    let socket = run_dir.join(SOCKET);
    let mut stream =
        UnixStream::connect(&socket).map_err(|error| ControlClientError::Connect(socket, error))?;
    let mut line = serde_json::to_vec(request).map_err(ControlClientError::Decode)?;
    line.push(b'\n');
    stream.write_all(&line).map_err(ControlClientError::Exchange)?;
    let reads = matches!(request, ControlRequest::Status | ControlRequest::Top | ControlRequest::Plan);
    let limit = (reads || matches!(request, ControlRequest::Drain { .. })).then_some(REPLY_TIMEOUT);
    stream.set_read_timeout(limit).map_err(ControlClientError::Exchange)?;
    let mut answer = String::new();
    let read = BufReader::new(stream).take(MAX_REPLY_BYTES).read_line(&mut answer);
    read.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => ControlClientError::Timeout,
        _ => ControlClientError::Exchange(error),
    })?;
    if answer.is_empty() {
        return Err(ControlClientError::Exchange(io::ErrorKind::UnexpectedEof.into()));
    }
    serde_json::from_str(&answer).map_err(ControlClientError::Decode)
}
