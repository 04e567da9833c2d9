//! The settings that are measured.

use std::fmt;

use serde::Serialize;

/// Bytes of the small tensor.
pub(crate) const SMALL: usize = 64;

/// Bytes of the large tensor, about a picture for a convolutional net.
pub(crate) const LARGE: usize = 600_000;

/// The large tensor goes over at most this many connections, to bound the memory for it.
const LARGE_CONNECTIONS: u16 = 32;

/// The server that answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ServerKind {
    /// The whole system.
    Shadowslice,
    /// A server that does nothing else.
    Bare,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EchoProtocol {
    Grpc,
    Http,
}

/// The transport of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Transport {
    Unix,
    Tcp,
}

/// A setting to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct EchoSetting {
    pub(crate) server: ServerKind,
    pub(crate) protocol: EchoProtocol,
    pub(crate) transport: Transport,
    /// Bytes of the tensor.
    pub(crate) bytes: usize,
    pub(crate) connections: u16,
}

impl EchoSetting {
    /// The bare server's setting that this setting is compared with.
    pub(crate) fn bare(self) -> Self {
        Self { server: ServerKind::Bare, transport: Transport::Unix, ..self }
    }
}

impl fmt::Display for EchoSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let server = match self.server {
            ServerKind::Shadowslice => "shadowslice",
            ServerKind::Bare => "bare",
        };
        let protocol = match self.protocol {
            EchoProtocol::Grpc => "grpc",
            EchoProtocol::Http => "http",
        };
        let transport = match self.transport {
            Transport::Unix => "unix",
            Transport::Tcp => "tcp",
        };
        write!(f, "{server} {protocol} {transport} {} B x{}", self.bytes, self.connections)
    }
}

/// All settings; settings that are compared stand next to each other.
pub(crate) fn settings(connections: &[u16]) -> Vec<EchoSetting> {
    let small = [
        (ServerKind::Bare, EchoProtocol::Http, Transport::Unix),
        (ServerKind::Shadowslice, EchoProtocol::Http, Transport::Unix),
        (ServerKind::Shadowslice, EchoProtocol::Http, Transport::Tcp),
        (ServerKind::Bare, EchoProtocol::Grpc, Transport::Unix),
        (ServerKind::Shadowslice, EchoProtocol::Grpc, Transport::Unix),
    ];
    let large = small.iter().filter(|(_, _, transport)| *transport == Transport::Unix);
    let of = |bytes, connections: u16, &(server, protocol, transport): &_| EchoSetting {
        server,
        protocol,
        transport,
        bytes,
        connections,
    };
    let mut settings = Vec::new();
    for &connections in connections {
        settings.extend(small.iter().map(|kind| of(SMALL, connections, kind)));
    }
    for &connections in connections.iter().filter(|connections| **connections <= LARGE_CONNECTIONS) {
        settings.extend(large.clone().map(|kind| of(LARGE, connections, kind)));
    }
    settings
}
