//! A supervisor that a benchmark starts with a chosen build, and with chosen models and limits.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nix::unistd::Pid;
use shadowslice_tests::home::Home;
use shadowslice_tests::server::ServerUnderTest;

use crate::MeasureError;
use crate::bare::{GRPC_SOCKET, HTTP_SOCKET};
use crate::closed_loop::{self, RoundResult};
use crate::exchange::{ClientStream, EchoClient, ExchangeError, elements, model};
use crate::machine::{CpuClock, ServerClocks};
use crate::plan::{EchoProtocol, EchoSetting, Transport};
use crate::servers::free_address;

/// The default limits in MiB: the size of a request, the size of an answer, and the memory of a
/// queue.
const LIMITS_MIB: [usize; 3] = [64, 64, 256];
/// The limits for tensors larger than [`LARGE_TENSOR`], in MiB and in the same order.
const LARGE_LIMITS_MIB: [usize; 3] = [128, 128, 512];
/// The tensor size above which [`LARGE_LIMITS_MIB`] applies, in bytes.
const LARGE_TENSOR: usize = 1 << 20;

/// The default of `batch.max`, in requests.
const BATCH: usize = 32;
/// The maximum size of a batch, in bytes. Workers warm up with full batches, so large tensors need
/// smaller batches.
const BATCH_BYTES: usize = 64_000_000;

/// A build to measure: its name and the folder of its binaries.
#[derive(Debug, Clone)]
pub(crate) struct Build {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
}

impl FromStr for Build {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, folder) = text.split_once('=').ok_or("give NAME=DIR")?;
        Ok(Self { name: name.to_owned(), folder: folder.into() })
    }
}

/// Returns the folder of this program. `cargo` puts the programs of a build into one folder.
pub(crate) fn own_folder() -> Result<PathBuf, MeasureError> {
    let program = std::env::current_exe()?;
    Ok(program.parent().ok_or("cannot find the folder of this program; set --binaries")?.to_owned())
}

/// The TCP addresses of a supervisor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TcpAddresses {
    http: SocketAddr,
    grpc: SocketAddr,
}

/// A running supervisor with its workers.
pub(crate) struct RunningSupervisor {
    server: ServerUnderTest,
    /// The TCP addresses, or `None` if the supervisor listens on Unix sockets only.
    tcp: Option<TcpAddresses>,
}

impl RunningSupervisor {
    /// Starts the supervisor that `home` configures, and returns when all models are ready.
    pub(crate) async fn start(home: Home) -> Result<Self, MeasureError> {
        Ok(Self { server: ServerUnderTest::start_ready(home).await?, tcp: None })
    }

    /// Starts a supervisor on the TCP addresses that [`over_tcp`] returned together with `home`.
    pub(crate) async fn start_on(home: Home, addresses: TcpAddresses) -> Result<Self, MeasureError> {
        Ok(Self { tcp: Some(addresses), ..Self::start(home).await? })
    }

    /// Returns the process ID of the supervisor.
    pub(crate) fn supervisor(&self) -> i32 {
        self.server.process().pid
    }

    /// Returns the process IDs of the workers.
    pub(crate) fn workers(&self) -> Vec<i32> {
        self.server.children().into_iter().map(|worker| worker.pid).collect()
    }

    pub(crate) fn folder(&self) -> &Path {
        self.server.home().path()
    }

    /// Returns the CPU clocks of all processes.
    pub(crate) fn clocks(&self) -> Result<ServerClocks, MeasureError> {
        let clock = |pid: i32| CpuClock::of(Pid::from_raw(pid));
        let workers = self.workers().into_iter().map(clock).collect::<Result<_, _>>()?;
        Ok(ServerClocks { server: clock(self.supervisor())?, workers })
    }

    /// Returns a client for a setting. `connection` is the client's number.
    pub(crate) async fn client(
        &self,
        setting: &EchoSetting,
        connection: u16,
    ) -> Result<EchoClient, ExchangeError> {
        let stream = self.stream(setting).await?;
        match setting.protocol {
            EchoProtocol::Http => Ok(EchoClient::http(stream, setting.bytes, connection)),
            EchoProtocol::Grpc => EchoClient::grpc(stream, setting.bytes, connection).await,
        }
    }

