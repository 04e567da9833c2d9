//! What a worker writes to its standard error, such as ONNX Runtime's log: lines of the supervisor's
//! log, under the model's name.

use std::io;
use std::os::fd::OwnedFd;

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;

/// Longer lines are cut into pieces, in bytes.
const LINE: usize = 1024;

/// Our end of a worker's standard error, and its own.
pub(super) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(pipe_with(PipeFlags::CLOEXEC)?)
}

/// Logs until no process has the other end any more.
pub(super) async fn log(ours: OwnedFd, model: String, pid: i32) {
    let mut said = match Receiver::from_owned_fd(ours) {
        Ok(said) => said,
        Err(error) => {
            tracing::warn!(model, pid, %error, "what a worker says cannot be read");
            return;
        }
    };
    let mut waiting = Vec::with_capacity(LINE);
    // An error is an end, too.
    while said.read_buf(&mut waiting).await.is_ok_and(|read| read > 0) {
        while let Some(end) = waiting.iter().position(|&byte| byte == b'\n') {
            let rest = waiting.split_off(end + 1);
            tell(&model, pid, &waiting[..end]);
            waiting = rest;
        }
        while waiting.len() >= LINE {
            let rest = waiting.split_off(LINE);
            tell(&model, pid, &waiting);
            waiting = rest;
        }
    }
    tell(&model, pid, &waiting);
}

fn tell(model: &str, pid: i32, line: &[u8]) {
    let line = String::from_utf8_lossy(line);
    let line = line.trim();
    if !line.is_empty() {
        tracing::warn!(model, pid, line, "a worker says");
    }
}
