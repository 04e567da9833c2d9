//! NVIDIA Triton, with its Python backend or the minimal backend on the CPU.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use hyper::Method;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use shadowslice_tests::process::{ProcessHandle, descendants};
use tokio::process::{Child, Command};
use tokio::time::{Instant, interval, timeout};

use crate::MeasureError;
use crate::exchange::{elements, model};

use super::VsTritonOptions;
use super::call::{call, load};
use super::case::SMALL;
use super::change::infer_once;
use super::servers::free_address;

/// The maximum time that the benchmark waits until Triton answers, after a start or a load.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// The time between two checks of whether Triton answers.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The maximum time that Triton gets to exit on its own before it is killed. If a stub was killed
/// earlier, Triton would take half a minute to exit.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The Triton server with its stubs. Dropping this value kills the server and the stubs.
pub(crate) struct TritonServer {
    child: Child,
    process: ProcessHandle,
    log: PathBuf,
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    loads: u32,
}

impl TritonServer {
    /// Starts Triton with the models in `models`, and returns when it answers.
    pub(crate) async fn start(options: &VsTritonOptions, models: &Path) -> Result<Self, MeasureError> {
        let mut triton = Self::spawn(options, models, |command| command.args(["--load-model", "*"]))?;
        triton.wait_serving().await?;
        Ok(triton)
    }

    /// Starts Triton without a model, and returns when clients can load those in `models`. Instances of
    /// the minimal backend take `load` to start.
    pub(crate) async fn start_empty(
        options: &VsTritonOptions,
        models: &Path,
        load: Duration,
    ) -> Result<Self, MeasureError> {
        let load_us = load.as_micros().to_string();
        let mut triton = Self::spawn(options, models, |command| command.env("MINIMAL_LOAD_US", load_us))?;
        let http = triton.http;
        let ready =
            || async move { call(http, Method::GET, "/v2/health/ready", String::new()).await.map(drop) };
        triton.wait(ready).await?;
        Ok(triton)
    }

    fn spawn(
        options: &VsTritonOptions,
        models: &Path,
        more: impl FnOnce(&mut Command) -> &mut Command,
    ) -> Result<Self, MeasureError> {
        let (http, grpc) = (free_address()?, free_address()?);
        let log = options.rivals.join("triton.log");
        let script = options.scripts.join("triton");
        let mut command = Command::new(&script);
        command
            .args([&fs::canonicalize(&options.rivals)?, models])
            .args([http.port().to_string(), grpc.port().to_string()])
            .env("PYTHON", &options.python)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .kill_on_drop(true);
        let child = more(&mut command)
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", script.display()))?;
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
        let process = pid.and_then(ProcessHandle::of).ok_or("Triton ended during its start")?;
        Ok(Self { child, process, log, http, grpc, loads: 0 })
    }

    /// Returns the processes of the server and of its stubs.
    pub(crate) fn processes(&self) -> (ProcessHandle, Vec<ProcessHandle>) {
        (self.process, descendants(self.process.pid))
    }

    /// Returns the version that Triton reports.
    pub(crate) async fn version(&self) -> Result<String, MeasureError> {
        let metadata: Value =
            serde_json::from_slice(&call(self.http, Method::GET, "/v2", String::new()).await?)?;
        Ok(metadata["version"].as_str().unwrap_or("unknown").to_owned())
    }

    /// Reloads the small model. Triton ignores a load that does not change the configuration, so
    /// each load changes a parameter.
    pub(crate) async fn load(&mut self) -> Result<(), MeasureError> {
        self.loads += 1;
        let tensor =
            |name: &str| json!([{"name": name, "data_type": "TYPE_FP32", "dims": [elements(SMALL)]}]);
        let config = json!({
            "backend": "python", "max_batch_size": 32, "input": tensor("x"), "output": tensor("y"),
            "instance_group": [{"kind": "KIND_CPU", "count": 1}],
            "dynamic_batching": {"max_queue_delay_microseconds": 0},
            "parameters": {"loads": {"string_value": self.loads.to_string()}},
        });
        // After a kill, the model has no stub, and the error is ignored.
        let before = self.stub().ok();
        load(self.http, &model(SMALL), &config).await?;
        if Some(self.stub()?) == before { Err("the reload did not replace the stub".into()) } else { Ok(()) }
    }

    /// Returns the stub that serves the small model. If there are several, returns the newest one,
    /// because the stub of an earlier load may still be exiting.
    fn stub(&self) -> Result<ProcessHandle, MeasureError> {
        let path = format!("/{}/", model(SMALL));
        let serves = |stub: &ProcessHandle| {
            let command = fs::read(format!("/proc/{}/cmdline", stub.pid)).unwrap_or_default();
            String::from_utf8_lossy(&command).contains(&path)
        };
        let stubs = descendants(self.process.pid).into_iter().filter(serves);
        stubs.max_by_key(|stub| stub.pid).ok_or_else(|| "the small model has no stub".into())
    }

    /// Kills the stub that serves the small model.
    pub(crate) async fn kill(&self) -> Result<(), MeasureError> {
        Ok(self.stub()?.signal(Signal::SIGKILL)?)
    }

    /// Waits until the small model answers.
    pub(crate) async fn wait_serving(&mut self) -> Result<(), MeasureError> {
        let http = self.http;
        self.wait(|| async move { Ok(infer_once(http).await?) }).await
    }

    /// Waits until `check` succeeds.
    async fn wait<Checking>(&mut self, check: impl Fn() -> Checking) -> Result<(), MeasureError>
    where
        Checking: Future<Output = Result<(), MeasureError>>,
    {
        let until = Instant::now() + READY_TIMEOUT;
        let mut tick = interval(CHECK_INTERVAL);
        loop {
            tick.tick().await;
            let Err(why) = check().await else { return Ok(()) };
            if self.child.try_wait()?.is_some() || Instant::now() > until {
                let log = self.log.display();
                return Err(format!("Triton does not answer ({why}); see its log {log}").into());
            }
        }
    }

    pub(crate) async fn stop(mut self) -> Result<(), MeasureError> {
        self.process.signal(Signal::SIGTERM)?;
        if let Ok(ended) = timeout(STOP_TIMEOUT, self.child.wait()).await {
            ended?;
        }
        Ok(())
    }
}

impl Drop for TritonServer {
    fn drop(&mut self) {
        let stubs = descendants(self.process.pid);
        // The results are ignored, because the signals fail only if the processes have already
        // ended.
        let _ = self.child.start_kill();
        for stub in stubs {
            let _ = stub.signal(Signal::SIGKILL);
        }
    }
}
