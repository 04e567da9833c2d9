//! NVIDIA Triton, with its Python backend on the CPU.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use hyper::Method;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use shadowslice_benches::Failure;
use shadowslice_benches::exchange::{elements, model};
use shadowslice_tests::process::{ProcessHandle, descendants};
use tokio::process::{Child, Command};
use tokio::time::{Instant, interval, timeout};

use crate::Options;
use crate::call::{call, load};
use crate::case::SMALL;
use crate::change::once;
use crate::servers::free_address;

/// How long it may take to start, and to serve again after a load.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often it is looked at meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long it may take to end; with a stub that was killed it would take half a minute.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// The server with its stubs. Dropping it kills them.
pub(crate) struct Triton {
    child: Child,
    process: ProcessHandle,
    log: PathBuf,
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    loads: u32,
}

impl Triton {
    /// Starts it on the models in that folder, and returns when it serves.
    pub(crate) async fn start(options: &Options, models: &Path) -> Result<Self, Failure> {
        let (http, grpc) = (free_address()?, free_address()?);
        let log = options.rivals.join("triton.log");
        let script = options.scripts.join("triton");
        let child = Command::new(&script)
            .args([&fs::canonicalize(&options.rivals)?, models])
            .args([http.port().to_string(), grpc.port().to_string()])
            .env("PYTHON", &options.python)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", script.display()))?;
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
        let process = pid.and_then(ProcessHandle::of).ok_or("Triton has ended at once")?;
        let mut triton = Self { child, process, log, http, grpc, loads: 0 };
        triton.wait_serving().await?;
        Ok(triton)
    }

    /// The server's process, and its stubs'.
    pub(crate) fn processes(&self) -> (ProcessHandle, Vec<ProcessHandle>) {
        (self.process, descendants(self.process.pid))
    }

    /// Its version, as it says.
    pub(crate) async fn version(&self) -> Result<String, Failure> {
        let metadata: Value =
            serde_json::from_slice(&call(self.http, Method::GET, "/v2", String::new()).await?)?;
        Ok(metadata["version"].as_str().unwrap_or("unknown").to_owned())
    }

    /// Has the small model loaded anew. A load that changes nothing would do nothing, so each load
    /// sets another parameter.
    pub(crate) async fn load(&mut self) -> Result<(), Failure> {
        self.loads += 1;
        let tensor =
            |name: &str| json!([{"name": name, "data_type": "TYPE_FP32", "dims": [elements(SMALL)]}]);
        let config = json!({
            "backend": "python", "max_batch_size": 32, "input": tensor("x"), "output": tensor("y"),
            "instance_group": [{"kind": "KIND_CPU", "count": 1}],
            "dynamic_batching": {"max_queue_delay_microseconds": 0},
            "parameters": {"loads": {"string_value": self.loads.to_string()}},
        });
        // There is no stub if it was killed.
        let before = self.stub().ok();
        load(self.http, &model(SMALL), &config).await?;
        if Some(self.stub()?) == before { Err("the load changed nothing".into()) } else { Ok(()) }
    }

    /// The stub that serves the small model. The stub of an earlier load may still be ending; the
    /// newest stub serves.
    fn stub(&self) -> Result<ProcessHandle, Failure> {
        let path = format!("/{}/", model(SMALL));
        let serves = |stub: &ProcessHandle| {
            let command = fs::read(format!("/proc/{}/cmdline", stub.pid)).unwrap_or_default();
            String::from_utf8_lossy(&command).contains(&path)
        };
        let stubs = descendants(self.process.pid).into_iter().filter(serves);
        stubs.max_by_key(|stub| stub.pid).ok_or_else(|| "no stub serves the model".into())
    }

    /// Kills the stub that serves the small model.
    pub(crate) async fn kill(&self) -> Result<(), Failure> {
        Ok(self.stub()?.signal(Signal::SIGKILL)?)
    }

    /// Waits until the small model answers.
    pub(crate) async fn wait_serving(&mut self) -> Result<(), Failure> {
        let until = Instant::now() + PATIENCE;
        let mut look = interval(LOOK_EVERY);
        loop {
            look.tick().await;
            let Err(why) = once(self.http).await else { return Ok(()) };
            if self.child.try_wait()?.is_some() || Instant::now() > until {
                let log = self.log.display();
                return Err(format!("Triton does not serve ({why}); its log: {log}").into());
            }
        }
    }

    pub(crate) async fn stop(mut self) -> Result<(), Failure> {
        self.process.signal(Signal::SIGTERM)?;
        if let Ok(ended) = timeout(ENDS_WITHIN, self.child.wait()).await {
            ended?;
        }
        Ok(())
    }
}

impl Drop for Triton {
    fn drop(&mut self) {
        let stubs = descendants(self.process.pid);
        // Both fail only for processes that are gone, which need no signal.
        let _ = self.child.start_kill();
        for stub in stubs {
            let _ = stub.signal(Signal::SIGKILL);
        }
    }
}
