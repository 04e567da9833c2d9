//! The pair of servers, shadowslice and Triton, and the measurement of a round.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use nix::unistd::Pid;
use shadowslice_tests::process::ProcessHandle;

use crate::MeasureError;
use crate::closed_loop;
use crate::exchange::{ClientStream, EchoClient};
use crate::machine::{CpuClock, ServerClocks};

use super::VsTritonOptions;
use super::case::{CaseWork, LiveChange, SMALL, ServerCase, Side, Wire};
use super::change::under_load;
use super::page::Versions;
use super::python::PythonClient;
use super::results::CaseResult;
use super::shadowslice::ShadowsliceServer;
use super::triton::TritonServer;

/// The content of the file that pins the version of ONNX Runtime for shadowslice.
const RUNTIME: &str = include_str!("../../../requirements-onnxruntime.txt");
/// The content of the file that pins the version of ONNX Runtime for Triton's models.
const TRITON_RUNTIME: &str = include_str!("../../rivals/requirements-triton.txt");

/// Both servers, shadowslice and Triton, and Triton's Python client.
pub(crate) struct ServerPair {
    ours: ShadowsliceServer,
    triton: TritonServer,
    python: PythonClient,
    triton_version: String,
}

impl ServerPair {
    /// Starts both servers and the client. Returns when the servers are ready.
    pub(crate) async fn start(options: &VsTritonOptions) -> Result<Self, MeasureError> {
        let models = std::fs::canonicalize(options.rivals.join("models")).map_err(|error| {
            format!("cannot find the models in {}: {error}; run `make rivals`", options.rivals.display())
        })?;
        let triton = TritonServer::start(options, &models).await?;
        let ours = ShadowsliceServer::start(options, &models).await?;
        let triton_version = triton.version().await?;
        Ok(Self { ours, triton, python: PythonClient::start(options).await?, triton_version })
    }

    /// Measures one round of a case.
    pub(crate) async fn measure(
        &mut self,
        case: &ServerCase,
        span: Duration,
    ) -> Result<CaseResult, MeasureError> {
        match case.what {
            CaseWork::Load { wire, bytes, connections } => {
                let mut clients = Vec::new();
                for connection in 0..connections {
                    clients.push(self.client(case.side, wire, bytes, connection).await?);
                }
                let clocks = self.clocks(case.side)?;
                Ok(CaseResult::Load(closed_loop::run(clients, span, &clocks).await?))
            }
            CaseWork::Python => {
                let address = match case.side {
                    Side::Ours => self.ours.grpc_socket(),
                    Side::Triton => self.triton.grpc.to_string(),
                };
                self.python.round(&address, SMALL, span).await.map(CaseResult::Python)
            }
            CaseWork::Change(change) => self.change(case.side, change, span).await,
        }
    }

    async fn client(
        &self,
        side: Side,
        wire: Wire,
        bytes: usize,
        connection: u16,
    ) -> Result<EchoClient, MeasureError> {
        let (http, grpc) = match side {
            Side::Ours => (self.ours.http, self.ours.grpc),
            Side::Triton => (self.triton.http, self.triton.grpc),
        };
        Ok(match (wire, side) {
            (Wire::HttpTcp, _) => EchoClient::http(ClientStream::tcp(http).await?, bytes, connection),
            (Wire::GrpcTcp, _) => EchoClient::grpc(ClientStream::tcp(grpc).await?, bytes, connection).await?,
            (Wire::HttpUnix, Side::Ours) => {
                EchoClient::http(ClientStream::unix(&self.ours.http_socket()).await?, bytes, connection)
            }
            (Wire::HttpUnix, Side::Triton) => return Err("Triton supports no Unix sockets".into()),
        })
    }

    /// Returns the CPU clocks of all processes that a server currently has.
    fn clocks(&self, side: Side) -> Result<ServerClocks, MeasureError> {
        let (server, workers) = match side {
            Side::Ours => self.ours.processes(),
            Side::Triton => self.triton.processes(),
        };
        let clock = |process: ProcessHandle| CpuClock::of(Pid::from_raw(process.pid));
        let workers = workers.into_iter().map(clock).collect::<Result<_, _>>()?;
        Ok(ServerClocks { server: clock(server)?, workers })
    }

    async fn change(
        &mut self,
        side: Side,
        change: LiveChange,
        span: Duration,
    ) -> Result<CaseResult, MeasureError> {
        let (ours, triton) = (&mut self.ours, &mut self.triton);
        if side == Side::Ours {
            ours.settle().await?;
        }
        let (to_ours, to_triton) = (ours.http, triton.http);
        let result = match (side, change) {
            (Side::Ours, LiveChange::Load) => under_load(to_ours, ours.load(), span).await,
            (Side::Ours, LiveChange::Resize) => under_load(to_ours, ours.resize(), span).await,
            (Side::Ours, LiveChange::Kill) => under_load(to_ours, ours.kill(), span).await,
            (Side::Triton, LiveChange::Load) => under_load(to_triton, triton.load(), span).await,
            (Side::Triton, LiveChange::Kill) => {
                let result = under_load(to_triton, triton.kill(), span).await;
                // Triton does not restart a killed stub, so the model is reloaded for the next round.
                triton.load().await?;
                triton.wait_serving().await?;
                result
            }
            (Side::Triton, LiveChange::Resize) => Err("Triton has no shares".into()),
        };
        result.map(CaseResult::Change)
    }

    /// Returns the versions of the measured software.
    pub(crate) fn versions(&self) -> Versions {
        let pinned = |file: &'static str| {
            let version = file.lines().find_map(|line| line.strip_prefix("onnxruntime=="));
            version.and_then(|version| version.split_whitespace().next()).unwrap_or("unknown").to_owned()
        };
        Versions {
            ours: env!("CARGO_PKG_VERSION").to_owned(),
            triton: self.triton_version.clone(),
            onnxruntime: pinned(RUNTIME),
            triton_onnxruntime: pinned(TRITON_RUNTIME),
            python: self.python.versions.clone(),
        }
    }

    pub(crate) async fn stop(self) -> Result<(), MeasureError> {
        self.triton.stop().await?;
        self.ours.stop().await
    }
}

/// Returns a TCP address of the loopback interface that was free during the call.
pub(crate) fn free_address() -> std::io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}
