//! This server, as users start it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::json;
use shadowslice_benches::Failure;
use shadowslice_benches::exchange::model;
use shadowslice_tests::home::Home;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;

use crate::Options;
use crate::call::load;
use crate::case::{LARGE, SMALL};
use crate::servers::free_address;

/// Models that it serves.
const MODELS: usize = 2;

/// Shares that `resize` goes back and forth between, in percent.
const SHARES: [u32; 2] = [40, 50];

/// The supervisor with its workers.
pub(crate) struct Ours {
    server: ServerUnderTest,
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    resized: usize,
}

impl Ours {
    /// Starts it on the models in that folder, and returns when it serves.
    pub(crate) async fn start(options: &Options, models: &Path) -> Result<Self, Failure> {
        let (http, grpc) = (free_address()?, free_address()?);
        let (file, engine) = match options.python_models {
            false => ("model.onnx", "engine: onnxruntime".to_owned()),
            true => {
                ("ours.py", format!("engine: python, python: {{executable: {}}}", options.python.display()))
            }
        };
        let model = |bytes| {
            let name = model(bytes);
            let path = models.join(&name).join("1").join(file);
            format!("{{name: {name}, path: {}, {engine}, ", path.display())
        };
        let models = [model(SMALL), model(LARGE)];
        let mut home = Home::with_config(&config(&models, http, grpc))?;
        home.set_env("PYTHONPATH", options.rivals.join("triton-python"));
        let server = ServerUnderTest::start_ready(home).await?;
        Ok(Self { server, http, grpc, resized: 0 })
    }

    /// The supervisor's process, and its workers'.
    pub(crate) fn processes(&self) -> (ProcessHandle, Vec<ProcessHandle>) {
        (self.server.process(), self.server.children())
    }

    /// Its Unix socket for HTTP.
    pub(crate) fn http_socket(&self) -> PathBuf {
        self.server.home().run_dir().join("http.sock")
    }

    /// Its Unix socket for gRPC, as gRPC's libraries name it.
    pub(crate) fn grpc_socket(&self) -> String {
        format!("unix://{}", self.server.home().run_dir().join("grpc.sock").display())
    }

    /// Waits until each model has a single worker: then no hand-over is in its probation, in which
    /// the old worker could take over again.
    pub(crate) async fn settle(&self) -> Result<(), Failure> {
        Ok(self.server.wait_children(MODELS).await?)
    }

    /// The worker that serves the small model.
    async fn serving(&self) -> Result<ProcessHandle, Failure> {
        let status = self.server.model(&model(SMALL)).await?;
        let mut workers = status.workers.iter();
        let serving = workers.find(|worker| worker.more.get("phase").is_some_and(|phase| phase == "serving"));
        serving
            .and_then(|worker| ProcessHandle::of(worker.pid))
            .ok_or_else(|| "no worker serves the model".into())
    }

    /// Has the small model loaded anew.
    pub(crate) async fn load(&self) -> Result<(), Failure> {
        let before = self.serving().await?;
        load(self.http, &model(SMALL), &json!({})).await?;
        if self.serving().await? == before { Err("the load changed nothing".into()) } else { Ok(()) }
    }

    /// Gives the small model another share, and waits for the end of the hand-over.
    pub(crate) async fn resize(&mut self) -> Result<(), Failure> {
        let share = SHARES[self.resized % SHARES.len()];
        self.resized += 1;
        self.server.resize(&model(SMALL), share).await?;
        Ok(())
    }

    /// Kills the worker that serves the small model.
    pub(crate) async fn kill(&self) -> Result<(), Failure> {
        Ok(self.serving().await?.signal(Signal::SIGKILL)?)
    }

    /// Stops it; it must leave nothing behind.
    pub(crate) async fn stop(self) -> Result<(), Failure> {
        Ok(self.server.stop().await?)
    }
}

/// Models without a profile, which answer as soon as ONNX Runtime does; all other settings are the
/// defaults as far as possible.
fn config(models: &[String], http: SocketAddr, grpc: SocketAddr) -> String {
    let models: String = models
        .iter()
        .map(|model| format!("  - {model}slo: 10s, batch: {{max: 32}}, queue: {{on_late: serve}}}}\n"))
        .collect();
    format!(
        "listen: {{http: [\"unix:http.sock\", \"{http}\"], grpc: [\"unix:grpc.sock\", \"{grpc}\"], metrics: []}}\n\
         gpus: [{{device: emulated}}]\n\
         controller: {{policy: static}}\n\
         model_control: explicit\n\
         workers: {{environment: [PYTHONPATH]}}\n\
         models:\n{models}"
    )
}
