//! shadowslice alone, on sockets of its own: which binaries, which models, how many connections.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nix::unistd::Pid;
use shadowslice_tests::home::Home;
use shadowslice_tests::server::ServerUnderTest;

use crate::Failure;
use crate::bare::{GRPC_SOCKET, HTTP_SOCKET};
use crate::closed_loop::{self, Round};
use crate::exchange::{Client, Fault, Stream, elements, model};
use crate::machine::{Clocks, CpuClock};
use crate::plan::{Protocol, Setting, Transport};
use crate::servers::free_address;

/// Largest request, largest answer and a queue's memory, in MiB: the defaults, and for tensors of more than a MiB.
const LIMITS_MIB: [usize; 3] = [64, 64, 256];
const LARGE_LIMITS_MIB: [usize; 3] = [128, 128, 512];
const LARGE_TENSOR: usize = 1 << 20;

/// The default of a batch's requests, and the bytes in a batch for which it is lowered: workers
/// warm up with full batches.
const BATCH: usize = 32;
const BATCH_BYTES: usize = 64_000_000;

/// A build: its name, and the folder of its binaries.
#[derive(Debug, Clone)]
pub(crate) struct Binaries {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
}

impl FromStr for Binaries {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, folder) = text.split_once('=').ok_or("it must be NAME=DIR")?;
        Ok(Self { name: name.to_owned(), folder: folder.into() })
    }
}

/// The TCP addresses of a supervisor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addresses {
    http: SocketAddr,
    grpc: SocketAddr,
}

/// A running supervisor with its workers.
pub(crate) struct System {
    server: ServerUnderTest,
    /// `None` if it listens on Unix sockets only.
    tcp: Option<Addresses>,
}

impl System {
    /// Starts the binaries that the folder names, and returns when all models serve.
    pub(crate) async fn start(home: Home) -> Result<Self, Failure> {
        Ok(Self { server: ServerUnderTest::start_ready(home).await?, tcp: None })
    }

    /// Starts a supervisor that [`over_tcp`] configured.
    pub(crate) async fn start_on(home: Home, addresses: Addresses) -> Result<Self, Failure> {
        Ok(Self { tcp: Some(addresses), ..Self::start(home).await? })
    }

    /// The supervisor's process number.
    pub(crate) fn supervisor(&self) -> i32 {
        self.server.process().pid
    }

    /// Its workers' process numbers.
    pub(crate) fn workers(&self) -> Vec<i32> {
        self.server.children().into_iter().map(|worker| worker.pid).collect()
    }

    /// The folder that it runs in.
    pub(crate) fn folder(&self) -> &Path {
        self.server.home().path()
    }

    /// The clocks of its processes.
    pub(crate) fn clocks(&self) -> Result<Clocks, Failure> {
        let clock = |pid: i32| CpuClock::of(Pid::from_raw(pid));
        let workers = self.workers().into_iter().map(clock).collect::<Result<_, _>>()?;
        Ok(Clocks { server: clock(self.supervisor())?, workers })
    }

    /// The client numbered `connection` of a setting.
    pub(crate) async fn client(&self, setting: &Setting, connection: u16) -> Result<Client, Fault> {
        let stream = self.stream(setting).await?;
        match setting.protocol {
            Protocol::Http => Ok(Client::http(stream, setting.bytes, connection)),
            Protocol::Grpc => Client::grpc(stream, setting.bytes, connection).await,
        }
    }

    async fn stream(&self, setting: &Setting) -> Result<Stream, Fault> {
        match (setting.transport, self.tcp, setting.protocol) {
            (Transport::Tcp, Some(tcp), Protocol::Http) => Stream::tcp(tcp.http).await,
            (Transport::Tcp, Some(tcp), Protocol::Grpc) => Stream::tcp(tcp.grpc).await,
            (_, _, Protocol::Http) => Stream::unix(&self.server.home().run_dir().join(HTTP_SOCKET)).await,
            (_, _, Protocol::Grpc) => Stream::unix(&self.server.home().run_dir().join(GRPC_SOCKET)).await,
        }
    }

    /// All clients of a setting.
    pub(crate) async fn clients(&self, setting: &Setting) -> Result<Vec<Client>, Fault> {
        let mut clients = Vec::new();
        for connection in 0..setting.connections {
            clients.push(self.client(setting, connection).await?);
        }
        Ok(clients)
    }

    /// Lets these clients ask for `span`, and measures.
    pub(crate) async fn round(
        &self,
        clients: Vec<Client>,
        span: std::time::Duration,
    ) -> Result<Round, Failure> {
        closed_loop::run(clients, span, &self.clocks()?).await
    }

    /// Stops it; it must leave nothing behind.
    pub(crate) async fn stop(self) -> Result<(), Failure> {
        Ok(self.server.stop().await?)
    }
}

/// A folder for a supervisor of these binaries with one model for each tensor size, with shares
/// that stay as they are.
pub(crate) fn home(binaries: &Path, sizes: &[usize], connections: u16) -> Result<Home, Failure> {
    home_under("static", binaries, sizes, connections)
}

/// The same under a policy.
pub(crate) fn home_under(
    policy: &str,
    binaries: &Path,
    sizes: &[usize],
    connections: u16,
) -> Result<Home, Failure> {
    with_binary(Home::with_config(&config(policy, sizes, connections, None))?, binaries)
}

/// Returns a folder as [`home`] does, for a supervisor that also listens on TCP.
pub(crate) fn over_tcp(
    binaries: &Path,
    sizes: &[usize],
    connections: u16,
) -> Result<(Home, Addresses), Failure> {
    let addresses = Addresses { http: free_address()?, grpc: free_address()? };
    let home = Home::with_config(&config("static", sizes, connections, Some(addresses)))?;
    Ok((with_binary(home, binaries)?, addresses))
}

fn with_binary(mut home: Home, binaries: &Path) -> Result<Home, Failure> {
    let binary = binaries.join("shadowslice");
    home.set_binary(
        fs::canonicalize(&binary).map_err(|error| format!("cannot find {}: {error}", binary.display()))?,
    );
    Ok(home)
}

/// Emulated models without a profile, which answer at once. Limits rise above their defaults only
/// where tensors need it.
fn config(policy: &str, sizes: &[usize], connections: u16, tcp: Option<Addresses>) -> String {
    let [http, grpc] = match tcp {
        Some(Addresses { http, grpc }) => [http, grpc].map(|address| format!(", \"{address}\"")),
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
