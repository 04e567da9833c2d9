//! Forwards a worker's standard error, such as ONNX Runtime's log, to the supervisor's log, with
//! the model's name.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::time::Instant;

/// The maximum length of a line in bytes. Longer lines are cut into pieces.
const MAX_LINE_BYTES: usize = 1024;

/// The maximum length of a record of several lines, in bytes. Longer records are cut into pieces.
const MAX_RECORD_BYTES: usize = 16 << 10;

/// The byte that replaces a line break in a record of several lines, such as a traceback. The
/// package for Python models writes it (`shadowslice._errors`).
const NEXT_LINE: u8 = 0x1f;

/// The number of bytes that a worker can write to the log in one burst.
const BURST_BYTES: u64 = 1 << 20;

/// The number of bytes that a worker can write to the log per second in the long run.
const BYTES_PER_SECOND: u64 = 64 << 10;

/// The number of bytes that the log adds to a line, for example for the time and the model.
const LINE_OVERHEAD_BYTES: u64 = 128;

/// Returns the supervisor's end and the worker's end of a pipe for the worker's standard error.
pub(super) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = io::pipe()?;
    Ok((ours.into(), theirs.into()))
}

/// Logs the worker's lines until no process has the other end open.
pub(super) async fn forward(ours: OwnedFd, model: String, pid: i32) {
    let mut pipe_rx = match Receiver::from_owned_fd(ours) {
        Ok(pipe_rx) => pipe_rx,
        Err(error) => {
            tracing::warn!(model, pid, %error, "cannot read a worker's stderr; its further messages are missing from this log");
            return;
        }
    };
    let begun = Instant::now();
    let mut lines = Lines { model, pid, budget: Budget::default() };
    let mut pending = Vec::with_capacity(MAX_LINE_BYTES);
    // An error also ends the loop.
    while pipe_rx.read_buf(&mut pending).await.is_ok_and(|read| read > 0) {
        while let Some(end) = pending.iter().position(|&byte| byte == b'\n') {
            let rest = pending.split_off(end + 1);
            lines.log(&pending[..end], begun.elapsed());
            pending = rest;
        }
        while let Some(end) = overlong(&pending) {
            let rest = pending.split_off(end);
            lines.log(&pending, begun.elapsed());
            pending = rest;
        }
    }
    lines.log(&pending, begun.elapsed());
    lines.log_dropped(lines.budget.dropped);
}

/// Returns the position at which to cut an unfinished line that is too long for one record.
fn overlong(pending: &[u8]) -> Option<usize> {
    let most = if pending[..pending.len().min(2 * MAX_LINE_BYTES)].contains(&NEXT_LINE) {
        MAX_RECORD_BYTES
    } else {
        MAX_LINE_BYTES
    };
    (pending.len() >= most).then_some(most)
}

struct Lines {
    model: String,
    pid: i32,
    budget: Budget,
}

impl Lines {
    fn log(&mut self, line: &[u8], now: Duration) {
        let line: Vec<u8> = line.iter().map(|&byte| if byte == NEXT_LINE { b'\n' } else { byte }).collect();
        let line = String::from_utf8_lossy(&line);
        let line = line.trim();
        if line.is_empty() {
            return;
        }
        if let Some(dropped) = self.budget.take(line.len() as u64, now) {
            self.log_dropped(dropped);
            tracing::warn!(model = self.model, pid = self.pid, line, "a worker wrote this line to stderr");
        }
    }

    fn log_dropped(&self, DroppedLines { lines, bytes }: DroppedLines) {
        if lines > 0 {
            let (model, pid) = (&self.model, self.pid);
            tracing::warn!(
                model,
                pid,
                lines,
                bytes,
                "a worker wrote too much to stderr; the log leaves out this number of lines"
            );
        }
    }
}

/// The lines that were dropped since the last line that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct DroppedLines {
    lines: u64,
    bytes: u64,
}

/// The number of bytes that a worker can still write. After the budget is spent, all lines are
/// dropped until the budget suffices for the lines of one second.
#[derive(Debug)]
struct Budget {
    room: u64,
    spent: bool,
    refilled_at: Duration,
    dropped: DroppedLines,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            room: BURST_BYTES,
            spent: false,
            refilled_at: Duration::ZERO,
            dropped: DroppedLines::default(),
        }
    }
}

impl Budget {
    /// Returns the lines that were dropped before this line, or `None` to drop this line too.
    fn take(&mut self, bytes: u64, now: Duration) -> Option<DroppedLines> {
        let since = now.saturating_sub(self.refilled_at).as_millis();
        let more = u64::try_from(since).unwrap_or(u64::MAX).saturating_mul(BYTES_PER_SECOND) / 1000;
        if more > 0 {
            (self.refilled_at, self.room) = (now, self.room.saturating_add(more).min(BURST_BYTES));
        }
        self.spent &= self.room < BYTES_PER_SECOND;
        match self.room.checked_sub(bytes + LINE_OVERHEAD_BYTES).filter(|_| !self.spent) {
            Some(room) => {
                self.room = room;
                Some(std::mem::take(&mut self.dropped))
            }
            None => {
                self.spent = true;
                self.dropped.lines += 1;
                self.dropped.bytes += bytes;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_told_of() {
        let mut budget = Budget::default();
        let line = 1000;
        let written = (0..10_000).filter(|_| budget.take(line, Duration::ZERO).is_some()).count() as u64;
        assert_eq!(written, BURST_BYTES / (line + LINE_OVERHEAD_BYTES));
        assert_eq!(budget.take(line, Duration::from_millis(900)), None, "not yet room for a second's lines");
        let lines = 10_001 - written;
        let dropped = DroppedLines { lines, bytes: lines * line };
        assert_eq!(budget.take(line, Duration::from_millis(1001)), Some(dropped));
        assert_eq!(budget.take(line, Duration::from_millis(1001)), Some(DroppedLines::default()));
    }

    #[test]
    fn only_a_record_of_several_lines_may_be_longer_than_a_line() {
        let line = [b'x'; 2 * MAX_RECORD_BYTES];
        assert_eq!(overlong(&line[..MAX_LINE_BYTES - 1]), None);
        assert_eq!(overlong(&line[..MAX_LINE_BYTES]), Some(MAX_LINE_BYTES));
        let mut record = line;
        record[40] = NEXT_LINE;
        assert_eq!(overlong(&record[..MAX_RECORD_BYTES - 1]), None);
        assert_eq!(overlong(&record), Some(MAX_RECORD_BYTES));
    }

    #[test]
    fn over_an_hour_no_more_is_written_than_the_rate_allows() {
        let mut budget = Budget::default();
        let line =
            |ms: u64| budget.take(40, Duration::from_millis(ms)).map_or(0, |_| 40 + LINE_OVERHEAD_BYTES);
        let bytes: u64 = (0..3_600_000).map(line).sum();
        assert!(bytes <= BURST_BYTES + 3600 * BYTES_PER_SECOND, "{bytes}");
        assert!(bytes >= 3500 * BYTES_PER_SECOND, "{bytes}");
    }
}
