//! What a worker writes to its standard error, such as ONNX Runtime's log: lines of the supervisor's
//! log, under the model's name.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::time::Instant;

/// Longer lines are cut into pieces, in bytes.
const LINE: usize = 1024;

/// Longer records of several lines are cut into pieces, in bytes.
const RECORD: usize = 16 << 10;

/// Stands for a line's end in a record of several lines, such as a traceback: the package of Python
/// models writes it (`shadowslice._errors`).
const NEXT_LINE: u8 = 0x1f;

/// What a worker may have written in the log, in bytes: at once, and each second.
const AT_ONCE: u64 = 1 << 20;
const A_SECOND: u64 = 64 << 10;

/// What the log adds to a line, in bytes: the time, the model.
const AROUND: u64 = 128;

/// Our end of a worker's standard error, and its own.
pub(super) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = io::pipe()?;
    Ok((ours.into(), theirs.into()))
}

/// Logs until no process has the other end any more.
pub(super) async fn log(ours: OwnedFd, model: String, pid: i32) {
    let mut said = match Receiver::from_owned_fd(ours) {
        Ok(said) => said,
        Err(error) => {
            tracing::warn!(model, pid, %error, "cannot read a worker's stderr; its further messages are missing from this log");
            return;
        }
    };
    let begun = Instant::now();
    let mut lines = Lines { model, pid, budget: Budget::default() };
    let mut waiting = Vec::with_capacity(LINE);
    // An error is an end, too.
    while said.read_buf(&mut waiting).await.is_ok_and(|read| read > 0) {
        while let Some(end) = waiting.iter().position(|&byte| byte == b'\n') {
            let rest = waiting.split_off(end + 1);
            lines.tell(&waiting[..end], begun.elapsed());
            waiting = rest;
        }
        while let Some(end) = overlong(&waiting) {
            let rest = waiting.split_off(end);
            lines.tell(&waiting, begun.elapsed());
            waiting = rest;
        }
    }
    lines.tell(&waiting, begun.elapsed());
    lines.tell_of(lines.budget.left_out);
}

/// Returns where to cut what has no end yet, if it is too long for one record.
fn overlong(waiting: &[u8]) -> Option<usize> {
    let most = if waiting[..waiting.len().min(2 * LINE)].contains(&NEXT_LINE) { RECORD } else { LINE };
    (waiting.len() >= most).then_some(most)
}

struct Lines {
    model: String,
    pid: i32,
    budget: Budget,
}

impl Lines {
    fn tell(&mut self, line: &[u8], now: Duration) {
        let line: Vec<u8> = line.iter().map(|&byte| if byte == NEXT_LINE { b'\n' } else { byte }).collect();
        let line = String::from_utf8_lossy(&line);
        let line = line.trim();
        if line.is_empty() {
            return;
        }
        if let Some(left_out) = self.budget.take(line.len() as u64, now) {
            self.tell_of(left_out);
            tracing::warn!(model = self.model, pid = self.pid, line, "a worker wrote this line to stderr");
        }
    }

    fn tell_of(&self, LeftOut { lines, bytes }: LeftOut) {
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

/// What was not written since the last line that was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct LeftOut {
    lines: u64,
    bytes: u64,
}

/// Once it is spent, nothing is written until there is room for a second's lines.
#[derive(Debug)]
struct Budget {
    room: u64,
    spent: bool,
    looked: Duration,
    left_out: LeftOut,
}

impl Default for Budget {
    fn default() -> Self {
        Self { room: AT_ONCE, spent: false, looked: Duration::ZERO, left_out: LeftOut::default() }
    }
}

impl Budget {
    /// What was left out before this line, if it may be written.
    fn take(&mut self, bytes: u64, now: Duration) -> Option<LeftOut> {
        let since = now.saturating_sub(self.looked).as_millis();
        let more = u64::try_from(since).unwrap_or(u64::MAX).saturating_mul(A_SECOND) / 1000;
        if more > 0 {
            (self.looked, self.room) = (now, self.room.saturating_add(more).min(AT_ONCE));
        }
        self.spent &= self.room < A_SECOND;
        match self.room.checked_sub(bytes + AROUND).filter(|_| !self.spent) {
            Some(room) => {
                self.room = room;
                Some(std::mem::take(&mut self.left_out))
            }
            None => {
                self.spent = true;
                self.left_out.lines += 1;
                self.left_out.bytes += bytes;
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
        assert_eq!(written, AT_ONCE / (line + AROUND));
        assert_eq!(budget.take(line, Duration::from_millis(900)), None, "not yet room for a second's lines");
        let lines = 10_001 - written;
        let left_out = LeftOut { lines, bytes: lines * line };
        assert_eq!(budget.take(line, Duration::from_millis(1001)), Some(left_out));
        assert_eq!(budget.take(line, Duration::from_millis(1001)), Some(LeftOut::default()));
    }

    #[test]
    fn only_a_record_of_several_lines_may_be_longer_than_a_line() {
        let line = [b'x'; 2 * RECORD];
        assert_eq!(overlong(&line[..LINE - 1]), None);
        assert_eq!(overlong(&line[..LINE]), Some(LINE));
        let mut record = line;
        record[40] = NEXT_LINE;
        assert_eq!(overlong(&record[..RECORD - 1]), None);
        assert_eq!(overlong(&record), Some(RECORD));
    }

    #[test]
    fn over_an_hour_no_more_is_written_than_the_rate_allows() {
        let mut budget = Budget::default();
        let line = |ms: u64| budget.take(40, Duration::from_millis(ms)).map_or(0, |_| 40 + AROUND);
        let bytes: u64 = (0..3_600_000).map(line).sum();
        assert!(bytes <= AT_ONCE + 3600 * A_SECOND, "{bytes}");
        assert!(bytes >= 3500 * A_SECOND, "{bytes}");
    }
}
