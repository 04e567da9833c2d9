//! Records each request for the access log. A request is logged when the last holder of its entry
//! drops the entry. Usually the last holder is the response, which drops the entry after its last
//! byte was written. If the client disconnects, the last holder is the task of the request.
//!
//! This module does not write to a file. It passes each record to a function that never blocks. If
//! the log has no room, this function drops and counts the record.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Instant, SystemTime};

use parking_lot::Mutex;
use serde::{Serialize, Serializer};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::peer::Peer;
use crate::trace::Journal;

/// The longest text from a client in a record (path, id or message), in bytes.
const MAX_TEXT_BYTES: usize = 256;

/// The reason in the record if the client disconnected before it had the whole response.
const CLIENT_LEFT: &str = "client_left";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessProtocol {
    Http,
    Grpc,
}

impl AccessProtocol {
    /// Returns the status code for a client that disconnected before the response: nginx's 499, or
    /// gRPC's `CANCELLED`.
    fn left(self) -> u16 {
        match self {
            Self::Http => 499,
            Self::Grpc => 1,
        }
    }
}

/// The record of a request and its response. It is logged as JSON with all fields, so that all
/// records have the same schema.
#[derive(Debug, Serialize)]
pub struct AccessRecord {
    /// The time at which the first part of the request was read.
    #[serde(serialize_with = "to_rfc3339")]
    pub time: SystemTime,
    pub protocol: AccessProtocol,
    pub method: String,
    pub path: String,
    /// The model, if the request is an inference.
    pub model: Option<String>,
    pub code: u16,
    /// The reason for the refusal, as the metrics name it, or `CLIENT_LEFT`.
    pub reason: Option<&'static str>,
    /// The error text that the client receives, cut to `MAX_TEXT_BYTES`.
    pub error: Option<String>,
    /// The size of the request's body, in bytes.
    pub bytes_in: u64,
    /// The size of the response's body, in bytes.
    pub bytes_out: u64,
    /// The time from the first part of the request to the last byte of the response, in ms.
    pub latency_ms: f64,
    /// The address of a TCP client.
    pub address: Option<SocketAddr>,
    /// The user of a process that connected to a Unix socket.
    pub uid: Option<u32>,
    pub pid: Option<i32>,
    /// The names in a TCP client's certificate and token.
    pub client: Option<String>,
    /// The id in the request, or the value of the header `x-request-id`.
    pub request_id: Option<String>,
}

/// Serializes a time with a precision of 1 µs.
fn to_rfc3339<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    let time = OffsetDateTime::from(*time);
    let time = time.replace_nanosecond(time.microsecond() * 1000).unwrap_or(time);
    // Formatting fails only if the year has five digits.
    serializer.serialize_str(&time.format(&Rfc3339).unwrap_or_default())
}

/// A function that receives records. It must not block.
type RecordSink = Box<dyn Fn(&AccessRecord) + Send + Sync>;

/// The access log. It passes the records of requests to a function that writes them.
pub struct AccessLog(RecordSink);

impl fmt::Debug for AccessLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AccessLog")
    }
}

/// The data of a request that are known when its first part has been read.
#[derive(Debug, Clone, Copy)]
pub struct RequestHead<'h> {
    pub protocol: AccessProtocol,
    pub method: &'h str,
    pub path: &'h str,
    /// The value of the header `x-request-id`.
    pub request_id: Option<&'h str>,
}

impl AccessLog {
    pub fn new(sink: impl Fn(&AccessRecord) + Send + Sync + 'static) -> Self {
        Self(Box::new(sink))
    }

    /// Creates the entry of a request whose first part was read at `began`.
    pub fn begin(self: &Arc<Self>, head: RequestHead<'_>, peer: &Arc<Peer>, began: Instant) -> AccessEntry {
        let RequestHead { protocol, method, path, request_id } = head;
        AccessEntry(Arc::new(EntryState {
            log: Arc::clone(self),
            time: SystemTime::now().checked_sub(began.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH),
            began,
            protocol,
            method: clipped(method),
            path: clipped(path),
            request_id: request_id.map(clipped),
            journal: Journal::default(),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            answer: Mutex::new(EntryResponse { peer: Arc::clone(peer), code: None, is_whole: false }),
        }))
    }
}

/// The access log's entry of a request in flight. The record is logged when the last clone is
/// dropped.
#[derive(Debug, Clone)]
pub struct AccessEntry(Arc<EntryState>);

#[derive(Debug)]
struct EntryState {
    log: Arc<AccessLog>,
    time: SystemTime,
    began: Instant,
    protocol: AccessProtocol,
    method: String,
    path: String,
    request_id: Option<String>,
    journal: Journal,
    received: AtomicU64,
    sent: AtomicU64,
    answer: Mutex<EntryResponse>,
}

#[derive(Debug)]
struct EntryResponse {
    peer: Arc<Peer>,
    code: Option<u16>,
    /// True if the client received the whole response.
    is_whole: bool,
}

impl AccessEntry {
    /// Returns the request's journal, which contains the model, the id and the failure.
    pub fn journal(&self) -> &Journal {
        &self.0.journal
    }

    /// Replaces the peer after the client was authenticated by name.
    pub fn set_peer(&self, peer: &Arc<Peer>) {
        self.0.answer.lock().peer = Arc::clone(peer);
    }

    pub fn add_received(&self, bytes: usize) {
        self.0.received.fetch_add(bytes as u64, Relaxed);
    }

