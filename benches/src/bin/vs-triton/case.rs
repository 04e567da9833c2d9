//! The cases of a round, each on one server.

use std::fmt;

use serde::Serialize;

/// Bytes of the small tensor.
pub(crate) const SMALL: usize = 64;

/// Bytes of the large tensor, about a picture for a convolutional net.
pub(crate) const LARGE: usize = 600_000;

/// Connections while a server is changed or loses its worker.
pub(crate) const CHANGED_UNDER: u16 = 8;

/// The server that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Side {
    Ours,
    Triton,
}

/// The protocol and its transport. Triton has no Unix sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Wire {
    HttpTcp,
    HttpUnix,
    GrpcTcp,
}

/// The change of a model under load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LiveChange {
    /// It is loaded anew, by the protocol's repository.
    Load,
    /// Its share changes, by `shadowslice resize`.
    Resize,
    /// Its worker is killed; Triton's is the stub of its Python backend.
    Kill,
}

/// The work of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CaseWork {
    /// A closed loop over so many connections.
    Load { wire: Wire, bytes: usize, connections: u16 },
    /// Triton's gRPC client for Python on one connection: over a Unix socket to shadowslice, over
    /// TCP to Triton.
    Python,
    /// A closed loop while that happens.
    Change(LiveChange),
}

/// One side's part of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct ServerCase {
    pub(crate) side: Side,
    pub(crate) what: CaseWork,
}

impl fmt::Display for ServerCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            Side::Ours => "ours",
            Side::Triton => "triton",
        };
        match self.what {
            CaseWork::Load { wire, bytes, connections } => {
                write!(f, "{side} {wire} {bytes} B x{connections}")
            }
            CaseWork::Python => write!(f, "{side} Python gRPC x1"),
            CaseWork::Change(change) => write!(f, "{side} {change:?} x{CHANGED_UNDER}"),
        }
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HttpTcp => "HTTP over TCP",
            Self::HttpUnix => "HTTP over a Unix socket",
            Self::GrpcTcp => "gRPC over TCP",
        })
    }
}
