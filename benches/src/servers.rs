//! The servers that the echo benchmark measures. They start once and run during all rounds.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use nix::unistd::Pid;
use shadowslice_tests::home::Home;
use shadowslice_tests::server::ServerUnderTest;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::MeasureError;
use crate::bare::{GRPC_SOCKET, HTTP_SOCKET};
use crate::closed_loop::{self, RoundResult};
use crate::exchange::{ClientStream, EchoClient, ExchangeError, elements, model};
use crate::http::HttpEchoClient;
use crate::machine::{CpuClock, ServerClocks};
use crate::plan::{self, EchoProtocol, EchoSetting, ServerKind, Transport};

/// The supervisor with its workers, and the bare server.
pub(crate) struct EchoServers {
    system: ServerUnderTest,
    bare: Bare,
    tcp: SocketAddr,
}

/// The process of the bare server. It exits when its standard input is closed.
struct Bare {
    folder: TempDir,
    child: Child,
}

impl EchoServers {
    /// Starts both servers, and returns when they are ready.
    pub(crate) async fn start(settings: &[EchoSetting]) -> Result<Self, MeasureError> {
        let tcp = free_address()?;
        let most = settings.iter().map(|setting| setting.connections).max().unwrap_or(1);
        let system = ServerUnderTest::start_ready(Home::with_config(&config(tcp, most))?).await?;
        Ok(Self { system, bare: Bare::start().await?, tcp })
    }

    /// Measures one round of one setting.
    pub(crate) async fn round(
        &self,
        setting: &EchoSetting,
        span: Duration,
    ) -> Result<RoundResult, MeasureError> {
        let mut clients = Vec::new();
        for connection in 0..setting.connections {
            clients.push(self.client(setting, connection).await?);
        }
        closed_loop::run(clients, span, &self.clocks(setting)?).await
    }

    async fn client(&self, setting: &EchoSetting, connection: u16) -> Result<EchoClient, ExchangeError> {
        let EchoSetting { bytes, .. } = *setting;
        let stream = match setting.transport {
            Transport::Unix => ClientStream::unix(&self.socket(setting)).await?,
            Transport::Tcp => ClientStream::tcp(self.tcp).await?,
        };
        match (setting.protocol, setting.server) {
            (EchoProtocol::Grpc, _) => EchoClient::grpc(stream, bytes, connection).await,
            (EchoProtocol::Http, ServerKind::Shadowslice) => Ok(EchoClient::http(stream, bytes, connection)),
            (EchoProtocol::Http, ServerKind::Bare) => {
                Ok(EchoClient::Http(Box::new(HttpEchoClient::bare(stream, bytes, connection))))
            }
        }
    }

    fn socket(&self, setting: &EchoSetting) -> PathBuf {
        let folder = match setting.server {
            ServerKind::Shadowslice => self.system.home().run_dir(),
            ServerKind::Bare => self.bare.folder.path().to_owned(),
        };
        folder.join(match setting.protocol {
            EchoProtocol::Http => HTTP_SOCKET,
            EchoProtocol::Grpc => GRPC_SOCKET,
        })
    }

    fn clocks(&self, setting: &EchoSetting) -> Result<ServerClocks, MeasureError> {
        let clock = |pid: i32| CpuClock::of(Pid::from_raw(pid));
        Ok(match setting.server {
            ServerKind::Shadowslice => {
                let workers = self.system.children().into_iter().map(|worker| clock(worker.pid));
                ServerClocks {
                    server: clock(self.system.process().pid)?,
                    workers: workers.collect::<Result<_, _>>()?,
                }
            }
            ServerKind::Bare => {
                let pid = self.bare.child.id().ok_or("the bare server has ended")?;
                ServerClocks { server: clock(i32::try_from(pid)?)?, workers: Vec::new() }
            }
        })
    }

    pub(crate) async fn stop(mut self) -> Result<(), MeasureError> {
        drop(self.bare.child.stdin.take());
        self.bare.child.wait().await?;
        self.system.stop().await?;
        Ok(())
    }
}

impl Bare {
    async fn start() -> Result<Self, MeasureError> {
        let folder = tempfile::Builder::new().prefix("ss-bare-").tempdir_in("/tmp")?;
        let mut child = Command::new(std::env::current_exe()?)
            .arg("bare")
            .arg(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let stdout = child.stdout.take().ok_or("the bare server has no standard output")?;
        if BufReader::new(stdout).lines().next_line().await?.is_none() {
            return Err("the bare server could not start".into());
        }
        Ok(Self { folder, child })
    }
}

/// Returns a TCP address of the loopback interface that was free during the call.
pub(crate) fn free_address() -> std::io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}

/// Returns a configuration whose emulated models have no profile, so they answer immediately. Keys
/// keep their defaults unless the load requires other values.
fn config(tcp: SocketAddr, connections: u16) -> String {
    let model = |bytes| {
        format!(
            "  - {{name: {}, engine: emulated, slo: 10s, queue: {{max_requests: {}, memory: 256Mi, on_late: serve}}, \
             tensors: [{{input: x, output: y, datatype: FP32, shape: [{}]}}]}}\n",
            model(bytes),
            connections.max(1024),
            elements(bytes)
        )
    };
    format!(
        "listen: {{http: [\"unix:{HTTP_SOCKET}\", \"{tcp}\"], grpc: [\"unix:{GRPC_SOCKET}\"], metrics: []}}\n\
         gpus: [{{device: emulated}}]\n\
         controller: {{policy: static}}\n\
         models:\n{}{}",
        model(plan::SMALL),
        model(plan::LARGE)
    )
}
