//! Counters of all responses of the host, and of the requests that its limits refused.
//!
//! A request that a limit of the host refuses may never reach a model, so the counts of models do
//! not have it.

use std::array::from_fn;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The HTTP codes with their own counts. The last count is of all other codes.
pub const HTTP_CODES: [u16; 16] =
    [200, 400, 401, 403, 404, 405, 408, 409, 411, 413, 415, 429, 500, 501, 503, 504];

/// The number of gRPC's codes.
pub const GRPC_CODES: usize = 17;

/// The shortest interval between log messages about one limit that refuses requests.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A limit that all clients of the host share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostLimit {
    InFlight,
    Memory,
    Connections,
}

impl HostLimit {
    pub const ALL: [Self; 3] = [Self::InFlight, Self::Memory, Self::Connections];

    /// Returns the configuration's key, without `limits.`.
    pub fn name(self) -> &'static str {
        match self {
            Self::InFlight => "in_flight",
            Self::Memory => "memory",
            Self::Connections => "connections",
        }
    }
}

/// A snapshot of the host's counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostCounts {
    /// The open connections for requests.
    pub connections: u64,
    /// The connections closed since the start because others needed their places.
    pub connections_closed: u64,
    /// The requests refused since the start, by [`HostLimit`].
    pub refused: [u64; HostLimit::ALL.len()],
    /// The responses since the start, by [`HTTP_CODES`], and with other codes.
    pub http: [u64; HTTP_CODES.len() + 1],
    /// The responses since the start, by gRPC's code. A response whose code follows its message
    /// counts as OK.
    pub grpc: [u64; GRPC_CODES],
}

/// The counters of the host, updated as requests come and go.
#[derive(Debug)]
pub struct HostCounters {
    began: Instant,
    connections: AtomicU64,
    connections_closed: AtomicU64,
    refused: [AtomicU64; HostLimit::ALL.len()],
    /// The time of each limit's last log message, in ms since `began` plus 1; 0 for never.
    logged: [AtomicU64; HostLimit::ALL.len()],
    http: [AtomicU64; HTTP_CODES.len() + 1],
    grpc: [AtomicU64; GRPC_CODES],
}

impl Default for HostCounters {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            connections: AtomicU64::new(0),
            connections_closed: AtomicU64::new(0),
            refused: Default::default(),
            logged: Default::default(),
            http: from_fn(|_| AtomicU64::new(0)),
            grpc: from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl HostCounters {
    pub fn count_connection(&self) {
        self.connections.fetch_add(1, Relaxed);
    }

    pub fn count_disconnection(&self) {
        self.connections.fetch_sub(1, Relaxed);
    }

    /// Counts a connection that is closed because another one needs its place, and logs that at
    /// intervals.
    pub fn count_closed(&self) {
        let closed = self.connections_closed.fetch_add(1, Relaxed) + 1;
        if self.may_log(HostLimit::Connections) {
            tracing::warn!(
                limit = "limits.connections",
                closed,
                "closing idle connections to make room for new ones; raise the limit, or let clients use \
                 fewer connections"
            );
        }
    }

    /// Counts a refusal, and logs at intervals that the limit refuses requests.
    pub fn count_refusal(&self, limit: HostLimit) {
        let refused = self.refused[limit as usize].fetch_add(1, Relaxed) + 1;
        if self.may_log(limit) {
            tracing::warn!(
                limit = format!("limits.{}", limit.name()),
                refused,
                "requests are refused because of a limit; raise the limit, or send fewer requests at a time"
            );
        }
    }

    /// Returns whether nothing was logged of the limit for [`LOG_INTERVAL`].
    fn may_log(&self, limit: HostLimit) -> bool {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1;
        let logged = self.logged[limit as usize].fetch_update(Relaxed, Relaxed, |last| {
            let due = last == 0 || Duration::from_millis(now.saturating_sub(last)) >= LOG_INTERVAL;
            due.then_some(now)
        });
        logged.is_ok()
    }

    /// Counts an HTTP response.
    pub fn count_http(&self, code: u16) {
        let at = HTTP_CODES.iter().position(|&known| known == code).unwrap_or(HTTP_CODES.len());
        self.http[at].fetch_add(1, Relaxed);
    }

    /// Counts a gRPC response. A code that gRPC does not have counts as unknown (2).
    pub fn count_grpc(&self, code: usize) {
        self.grpc[if code < GRPC_CODES { code } else { 2 }].fetch_add(1, Relaxed);
    }

    pub fn counts(&self) -> HostCounts {
        HostCounts {
            connections: self.connections.load(Relaxed),
            connections_closed: self.connections_closed.load(Relaxed),
            refused: from_fn(|at| self.refused[at].load(Relaxed)),
            http: from_fn(|at| self.http[at].load(Relaxed)),
            grpc: from_fn(|at| self.grpc[at].load(Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_and_refusal_counts_in_its_place() {
        let counters = HostCounters::default();
        [200, 200, 503, 418].into_iter().for_each(|code| counters.count_http(code));
        [0, 14, 99].into_iter().for_each(|code| counters.count_grpc(code));
        counters.count_refusal(HostLimit::Memory);
        (0..3).for_each(|_| counters.count_connection());
        counters.count_disconnection();
        counters.count_closed();
        let counts = counters.counts();
        assert_eq!((counts.connections, counts.connections_closed), (2, 1));
        assert_eq!(counts.refused, [0, 1, 0]);
        assert_eq!((counts.http[0], counts.http[14], counts.http[HTTP_CODES.len()]), (2, 1, 1));
        assert_eq!((counts.grpc[0], counts.grpc[14], counts.grpc[2]), (1, 1, 1));
    }
}
