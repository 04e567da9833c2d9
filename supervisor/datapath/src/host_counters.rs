//! Counts all responses of the host, and the requests that were refused because of a limit of the
//! host.
//!
//! A limit may refuse a request before its model is known, so the models' counters do not include
//! all of these requests.

use std::array::from_fn;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::log_throttle::LogThrottle;

/// The HTTP status codes that are counted separately. One more counter counts all other codes.
pub const HTTP_CODES: [u16; 16] =
    [200, 400, 401, 403, 404, 405, 408, 409, 411, 413, 415, 429, 500, 501, 503, 504];

/// The number of gRPC status codes.
pub const GRPC_CODES: usize = 17;

/// The shortest interval between two log messages about the same limit.
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

    /// Returns the limit's key in the configuration, without the prefix `limits.`.
    pub fn name(self) -> &'static str {
        match self {
            Self::InFlight => "in_flight",
            Self::Memory => "memory",
            Self::Connections => "connections",
        }
    }
}

/// A snapshot of [`HostCounters`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostCounts {
    /// The number of open connections for requests.
    pub connections: u64,
    /// The number of connections that were closed since the start to make room for new ones.
    pub connections_closed: u64,
    /// The number of requests that were refused since the start because of each [`HostLimit`].
    pub refused: [u64; HostLimit::ALL.len()],
    /// The number of HTTP responses since the start, for each of [`HTTP_CODES`]. The last element
    /// is for all other codes.
    pub http: [u64; HTTP_CODES.len() + 1],
    /// The number of gRPC responses since the start, for each status code. A response with a
    /// message counts as OK, because its status follows later.
    pub grpc: [u64; GRPC_CODES],
}

/// The counters of the host. They are updated when requests arrive and end.
#[derive(Debug)]
pub struct HostCounters {
    connections: AtomicU64,
    connections_closed: AtomicU64,
    refused: [AtomicU64; HostLimit::ALL.len()],
    throttles: [LogThrottle; HostLimit::ALL.len()],
    http: [AtomicU64; HTTP_CODES.len() + 1],
    grpc: [AtomicU64; GRPC_CODES],
}

impl Default for HostCounters {
    fn default() -> Self {
        Self {
            connections: AtomicU64::new(0),
            connections_closed: AtomicU64::new(0),
            refused: Default::default(),
            throttles: from_fn(|_| LogThrottle::new(LOG_INTERVAL)),
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

    /// Counts a connection that is closed to make room for a new one. Logs at most one message per
    /// `LOG_INTERVAL`.
    pub fn count_closed(&self) {
        let closed = self.connections_closed.fetch_add(1, Relaxed) + 1;
        if self.throttles[HostLimit::Connections as usize].is_due() {
            tracing::warn!(
                limit = "limits.connections",
                closed,
                "closing idle connections to make room for new ones; raise the limit, or let clients use \
                 fewer connections"
            );
        }
    }

    /// Counts a refused request. Logs at most one message per `LOG_INTERVAL` and limit.
    pub fn count_refusal(&self, limit: HostLimit) {
        let refused = self.refused[limit as usize].fetch_add(1, Relaxed) + 1;
        if self.throttles[limit as usize].is_due() {
            tracing::warn!(
                limit = format!("limits.{}", limit.name()),
                refused,
                "requests are refused because of a limit; raise the limit, or send fewer requests at a time"
            );
        }
    }

    pub fn count_http(&self, code: u16) {
        let at = HTTP_CODES.iter().position(|&known| known == code).unwrap_or(HTTP_CODES.len());
        self.http[at].fetch_add(1, Relaxed);
    }

    /// Counts a gRPC response. A code that gRPC does not define counts as unknown (2).
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
