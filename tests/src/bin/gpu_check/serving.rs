//! A supervisor that serves some of the models, and the hand-overs that the check requests from it.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use shadowslice_tests::home::{self, Home};
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::{self, HandoverJson, WorkerStatusJson};
use tokio::time::{Instant, interval};

use crate::error::StageError;
use crate::figures::FigureStore;
use crate::models::MeasuredModel;
use crate::tools::{CheckSettings, CheckedDevice};

/// The time limit of each action of the supervisor, which includes the computation of reference
/// answers on the CPU.
const ACTION_TIMEOUT: Duration = Duration::from_secs(180);

/// The interval between two checks of a starting supervisor.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The maximum number of threads that compute a model's reference answers.
const THREADS: usize = 8;

/// The models of a supervisor, and the configuration of the models.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServingOptions<'a> {
    /// The name of the supervisor's log.
    pub(crate) name: &'a str,
    pub(crate) models: &'a [MeasuredModel],
    /// The initial share of each model, in percent.
    pub(crate) share: u32,
    /// The maximum batch size, in rows.
    pub(crate) batch: u32,
    /// The value of the configuration key `handover`.
    pub(crate) handover: &'a str,
}

/// A running supervisor. Dropping this value kills the supervisor and its workers.
#[derive(Debug)]
pub(crate) struct RunningServer {
    pub(crate) server: ServerUnderTest,
    name: String,
}

impl RunningServer {
    /// Starts a supervisor, and waits until all models are ready.
    pub(crate) async fn start(
        settings: &CheckSettings,
        service: ServingOptions<'_>,
    ) -> Result<Self, StageError> {
        Self::start_with(settings, service.name, &config(settings, service)).await
    }

    /// Starts a supervisor with this configuration. `name` is the name of the log.
    pub(crate) async fn start_with(
        settings: &CheckSettings,
        name: &str,
        config: &str,
    ) -> Result<Self, StageError> {
        Self::start_in(home(settings, name, config)?, name).await
    }

    /// Starts a supervisor that keeps optimised models in a folder, where the next supervisor finds
    /// them.
    pub(crate) async fn start_keeping(
        settings: &CheckSettings,
        name: &str,
        config: &str,
        kept: &Path,
    ) -> Result<Self, StageError> {
        let mut home = home(settings, name, config)?;
        home.keep_optimised_in(kept);
        Self::start_in(home, name).await
    }

    async fn start_in(home: Home, name: &str) -> Result<Self, StageError> {
        let serving = Self { server: ServerUnderTest::start(home, None)?, name: name.into() };
        serving.wait_ready().await?;
        Ok(serving)
    }

    /// Waits until all models are ready. Returns an error as soon as a model is unready or the
    /// supervisor exits.
    async fn wait_ready(&self) -> Result<(), StageError> {
        let deadline = Instant::now() + ACTION_TIMEOUT;
        let mut tick = interval(POLL_INTERVAL);
        loop {
            tick.tick().await;
            let log = || self.server.log();
            if !self.server.process().is_alive() {
                return Err(StageError::Unusable(format!("the supervisor exited; its log:\n{}", log())));
            }
            // The command fails until the control socket exists, so a failure counts as an empty
            // list.
            let models = self.server.status().await.map(|status| status.models).unwrap_or_default();
            if let Some(model) = models.iter().find(|model| model.state == "unready") {
                let why = model.more.get("why").and_then(Value::as_str).unwrap_or("no reason given");
                return Err(StageError::Unusable(format!("{} is unready: {why}", model.name)));
            }
            if !models.is_empty() && models.iter().all(|model| model.state == "ready") {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(StageError::Unusable(format!(
                    "models not ready after {ACTION_TIMEOUT:?}; the supervisor's log:\n{}",
                    log()
                )));
            }
        }
    }

    /// Performs a hand-over, and waits for the first batch at the new share. The model must be
    /// under load.
    pub(crate) async fn hand_over(&self, model: &str, percent: u32) -> Result<HandoverResult, StageError> {
        let handover = self.server.resize(model, percent).await?;
        let seen = |model: &status::ModelStatusJson| {
            let last = model.handovers.last.as_ref();
            last.is_some_and(|last| last.to_sms == handover.to_sms && last.effect_ms.is_some())
        };
        let status = self.server.wait_status(model, "a batch at the new share", seen).await?;
        let worker = incumbent(&status).cloned();
        let last = status.handovers.last.unwrap_or(handover);
        Ok(HandoverResult { handover: last, worker })
    }

