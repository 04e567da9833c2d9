//! The access log: a line of JSON for each answered request, written by a thread of its own.
//!
//! Lines wait in a bounded queue. Lines that find no room in it, and lines that the file does not
//! take, are dropped and counted. The file is opened again after SIGHUP, and when its name belongs to
//! another file, as after a rotation.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use serde::Serialize;
use shadowslice_datapath::access::{AccessLog, AccessRecord};
use shadowslice_datapath::peer::Peer;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};

use crate::log::ends;

/// The most lines that wait to be written.
const MAX_WAITING_LINES: usize = 8192;

/// The bytes of lines that are written at once, at most; a line more may follow.
const WRITE_BYTES: usize = 64 << 10;

/// The shortest time between two looks whether the file was renamed.
const RENAMED_INTERVAL: Duration = Duration::from_secs(1);

/// The shortest time between two lines of the log about dropped lines.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// For the owner and the group: lines tell of clients.
const MODE: u32 = 0o640;

#[derive(Debug, thiserror::Error)]
#[error("cannot open the access log {}; make its folder writable for the supervisor's user, or change access_log", path.display())]
pub struct AccessLogError {
    path: PathBuf,
    source: io::Error,
}

/// The writer. Dropping [`AccessLogWriter::end`]'s result is fine: the rest of the lines is written,
/// or dropped if the file does not take them in time.
#[derive(Debug)]
pub struct AccessLogWriter {
    log: Arc<AccessLog>,
    guard: WorkerGuard,
    reopen: Arc<AtomicBool>,
    drops: DropCounters,
}

impl AccessLogWriter {
    /// Opens the file, and makes it if it is not there.
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
            looked: Instant::now(),
            drops: drops.clone(),
            logged: None,
        };
        let queue = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(MAX_WAITING_LINES);
        let (queue, guard) = queue.thread_name("access-log").finish(writer);
        // It is set once, here.
        drops.queue_full.set(queue.error_counter()).ok();
        let log = Arc::new(AccessLog::new(move |record| tell(&queue, record)));
        Ok(Self { log, guard, reopen, drops })
    }

    pub fn log(&self) -> Arc<AccessLog> {
        Arc::clone(&self.log)
    }

    /// Returns what has the file opened again, at the next line.
    pub fn reopen(&self) -> impl Fn() + use<> {
        let reopen = Arc::clone(&self.reopen);
        move || reopen.store(true, Relaxed)
    }

    /// Returns the counts of dropped lines, at any time.
    pub fn dropped(&self) -> impl Fn() -> DroppedLines + Send + Sync + use<> {
        let drops = self.drops.clone();
        move || drops.count()
    }

    /// Ends the log when its lines have been written, after 2 s at the latest.
    pub fn end(self) {
        ends(self.guard, "access-log-end");
    }
}

/// Lines that were dropped since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DroppedLines {
    pub queue_full: u64,
    /// The file could not be written.
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

fn tell(queue: &NonBlocking, record: &AccessRecord) {
    let mut line = line(record);
    line.push(b'\n');
    // It is dropped and counted if there is no room.
    let _ = queue.clone().write(&line);
}

/// The fields of a line. All are there in each line, so that a reader needs one schema.
#[derive(Debug, Serialize)]
struct AccessLogLine<'r> {
    time: String,
    protocol: &'static str,
    method: &'r str,
    path: &'r str,
    model: Option<&'r str>,
    code: u16,
    reason: Option<&'static str>,
    error: Option<&'r str>,
    bytes_in: u64,
    bytes_out: u64,
    latency_ms: f64,
    address: Option<String>,
    uid: Option<u32>,
    pid: Option<i32>,
    client: Option<String>,
    request_id: Option<&'r str>,
}

fn line(record: &AccessRecord) -> Vec<u8> {
    let (address, uid, pid, client) = match &*record.peer {
        Peer::Unix { uid, pid, .. } => (None, Some(*uid), Some(*pid), None),
        Peer::Tcp { address, names } => {
            let client = (!names.is_empty()).then(|| names.join(","));
            (Some(address.to_string()), None, None, client)
        }
    };
    let (bytes_in, bytes_out) = record.bytes;
    let time = OffsetDateTime::from(record.time);
    let time = time.replace_nanosecond(time.microsecond() * 1000).unwrap_or(time);
    let line = AccessLogLine {
        // It fails for years of five digits only.
        time: time.format(&Rfc3339).unwrap_or_default(),
        protocol: record.protocol.name(),
        method: &record.method,
        path: &record.path,
        model: record.model.as_deref(),
        code: record.code,
        reason: record.reason,
        error: record.error.as_deref(),
        bytes_in,
        bytes_out,
        latency_ms: record.latency.as_micros() as f64 / 1000.0,
        address,
        uid,
        pid,
        client,
        request_id: record.request_id.as_deref(),
    };
    // Texts and numbers can always be written.
    serde_json::to_vec(&line).unwrap_or_default()
}

/// Opens a pipe without waiting for its reader.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(MODE).custom_flags(OFlag::O_NONBLOCK.bits());
    let file = options.open(path)?;
    // The thread waits for a slow reader; requests do not.
    fcntl(&file, FcntlArg::F_SETFL(OFlag::O_APPEND))?;
    Ok(file)
}

/// Collects lines until the queue is empty, and then writes them.
#[derive(Debug)]
struct AccessLogSink {
    path: PathBuf,
    file: File,
    lines: Vec<u8>,
    /// The number of lines in `lines`.
    count: u64,
    /// Whether the file's last line is not whole.
    is_torn: bool,
    reopen: Arc<AtomicBool>,
    looked: Instant,
    drops: DropCounters,
    /// The time of the last word about dropped lines, with the counts then.
    logged: Option<(Instant, DroppedLines)>,
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

    /// Never fails, as the queue would drop an error unseen.
    fn flush(&mut self) -> io::Result<()> {
        if !self.lines.is_empty() {
            self.renew();
            self.write_lines();
        }
        self.say_dropped();
        Ok(())
    }
}

impl AccessLogSink {
    /// Opens the file again if that is asked for, or if it was renamed.
    fn renew(&mut self) {
        let asked = self.reopen.swap(false, Relaxed);
        if !asked && self.looked.elapsed() < RENAMED_INTERVAL {
            return;
        }
        self.looked = Instant::now();
        if !asked && self.has_its_name() {
            return;
        }
        match open(&self.path) {
            Ok(file) => (self.file, self.is_torn) = (file, false),
            Err(error) => tracing::warn!(
                %error, file = %self.path.display(),
                "cannot open the access log again; its former file gets the lines"
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
        // At once, as another supervisor may write to the same file during an upgrade.
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

    fn say_dropped(&mut self) {
        let now = self.drops.count();
        let (before, is_due) = match self.logged {
            None => (DroppedLines::default(), true),
            Some((at, before)) => (before, at.elapsed() >= LOG_INTERVAL),
        };
        if now == before || !is_due {
            return;
        }
        self.logged = Some((Instant::now(), now));
        let DroppedLines { queue_full, unwritten } = now;
        tracing::warn!(
            queue_full,
            unwritten,
            file = %self.path.display(),
            "lines of the access log were dropped; see if its disk is full or slow"
        );
    }
}

#[cfg(test)]
#[path = "access_log_tests.rs"]
mod tests;
