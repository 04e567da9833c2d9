//! Both servers, and their measurement.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use nix::unistd::Pid;
use shadowslice_benches::Failure;
use shadowslice_benches::closed_loop;
use shadowslice_benches::exchange::{Client, Stream};
use shadowslice_benches::machine::{Clocks, CpuClock};
use shadowslice_tests::process::ProcessHandle;

use crate::Options;
use crate::case::{Case, Change, SMALL, Side, What, Wire};
use crate::change::under_load;
use crate::measured::Measured;
use crate::ours::Ours;
use crate::page::Versions;
use crate::python::Python;
use crate::triton::Triton;

/// ONNX Runtime is pinned for ours here.
const RUNTIME: &str = include_str!("../../../../requirements-onnxruntime.txt");
/// And here for Triton's model.
const TRITON_RUNTIME: &str = include_str!("../../../rivals/requirements-triton.txt");

/// Both, with the client for Python.
pub(crate) struct Servers {
    ours: Ours,
    triton: Triton,
    python: Python,
    triton_version: String,
}

impl Servers {
    /// Starts all, and returns when both serve.
    pub(crate) async fn start(options: &Options) -> Result<Self, Failure> {
        let models = std::fs::canonicalize(options.rivals.join("models")).map_err(|error| {
            format!("no models in {}: {error}; run `make rivals`", options.rivals.display())
        })?;
        let triton = Triton::start(options, &models).await?;
        let ours = Ours::start(options, &models).await?;
        let triton_version = triton.version().await?;
        Ok(Self { ours, triton, python: Python::start(options).await?, triton_version })
    }

    /// One round of a case.
    pub(crate) async fn measure(&mut self, case: &Case, span: Duration) -> Result<Measured, Failure> {
        match case.what {
            What::Load { wire, bytes, connections } => {
                let mut clients = Vec::new();
                for connection in 0..connections {
                    clients.push(self.client(case.side, wire, bytes, connection).await?);
                }
                let clocks = self.clocks(case.side)?;
                Ok(Measured::Load(closed_loop::run(clients, span, &clocks).await?))
            }
            What::Python => {
                let address = match case.side {
                    Side::Ours => self.ours.grpc_socket(),
                    Side::Triton => self.triton.grpc.to_string(),
                };
                self.python.round(&address, SMALL, span).await.map(Measured::Python)
            }
            What::Change(change) => self.change(case.side, change, span).await,
        }
    }

    async fn client(&self, side: Side, wire: Wire, bytes: usize, connection: u16) -> Result<Client, Failure> {
        let (http, grpc) = match side {
            Side::Ours => (self.ours.http, self.ours.grpc),
            Side::Triton => (self.triton.http, self.triton.grpc),
        };
        Ok(match (wire, side) {
            (Wire::HttpTcp, _) => Client::http(Stream::tcp(http).await?, bytes, connection),
            (Wire::GrpcTcp, _) => Client::grpc(Stream::tcp(grpc).await?, bytes, connection).await?,
            (Wire::HttpUnix, Side::Ours) => {
                Client::http(Stream::unix(&self.ours.http_socket()).await?, bytes, connection)
            }
            (Wire::HttpUnix, Side::Triton) => return Err("Triton has no Unix sockets".into()),
        })
    }

    /// Of the processes that there are now.
    fn clocks(&self, side: Side) -> Result<Clocks, Failure> {
        let (server, workers) = match side {
            Side::Ours => self.ours.processes(),
            Side::Triton => self.triton.processes(),
        };
        let clock = |process: ProcessHandle| CpuClock::of(Pid::from_raw(process.pid));
        let workers = workers.into_iter().map(clock).collect::<Result<_, _>>()?;
        Ok(Clocks { server: clock(server)?, workers })
    }

    async fn change(&mut self, side: Side, change: Change, span: Duration) -> Result<Measured, Failure> {
        let (ours, triton) = (&mut self.ours, &mut self.triton);
        if side == Side::Ours {
            ours.settle().await?;
        }
        let (to_ours, to_triton) = (ours.http, triton.http);
        let seen = match (side, change) {
            (Side::Ours, Change::Load) => under_load(to_ours, ours.load(), span).await,
            (Side::Ours, Change::Resize) => under_load(to_ours, ours.resize(), span).await,
            (Side::Ours, Change::Kill) => under_load(to_ours, ours.kill(), span).await,
            (Side::Triton, Change::Load) => under_load(to_triton, triton.load(), span).await,
            (Side::Triton, Change::Kill) => {
                let seen = under_load(to_triton, triton.kill(), span).await;
                // Triton does not mend this itself, so it is mended for the next round.
                triton.load().await?;
                triton.wait_serving().await?;
                seen
            }
            (Side::Triton, Change::Resize) => Err("Triton has no shares".into()),
        };
        seen.map(Measured::Change)
    }

    /// The versions of the measured software.
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

    /// Stops both.
    pub(crate) async fn stop(self) -> Result<(), Failure> {
        self.triton.stop().await?;
        self.ours.stop().await
    }
}

/// A TCP address that was free a moment ago.
pub(crate) fn free_address() -> std::io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}
