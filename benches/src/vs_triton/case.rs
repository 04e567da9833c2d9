//! The cases of a round. Each case runs on one server.

use std::fmt;

use serde::Serialize;

/// The size of the small tensor, in bytes.
pub(crate) const SMALL: usize = 64;

/// The size of the large tensor, in bytes. It is about the size of one image for a convolutional
/// network.
pub(crate) const LARGE: usize = 600_000;

/// The number of connections during a change.
pub(crate) const CHANGE_CONNECTIONS: u16 = 8;

/// The server that a case measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Side {
    Ours,
    Triton,
}

/// The protocol and its transport. Triton does not support Unix sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Wire {
    HttpTcp,
    HttpUnix,
    GrpcTcp,
}

/// A change to a model while it is under load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LiveChange {
    /// The model is reloaded through the model repository extension.
    Load,
    /// `shadowslice resize` changes the model's share.
    Resize,
    /// SIGKILL ends the model's worker, or the stub process of Triton's Python backend.
    Kill,
}

/// The kind of work that a case measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CaseWork {
    /// A closed loop on `connections` connections.
    Load { wire: Wire, bytes: usize, connections: u16 },
    /// Triton's gRPC client for Python on one connection. The connection uses a Unix socket to
    /// shadowslice, and TCP to Triton.
    Python,
    /// A closed loop during a change to the model.
    Change(LiveChange),
}

/// A case: the work, and the server that does it.
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
            CaseWork::Change(change) => write!(f, "{side} {change:?} x{CHANGE_CONNECTIONS}"),
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