    /// Waits until a model has a single worker, and returns that worker.
    pub(crate) async fn wait_single_worker(&self, model: &str) -> Result<WorkerStatusJson, StageError> {
        let alone = |model: &status::ModelStatusJson| model.workers.len() == 1 && incumbent(model).is_some();
        let status = self.server.wait_status(model, "the end of the old worker", alone).await?;
        let missing = || StageError::Unusable(format!("{model} has no worker"));
        incumbent(&status).cloned().ok_or_else(missing)
    }

    /// Stops the supervisor. Processes and files that the supervisor leaves behind are recorded.
    /// They do not fail the stage, because its figures remain valid.
    pub(crate) async fn stop(self, figures: &mut FigureStore) -> Result<(), StageError> {
        match self.server.stop().await {
            Err(home::HarnessError::LeftBehind(left)) => figures.set(&["left_behind", &self.name], left),
            stopped => stopped?,
        }
        Ok(())
    }
}

/// A hand-over, and the worker that serves after it.
#[derive(Debug)]
pub(crate) struct HandoverResult {
    pub(crate) handover: HandoverJson,
    pub(crate) worker: Option<WorkerStatusJson>,
}

impl HandoverResult {
    /// Formats the hand-over for the raw figures.
    pub(crate) fn json(&self) -> Value {
        let HandoverJson { from_sms, to_sms, effect_ms, stall_us, .. } = &self.handover;
        let boot = self.worker.as_ref().and_then(|worker| worker.more.get("boot_ms"));
        json!({ "from_sms": from_sms, "to_sms": to_sms, "effect_ms": effect_ms, "stall_us": stall_us, "boot_ms": boot })
    }
}

/// Prepares the folder of a supervisor. `name` is the name of the log.
pub(crate) fn home(settings: &CheckSettings, name: &str, config: &str) -> Result<Home, StageError> {
    let mut home = Home::with_config(config)?;
    home.set_binary(settings.supervisor());
    home.set_timeout(ACTION_TIMEOUT);
    home.set_log(settings.log(name));
    // CUDA caches compiled kernels in the home directory, where the next supervisor finds them.
    let cache = settings.out.join("cache");
    std::fs::create_dir_all(&cache).map_err(StageError::io("create", &cache))?;
    home.set_env("HOME", cache);
    home.set_env("ORT_DISABLE_TELEMETRY", "1");
    Ok(home)
}

fn incumbent(model: &status::ModelStatusJson) -> Option<&WorkerStatusJson> {
    model.workers.iter().find(|worker| worker.role == "incumbent")
}

/// Returns the GPU as an element of the configuration key `gpus`.
pub(crate) fn gpu(settings: &CheckSettings) -> String {
    match &settings.device {
        CheckedDevice::Gpu(index) => format!("{{device: {index}}}"),
        CheckedDevice::Emulated => "{device: emulated, sms: 132}".into(),
    }
}

/// Returns the number of threads that compute the reference answers of a model.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(THREADS))
}

pub(crate) fn config(settings: &CheckSettings, service: ServingOptions<'_>) -> String {
    let gpu = gpu(settings);
    let threads = threads();
    let ServingOptions { share, batch, handover, .. } = service;
    let mut text = format!(
        "listen: {{http: [], grpc: [\"unix:grpc.sock\"], metrics: []}}\ngpus: [{gpu}]\n\
         controller: {{policy: static}}\ntimeouts: {{spawn: 30s, warm: 3m, dwell: 200ms}}\nmodels:\n"
    );
    for MeasuredModel { name, path, .. } in service.models {
        let path = path.to_string_lossy();
        let line = format!(
            "  - {{name: {name}, path: {path:?}, slo: 10s, share: {{initial: {share}%}}, batch: {{max: {batch}}}, \
             handover: {handover}, queue: {{memory: 1Gi, on_late: serve}}, threads: {threads}}}"
        );
        writeln!(text, "{line}").expect("writing to a string cannot fail");
    }
    text
}
