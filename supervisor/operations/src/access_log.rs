//! The access log: one line of JSON for each request. A separate thread writes the lines.
//!
//! Lines wait in a bounded queue. If the queue is full or the file cannot be written, lines are
//! dropped and counted. The file is reopened after SIGHUP. It is also reopened if its path refers
//! to another file, for example after a log rotation.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use shadowslice_datapath::access::{AccessLog, AccessRecord};
use shadowslice_datapath::log_throttle::LogThrottle;
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};

use crate::log::finish;

/// The largest number of lines in the queue.
const MAX_QUEUED_LINES: usize = 8192;

/// The size of the collected lines, in bytes, at which they are written to the file.
const WRITE_BYTES: usize = 64 << 10;

/// The shortest time between two checks for a renamed file.
const RENAME_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The shortest time between two log messages about dropped lines.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The file mode. Only the owner and the group can read the file, because the lines contain data
/// about clients.
const MODE: u32 = 0o640;

#[derive(Debug, thiserror::Error)]
#[error("cannot open the access log {}; make its folder writable for the supervisor's user, or change access_log", path.display())]
pub struct AccessLogError {
    path: PathBuf,
    source: io::Error,
}

/// The access log and the thread that writes it.
#[derive(Debug)]
pub struct AccessLogWriter {
    log: Arc<AccessLog>,
    guard: WorkerGuard,
    reopen: Arc<AtomicBool>,
    drops: DropCounters,
}

impl AccessLogWriter {
    /// Opens or creates the file, and starts the thread that writes it.
    pub fn start(path: &Path) -> Result<Self, AccessLogError> {
        let file = open(path).map_err(|source| AccessLogError { path: path.to_owned(), source })?;
        let (reopen, drops) = (Arc::new(AtomicBool::new(false)), DropCounters::default());
        let writer = AccessLogSink {
            path: path.to_owned(),
            file,
            lines: Vec::new(),
            count: 0,
            is_torn: false,
            reopen: Arc::clone(&reopen),
            checked: Instant::now(),
            drops: drops.clone(),
            logged: DroppedLines::default(),
            throttle: LogThrottle::new(LOG_INTERVAL),
        };
        let queue = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(MAX_QUEUED_LINES);
        let (queue, guard) = queue.thread_name("access-log").finish(writer);
        // The only possible error is that the counter is already set, but no other code sets it.
        drops.queue_full.set(queue.error_counter()).ok();
        let log = Arc::new(AccessLog::new(move |record| enqueue(&queue, record)));
        Ok(Self { log, guard, reopen, drops })
    }

    pub fn log(&self) -> Arc<AccessLog> {
        Arc::clone(&self.log)
    }

    /// Returns a function that requests a reopen. The file is then reopened before the next lines
    /// are written.
    pub fn reopen(&self) -> impl Fn() + use<> {
        let reopen = Arc::clone(&self.reopen);
        move || reopen.store(true, Relaxed)
    }

    /// Returns a function that returns the current counts of dropped lines.
    pub fn dropped(&self) -> impl Fn() -> DroppedLines + Send + Sync + use<> {
        let drops = self.drops.clone();
        move || drops.count()
    }

    /// Stops the thread when it has written all lines, or after 2 s.
    pub fn end(self) {
        finish(self.guard, "access-log-end");
    }
}

/// The numbers of lines that were dropped since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DroppedLines {
    /// The number of lines that were dropped because the queue was full.
    pub queue_full: u64,
    /// The number of lines that could not be written to the file.
    pub unwritten: u64,
}

#[derive(Debug, Clone, Default)]
struct DropCounters {
    queue_full: Arc<OnceLock<ErrorCounter>>,
    unwritten: Arc<AtomicU64>,
}

impl DropCounters {
    fn count(&self) -> DroppedLines {
        DroppedLines {
            queue_full: self.queue_full.get().map_or(0, |counter| counter.dropped_lines() as u64),
            unwritten: self.unwritten.load(Relaxed),
        }
    }
}

fn enqueue(queue: &NonBlocking, record: &AccessRecord) {
    // Texts and numbers can always be serialized.
    let mut line = serde_json::to_vec(record).unwrap_or_default();
    line.push(b'\n');
    // A full queue drops and counts the line. It does not return an error.
    let _ = queue.clone().write(&line);
}

/// Opens the file. If the file is a named pipe, does not wait for a reader.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(MODE).custom_flags(OFlag::O_NONBLOCK.bits());
    let file = options.open(path)?;
    // Writes may block on a slow reader from now on. This only delays the log's own thread.
    fcntl(&file, FcntlArg::F_SETFL(OFlag::O_APPEND))?;
    Ok(file)
}

/// The open file, and the lines that have not been written yet.
#[derive(Debug)]
struct AccessLogSink {
    path: PathBuf,
    file: File,
    lines: Vec<u8>,
    /// The number of lines in `lines`, which counts as dropped if they cannot be written.
    count: u64,
    /// True if the last line in the file is incomplete.
    is_torn: bool,
    reopen: Arc<AtomicBool>,
    /// The time of the last check for a renamed file.
    checked: Instant,
    drops: DropCounters,
    /// The counts in the last log message about dropped lines.
    logged: DroppedLines,
    throttle: LogThrottle,
}

impl Write for AccessLogSink {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.lines.extend_from_slice(line);
        self.count += 1;
        if self.lines.len() >= WRITE_BYTES {
            self.flush()?;
        }
        Ok(line.len())
    }

    /// Writes the collected lines. Never fails, because the queue would ignore an error.
    fn flush(&mut self) -> io::Result<()> {
        if !self.lines.is_empty() {
            self.reopen_if_needed();
            self.write_lines();
        }
        self.log_dropped();
        Ok(())
    }
}

impl AccessLogSink {
    /// Reopens the file if this was requested or if the file was renamed.
    fn reopen_if_needed(&mut self) {
        let is_requested = self.reopen.swap(false, Relaxed);
        if !is_requested && self.checked.elapsed() < RENAME_CHECK_INTERVAL {
            return;
        }
        self.checked = Instant::now();
        if !is_requested && self.has_its_name() {
            return;
        }
        match open(&self.path) {
            Ok(file) => (self.file, self.is_torn) = (file, false),
            Err(error) => tracing::warn!(
                %error, file = %self.path.display(),
                "cannot reopen the access log; lines still go to the previous file, and the supervisor tries again"
            ),
        }
    }

    fn has_its_name(&self) -> bool {
        let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let named = std::fs::metadata(&self.path).map(identity);
        matches!((named, self.file.metadata().map(identity)), (Ok(named), Ok(own)) if named == own)
    }

    fn write_lines(&mut self) {
        if self.is_torn {
            self.lines.insert(0, b'\n');
        }
        // All lines are written in one call, because another supervisor may write to the same file
        // during an upgrade.
        match self.file.write_all(&self.lines) {
            Ok(()) => self.is_torn = false,
            Err(error) => {
                self.is_torn = true;
                self.drops.unwritten.fetch_add(self.count, Relaxed);
                tracing::debug!(%error, "cannot write the access log");
            }
        }
        self.lines.clear();
        self.count = 0;
    }

    fn log_dropped(&mut self) {
        let now = self.drops.count();
        if now == self.logged || !self.throttle.is_due() {
            return;
        }
        self.logged = now;
        let DroppedLines { queue_full, unwritten } = now;
        tracing::warn!(
            queue_full,
            unwritten,
            file = %self.path.display(),
            "lines of the access log were dropped; check whether the disk is full or slow"
        );
    }
}

#[cfg(test)]
#[path = "access_log_tests.rs"]
mod tests;
