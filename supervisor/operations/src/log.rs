//! The log. It goes to standard error by way of a bounded queue: a reader that stops reading stops
//! nothing but the log. Lines that find no room are dropped and counted.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use shadowslice_shared::exit;
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

/// Lines that may wait for a reader.
const WAITING: usize = 8192;

/// How long the end waits for the reader of the last lines.
const FLUSHED_WITHIN: Duration = Duration::from_secs(2);

/// By RUST_LOG. What is audited is there at every level, unless `audit=off` is written.
fn filter() -> EnvFilter {
    let level = std::env::var("RUST_LOG").ok().filter(|level| !level.is_empty());
    let wanted = level.and_then(|level| EnvFilter::try_new(format!("audit=info,{level}")).ok());
    wanted.unwrap_or_else(|| EnvFilter::new("info"))
}

fn is_json() -> bool {
    std::env::var_os("SHADOWSLICE_LOG").is_some_and(|form| form == "json")
}

/// [`exit::fail`] in the log's form, but by no queue and at every level.
pub fn fail(why: &str, code: u8) -> u8 {
    if !is_json() {
        return exit::fail(why, code);
    }
    let form = tracing_subscriber::fmt().json().with_target(false).with_writer(io::stderr).finish();
    tracing::subscriber::with_default(form, || {
        // Of a configuration each fault is a line.
        why.lines().for_each(|line| tracing::error!("{line}"));
    });
    code
}

#[derive(Debug)]
pub struct Log {
    writer: WorkerGuard,
    dropped: ErrorCounter,
}

/// Each event is written at once, and stays one line whatever texts of others are in it.
struct OneLine<W>(W);

impl<W: Write> Write for OneLine<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let (text, end) = event.split_at(event.len() - usize::from(event.ends_with(b"\n")));
        let text = text.iter().map(|&byte| if byte == b'\n' { b' ' } else { byte });
        let line: Vec<u8> = text.chain(end.iter().copied()).collect();
        // At once, as another supervisor may write to the same file.
        self.0.write_all(&line)?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Log {
    /// Once a process. RUST_LOG chooses how much, SHADOWSLICE_LOG=json the form.
    pub fn start() -> Self {
        let queue = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(WAITING);
        let (queue, writer) = queue.finish(OneLine(io::stderr()));
        let dropped = queue.error_counter();
        let log = tracing_subscriber::fmt().with_env_filter(filter()).with_writer(queue).with_target(false);
        // Internal errors would go to standard error at once, and wait for its reader.
        let log = log.with_ansi(io::stderr().is_terminal()).log_internal_errors(false);
        // An error means that there is a log already.
        if is_json() {
            log.json().try_init().ok()
        } else {
            log.try_init().ok()
        };
        // As the usual message would.
        std::panic::set_hook(Box::new(|panic| tracing::error!("a thread panicked: {panic}")));
        Self { writer, dropped }
    }

    /// Ends it once its lines were written. False if standard error has no reader for them: then
    /// nothing more is to be written there.
    pub fn end(self) -> bool {
        ends(self.writer, "log-end")
    }

    /// Tells how many lines were dropped so far.
    pub fn dropped(&self) -> impl Fn() -> u64 + Send + Sync + 'static {
        let dropped = self.dropped.clone();
        move || dropped.dropped_lines() as u64
    }
}

/// Ends a writer once its lines were written, and returns whether they were in time.
pub(crate) fn ends(writer: WorkerGuard, thread: &str) -> bool {
    let (done, flushed) = sync_channel(1);
    // Without a reader the writer complains to standard error, and so never ends.
    let flush = move || {
        drop(writer);
        done.send(()).ok();
    };
    let thread = std::thread::Builder::new().name(thread.to_owned()).spawn(flush);
    thread.is_ok() && flushed.recv_timeout(FLUSHED_WITHIN).is_ok()
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
