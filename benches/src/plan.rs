//! The settings of the echo benchmark.

use std::fmt;

use serde::Serialize;

use crate::MeasureError;

/// The size of the small tensor, in bytes.
pub(crate) const SMALL: usize = 64;

/// The size of the large tensor, in bytes. It is about the size of one image for a convolutional
/// network.
pub(crate) const LARGE: usize = 600_000;

/// The maximum number of connections for the large tensor. It limits the memory that the tensors
/// use.
const LARGE_CONNECTIONS: u16 = 32;

/// The server that answers a setting's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ServerKind {
    /// The supervisor with its workers.
    Shadowslice,
    /// The bare echo server.
    Bare,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EchoProtocol {
    Grpc,
    Http,
}

/// The transport over which a protocol runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Transport {
    Unix,
    Tcp,
}

/// A combination of server, protocol, transport, tensor size and number of connections to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct EchoSetting {
    pub(crate) server: ServerKind,
    pub(crate) protocol: EchoProtocol,
    pub(crate) transport: Transport,
    /// The size of the tensor, in bytes.
    pub(crate) bytes: usize,
    pub(crate) connections: u16,
}

impl EchoSetting {
    /// Returns the setting of the bare server that is the baseline for this setting.
    pub(crate) fn bare(self) -> Self {
        Self { server: ServerKind::Bare, transport: Transport::Unix, ..self }
    }

    /// Returns the name of the setting without the server.
    pub(crate) fn load(self) -> String {
        self.to_string().trim_start_matches("shadowslice ").to_owned()
    }
}

/// Returns the settings or cases whose names contain the text of the option `--only`. Fails if there
/// are none.
pub(crate) fn matching<T: fmt::Display>(
    all: impl IntoIterator<Item = T>,
    only: &str,
) -> Result<Vec<T>, MeasureError> {
    let found: Vec<T> = all.into_iter().filter(|one| one.to_string().contains(only)).collect();
    if found.is_empty() {
        return Err(format!("nothing matches --only {only:?}").into());
    }
    Ok(found)
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

/// Returns all settings. The baseline of each setting precedes it.
pub(crate) fn settings(connections: &[u16]) -> Vec<EchoSetting> {
    let small = [
        (ServerKind::Bare, EchoProtocol::Http, Transport::Unix),
        (ServerKind::Shadowslice, EchoProtocol::Http, Transport::Unix),
        (ServerKind::Shadowslice, EchoProtocol::Http, Transport::Tcp),
        (ServerKind::Bare, EchoProtocol::Grpc, Transport::Unix),
        (ServerKind::Shadowslice, EchoProtocol::Grpc, Transport::Unix),
    ]
    .map(|(server, protocol, transport)| EchoSetting {
        server,
        protocol,
        transport,
        bytes: SMALL,
        connections: 1,
    });
    let large = small.into_iter().filter(|setting| setting.transport == Transport::Unix);
    let large = large.map(|setting| EchoSetting { bytes: LARGE, ..setting });
    let mut settings = Vec::new();
    for &connections in connections {
        settings.extend(small.map(|setting| EchoSetting { connections, ..setting }));
    }
    for &connections in connections.iter().filter(|connections| **connections <= LARGE_CONNECTIONS) {
        settings.extend(large.clone().map(|setting| EchoSetting { connections, ..setting }));
    }
    settings
}
