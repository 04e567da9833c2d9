//! The servers under measurement, started once for all rounds.

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

use crate::Failure;
use crate::bare::{GRPC_SOCKET, HTTP_SOCKET};
use crate::closed_loop::{self, Round};
use crate::exchange::{Client, Fault, Stream, elements, model};
use crate::http::HttpClient;
use crate::machine::{Clocks, CpuClock};
use crate::plan::{self, Protocol, Setting, Transport};

/// shadowslice and the bare server.
pub(crate) struct Servers {
    system: ServerUnderTest,
    bare: Bare,
    tcp: SocketAddr,
}

/// The bare server's process; it ends when its standard input is closed.
struct Bare {
    folder: TempDir,
    child: Child,
}

impl Servers {
    /// Starts both, and returns when they serve.
    pub(crate) async fn start(settings: &[Setting]) -> Result<Self, Failure> {
        let tcp = free_address()?;
        let most = settings.iter().map(|setting| setting.connections).max().unwrap_or(1);
        let system = ServerUnderTest::start_ready(Home::with_config(&config(tcp, most))?).await?;
        Ok(Self { system, bare: Bare::start().await?, tcp })
    }

    /// Measures one round of one setting.
    pub(crate) async fn round(&self, setting: &Setting, span: Duration) -> Result<Round, Failure> {
        let mut clients = Vec::new();
        for connection in 0..setting.connections {
            clients.push(self.client(setting, connection).await?);
        }
        closed_loop::run(clients, span, &self.clocks(setting)?).await
    }

    async fn client(&self, setting: &Setting, connection: u16) -> Result<Client, Fault> {
        let Setting { bytes, .. } = *setting;
        let stream = match setting.transport {
            Transport::Unix => Stream::unix(&self.socket(setting)).await?,
            Transport::Tcp => Stream::tcp(self.tcp).await?,
        };
        match (setting.protocol, setting.server) {
            (Protocol::Grpc, _) => Client::grpc(stream, bytes, connection).await,
            (Protocol::Http, plan::Server::Shadowslice) => Ok(Client::http(stream, bytes, connection)),
            (Protocol::Http, plan::Server::Bare) => {
                Ok(Client::Http(Box::new(HttpClient::bare(stream, bytes, connection))))
            }
        }
    }

    fn socket(&self, setting: &Setting) -> PathBuf {
        let folder = match setting.server {
            plan::Server::Shadowslice => self.system.home().run_dir(),
            plan::Server::Bare => self.bare.folder.path().to_owned(),
        };
        folder.join(match setting.protocol {
            Protocol::Http => HTTP_SOCKET,
            Protocol::Grpc => GRPC_SOCKET,
        })
    }

    fn clocks(&self, setting: &Setting) -> Result<Clocks, Failure> {
        let clock = |pid: i32| CpuClock::of(Pid::from_raw(pid));
        Ok(match setting.server {
            plan::Server::Shadowslice => {
                let workers = self.system.children().into_iter().map(|worker| clock(worker.pid));
                Clocks {
                    server: clock(self.system.process().pid)?,
                    workers: workers.collect::<Result<_, _>>()?,
                }
            }
            plan::Server::Bare => {
                let pid = self.bare.child.id().ok_or("the bare server has ended")?;
                Clocks { server: clock(i32::try_from(pid)?)?, workers: Vec::new() }
            }
        })
    }

    /// Stops both.
    pub(crate) async fn stop(mut self) -> Result<(), Failure> {
        drop(self.bare.child.stdin.take());
        self.bare.child.wait().await?;
        self.system.stop().await?;
        Ok(())
    }
}

impl Bare {
    async fn start() -> Result<Self, Failure> {
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

/// A TCP address that was free a moment ago.
pub(crate) fn free_address() -> std::io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}

/// Models without a profile, which answer at once; everything else as far as possible at its default.
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