    async fn stream(&self, setting: &EchoSetting) -> Result<ClientStream, ExchangeError> {
        match (setting.transport, self.tcp, setting.protocol) {
            (Transport::Tcp, Some(tcp), EchoProtocol::Http) => ClientStream::tcp(tcp.http).await,
            (Transport::Tcp, Some(tcp), EchoProtocol::Grpc) => ClientStream::tcp(tcp.grpc).await,
            (_, _, EchoProtocol::Http) => {
                ClientStream::unix(&self.server.home().run_dir().join(HTTP_SOCKET)).await
            }
            (_, _, EchoProtocol::Grpc) => {
                ClientStream::unix(&self.server.home().run_dir().join(GRPC_SOCKET)).await
            }
        }
    }

    /// Returns the clients of all connections of a setting.
    pub(crate) async fn clients(&self, setting: &EchoSetting) -> Result<Vec<EchoClient>, ExchangeError> {
        let mut clients = Vec::new();
        for connection in 0..setting.connections {
            clients.push(self.client(setting, connection).await?);
        }
        Ok(clients)
    }

    /// Measures these clients in a closed loop for `span`.
    pub(crate) async fn round(
        &self,
        clients: Vec<EchoClient>,
        span: std::time::Duration,
    ) -> Result<RoundResult, MeasureError> {
        closed_loop::run(clients, span, &self.clocks()?).await
    }

    /// Stops the supervisor. Returns an error if processes or files remain.
    pub(crate) async fn stop(self) -> Result<(), MeasureError> {
        Ok(self.server.stop().await?)
    }
}

/// Returns a folder for a supervisor with these binaries. The supervisor's configuration has one
/// model for each tensor size, and the policy `static`.
pub(crate) fn home(binaries: &Path, sizes: &[usize], connections: u16) -> Result<Home, MeasureError> {
    home_under("static", binaries, sizes, connections)
}

/// Returns the same kind of folder as [`home`], with another policy.
pub(crate) fn home_under(
    policy: &str,
    binaries: &Path,
    sizes: &[usize],
    connections: u16,
) -> Result<Home, MeasureError> {
    with_binary(Home::with_config(&config(policy, sizes, connections, None))?, binaries)
}

/// Returns the same kind of folder as [`home`], for a supervisor that also listens on TCP.
pub(crate) fn over_tcp(
    binaries: &Path,
    sizes: &[usize],
    connections: u16,
) -> Result<(Home, TcpAddresses), MeasureError> {
    let addresses = TcpAddresses { http: free_address()?, grpc: free_address()? };
    let home = Home::with_config(&config("static", sizes, connections, Some(addresses)))?;
    Ok((with_binary(home, binaries)?, addresses))
}

fn with_binary(mut home: Home, binaries: &Path) -> Result<Home, MeasureError> {
    let binary = binaries.join("shadowslice");
    home.set_binary(
        fs::canonicalize(&binary).map_err(|error| format!("cannot find {}: {error}", binary.display()))?,
    );
    Ok(home)
}

/// Returns a configuration whose emulated models have no profile, so they answer immediately. The
/// limits exceed their defaults only if a tensor is large.
fn config(policy: &str, sizes: &[usize], connections: u16, tcp: Option<TcpAddresses>) -> String {
    let [http, grpc] = match tcp {
        Some(TcpAddresses { http, grpc }) => [http, grpc].map(|address| format!(", \"{address}\"")),
        None => [String::new(), String::new()],
    };
    let large = sizes.iter().any(|bytes| *bytes > LARGE_TENSOR);
    let [request_mib, response_mib, queue_mib] = if large { LARGE_LIMITS_MIB } else { LIMITS_MIB };
    let models = sizes.iter().map(|&bytes| {
        format!(
            "  - {{name: {}, engine: emulated, slo: 10s, batch: {{max: {}}}, \
             queue: {{max_requests: {}, memory: {queue_mib}Mi, on_late: serve}}, \
             tensors: [{{input: x, output: y, datatype: FP32, shape: [{}]}}]}}\n",
            model(bytes),
            (BATCH_BYTES / bytes).clamp(1, BATCH),
            connections.max(1024),
            elements(bytes)
        )
    });
    format!(
        "listen: {{http: [\"unix:{HTTP_SOCKET}\"{http}], grpc: [\"unix:{GRPC_SOCKET}\"{grpc}], metrics: []}}\n\
         gpus: [{{device: emulated}}]\n\
         controller: {{policy: {policy}}}\n\
         limits: {{request_bytes: {request_mib}Mi, response_bytes: {response_mib}Mi}}\n\
         models:\n{}",
        models.collect::<String>()
    )
}