    pub fn add_sent(&self, bytes: usize) {
        self.0.sent.fetch_add(bytes as u64, Relaxed);
    }

    /// Sets the status code of the response. The response may not have been sent yet. A later call
    /// replaces the code.
    pub fn set_code(&self, code: u16) {
        self.0.answer.lock().code = Some(code);
    }

    /// Records that the client received the whole response.
    pub fn mark_delivered(&self) {
        self.0.answer.lock().is_whole = true;
    }
}

impl Drop for EntryState {
    fn drop(&mut self) {
        let trace = self.journal.take();
        let EntryResponse { peer, code, is_whole } = self.answer.get_mut();
        let left = (code.is_none() || !*is_whole).then_some(CLIENT_LEFT);
        let (address, uid, pid, client) = match &**peer {
            Peer::Unix { uid, pid, .. } => (None, Some(*uid), Some(*pid), None),
            Peer::Tcp { address, names } => {
                (Some(*address), None, None, (!names.is_empty()).then(|| names.join(",")))
            }
        };
        let record = AccessRecord {
            time: self.time,
            protocol: self.protocol,
            method: std::mem::take(&mut self.method),
            path: std::mem::take(&mut self.path),
            model: trace.model,
            code: code.unwrap_or(self.protocol.left()),
            reason: trace.refusal.or(left),
            error: trace.why.map(|why| clipped(&why)),
            bytes_in: *self.received.get_mut(),
            bytes_out: *self.sent.get_mut(),
            latency_ms: self.began.elapsed().as_micros() as f64 / 1e3,
            address,
            uid,
            pid,
            client,
            request_id: trace.id.map(|id| clipped(&id)).or_else(|| self.request_id.take()),
        };
        (self.log.0)(&record);
    }
}

fn clipped(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT_BYTES)].to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn log() -> (Arc<AccessLog>, Arc<Mutex<Vec<String>>>) {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let logged = Arc::clone(&lines);
        let sink = move |record: &AccessRecord| {
            let AccessRecord { code, reason, error, request_id, bytes_in, bytes_out, .. } = record;
            let line = format!("{code} {reason:?} {error:?} {request_id:?} ({bytes_in}, {bytes_out})");
            logged.lock().push(line);
        };
        (Arc::new(AccessLog::new(sink)), lines)
    }

    fn begin(log: &Arc<AccessLog>, protocol: AccessProtocol) -> AccessEntry {
        let head = RequestHead { protocol, method: "POST", path: "/v2", request_id: Some("from-proxy") };
        log.begin(head, &Arc::new(Peer::Unix { uid: 1, groups: Vec::new(), pid: 2 }), Instant::now())
    }

    #[test]
    fn the_last_holder_logs_the_record() {
        let (log, lines) = log();
        let access = begin(&log, AccessProtocol::Http);
        let other = access.clone();
        access.add_received(5);
        access.set_code(200);
        drop(access);
        assert!(lines.lock().is_empty());
        other.add_sent(7);
        other.mark_delivered();
        other.journal().set_id("own");
        drop(other);
        assert_eq!(*lines.lock(), ["200 None None Some(\"own\") (5, 7)"]);
    }

    #[test]
    fn a_record_has_all_fields() {
        let record = AccessRecord {
            time: SystemTime::UNIX_EPOCH + Duration::from_nanos(1_123_456_789),
            protocol: AccessProtocol::Grpc,
            method: "POST".to_owned(),
            path: "/x\n".to_owned(),
            model: Some("digits".to_owned()),
            code: 14,
            reason: Some("late"),
            error: Some("why".to_owned()),
            bytes_in: 3,
            bytes_out: 4,
            latency_ms: 1.234,
            address: Some("127.0.0.1:9".parse().unwrap()),
            uid: None,
            pid: None,
            client: Some("ci,deploy".to_owned()),
            request_id: None,
        };
        let expected = r#"{"time":"1970-01-01T00:00:01.123456Z","protocol":"grpc","method":"POST","path":"/x\n","model":"digits","code":14,"reason":"late","error":"why","bytes_in":3,"bytes_out":4,"latency_ms":1.234,"address":"127.0.0.1:9","uid":null,"pid":null,"client":"ci,deploy","request_id":null}"#;
        assert_eq!(serde_json::to_string(&record).unwrap(), expected);
    }

    #[test]
    fn a_client_that_disconnects_has_its_own_reason() {
        let (log, lines) = log();
        drop(begin(&log, AccessProtocol::Http));
        drop(begin(&log, AccessProtocol::Grpc));
        begin(&log, AccessProtocol::Http).set_code(200);
        let refused = begin(&log, AccessProtocol::Http);
        refused.journal().record_refusal("late");
        refused.journal().record_failure("x".repeat(300));
        refused.set_code(503);
        refused.mark_delivered();
        drop(refused);
        let long = "x".repeat(MAX_TEXT_BYTES);
        let expected = [
            "499 Some(\"client_left\") None Some(\"from-proxy\") (0, 0)".to_owned(),
            "1 Some(\"client_left\") None Some(\"from-proxy\") (0, 0)".to_owned(),
            "200 Some(\"client_left\") None Some(\"from-proxy\") (0, 0)".to_owned(),
            format!("503 Some(\"late\") Some({long:?}) Some(\"from-proxy\") (0, 0)"),
        ];
        assert_eq!(*lines.lock(), expected);
    }
}
