//! The log. Lines go to standard error through a bounded queue. If nothing reads standard error,
//! only the log's thread blocks. If the queue is full, lines are dropped and counted.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use crossbeam_channel::bounded;
use shadowslice_shared::exit;
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

/// The largest number of lines in the queue.
const MAX_QUEUED_LINES: usize = 8192;

/// The time within which the reader of standard error must accept the last lines when the log ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// The capacity of the channel that signals the end of a flush. One signal is sent, which must not
/// wait for the receiver.
const MAX_FLUSH_SIGNALS: usize = 1;

/// Returns the log filter that RUST_LOG specifies. Audit messages pass the filter at every level,
/// unless RUST_LOG contains `audit=off`.
fn filter() -> EnvFilter {
    let level = std::env::var("RUST_LOG").ok().filter(|level| !level.is_empty());
    let wanted = level.and_then(|level| EnvFilter::try_new(format!("audit=info,{level}")).ok());
    wanted.unwrap_or_else(|| EnvFilter::new("info"))
}

fn is_json() -> bool {
    std::env::var_os("SHADOWSLICE_LOG").is_some_and(|form| form == "json")
}

/// Reports a failure like [`exit::fail`], but in the log's format. Bypasses the queue and the log
/// level.
pub fn fail(why: &str, code: u8) -> u8 {
    if !is_json() {
        return exit::fail(why, code);
    }
    let form = tracing_subscriber::fmt().json().with_target(false).with_writer(io::stderr).finish();
    tracing::subscriber::with_default(form, || {
        // Each line is logged separately, because the error text of a faulty configuration has one
        // line per fault.
        why.lines().for_each(|line| tracing::error!("{line}"));
    });
    code
}

/// The running log. Call [`Log::end`] to write the remaining lines.
#[derive(Debug)]
pub struct Log {
    writer: WorkerGuard,
    dropped: ErrorCounter,
}

/// A writer that writes each event as one line, in one call. Line breaks inside an event become
/// spaces.
struct OneLine<W>(W);

impl<W: Write> Write for OneLine<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let (text, end) = event.split_at(event.len() - usize::from(event.ends_with(b"\n")));
        let text = text.iter().map(|&byte| if byte == b'\n' { b' ' } else { byte });
        let line: Vec<u8> = text.chain(end.iter().copied()).collect();
        // The whole line is written in one call, because another supervisor may write to the same
        // file.
        self.0.write_all(&line)?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Log {
    /// Starts the log. Call this once per process. RUST_LOG sets the level, and
    /// SHADOWSLICE_LOG=json selects the JSON format.
    pub fn start() -> Self {
        let queue = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(MAX_QUEUED_LINES);
        let (queue, writer) = queue.finish(OneLine(io::stderr()));
        let dropped = queue.error_counter();
        let log = tracing_subscriber::fmt().with_env_filter(filter()).with_writer(queue).with_target(false);
        // Internal errors are not logged, because they would bypass the queue and could block.
        let log = log.with_ansi(io::stderr().is_terminal()).log_internal_errors(false);
        // An error means that the process already has a log.
        if is_json() {
            log.json().try_init().ok()
        } else {
            log.try_init().ok()
        };
        // Panics also go through the queue.
        std::panic::set_hook(Box::new(|panic| tracing::error!("a thread panicked: {panic}")));
        Self { writer, dropped }
    }

    /// Stops the log when all lines are written. Returns false if nothing reads standard error. In
    /// that case the caller must not write to standard error.
    pub fn end(self) -> bool {
        finish(self.writer, "log-end")
    }

    /// Returns a function that returns the number of dropped lines.
    pub fn dropped(&self) -> impl Fn() -> u64 + Send + Sync + use<> {
        let dropped = self.dropped.clone();
        move || dropped.dropped_lines() as u64
    }
}

/// Stops a writer when all its lines are written. Returns true if the writer stopped in time.
pub(crate) fn finish(writer: WorkerGuard, thread: &str) -> bool {
    let (flushed_tx, flushed_rx) = bounded(MAX_FLUSH_SIGNALS);
    // If nothing reads standard error, the writer reports its failure to standard error and blocks
    // forever. A separate thread is used, because it can block without consequences.
    let flush = move || {
        drop(writer);
        // An error only means that the timeout has expired and nothing waits for the writer.
        flushed_tx.send(()).ok();
    };
    let thread = std::thread::Builder::new().name(thread.to_owned()).spawn(flush);
    thread.is_ok() && flushed_rx.recv_timeout(FLUSH_TIMEOUT).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line() {
        let mut written = Vec::new();
        let mut log = OneLine(&mut written);
        for event in ["one\n", "a thread panicked: at x.rs:1:\nmessage\n", "no end"] {
            assert_eq!(log.write(event.as_bytes()).unwrap(), event.len());
        }
        assert_eq!(String::from_utf8(written).unwrap(), "one\na thread panicked: at x.rs:1: message\nno end");
    }
}
