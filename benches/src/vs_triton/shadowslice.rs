//! The shadowslice server. The benchmark starts it in the same way as a user does.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::json;
use shadowslice_tests::home::Home;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;

use crate::MeasureError;
use crate::exchange::model;

use super::VsTritonOptions;
use super::call::load;
use super::case::{LARGE, SMALL};
use super::servers::free_address;

const MODELS: usize = 2;

/// The shares, in percent, between which successive calls of `resize` alternate.
const SHARES: [u32; 2] = [40, 50];

/// The supervisor with its workers.
pub(crate) struct ShadowsliceServer {
    server: ServerUnderTest,
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    resized: usize,
}

impl ShadowsliceServer {
    /// Starts the supervisor with the models in `models`, and returns when they are ready.
    pub(crate) async fn start(options: &VsTritonOptions, models: &Path) -> Result<Self, MeasureError> {
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

    /// Returns the processes of the supervisor and of its workers.
    pub(crate) fn processes(&self) -> (ProcessHandle, Vec<ProcessHandle>) {
        (self.server.process(), self.server.children())
    }

    /// Returns the path of the Unix socket for HTTP.
    pub(crate) fn http_socket(&self) -> PathBuf {
        self.server.home().run_dir().join("http.sock")
    }

    /// Returns the address of the Unix socket for gRPC, in the URI format of the gRPC libraries.
    pub(crate) fn grpc_socket(&self) -> String {
        format!("unix://{}", self.server.home().run_dir().join("grpc.sock").display())
    }

    /// Waits until each model has only one worker. At that point, no hand-over is in probation, so
    /// no parked worker can take the traffic back.
    pub(crate) async fn settle(&self) -> Result<(), MeasureError> {
        Ok(self.server.wait_children(MODELS).await?)
    }

    /// Returns the worker that currently serves the small model.
    async fn serving_worker(&self) -> Result<ProcessHandle, MeasureError> {
        let status = self.server.model(&model(SMALL)).await?;
        let mut workers = status.workers.iter();
        let serving = workers.find(|worker| worker.more.get("phase").is_some_and(|phase| phase == "serving"));
        serving
            .and_then(|worker| ProcessHandle::of(worker.pid))
            .ok_or_else(|| "the small model has no serving worker".into())
    }

    /// Reloads the small model.
    pub(crate) async fn load(&self) -> Result<(), MeasureError> {
        let before = self.serving_worker().await?;
        load(self.http, &model(SMALL), &json!({})).await?;
        if self.serving_worker().await? == before {
            Err("the reload did not replace the worker".into())
        } else {
            Ok(())
        }
    }

    /// Changes the share of the small model, and waits for the end of the hand-over.
    pub(crate) async fn resize(&mut self) -> Result<(), MeasureError> {
        let share = SHARES[self.resized % SHARES.len()];
        self.resized += 1;
        self.server.resize(&model(SMALL), share).await?;
        Ok(())
    }

    /// Kills the worker that serves the small model.
    pub(crate) async fn kill(&self) -> Result<(), MeasureError> {
        Ok(self.serving_worker().await?.signal(Signal::SIGKILL)?)
    }

    /// Stops the supervisor. Returns an error if processes or files remain.
    pub(crate) async fn stop(self) -> Result<(), MeasureError> {
        Ok(self.server.stop().await?)
    }
}

/// Returns a configuration whose models have no profile, so the emulated GPU adds no time. Keys
/// keep their defaults unless the load requires other values.
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
