//! A supervisor that serves some of the models, and hand-overs ordered of it.

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

/// How long the supervisor may take for anything, a model's reference answers on the CPU included.
const PATIENCE: Duration = Duration::from_secs(180);

/// How often a supervisor that starts is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Cores that a model's reference answers are computed on.
const THREADS: usize = 8;

/// How the models are served.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServingOptions<'a> {
    /// Names the log.
    pub(crate) name: &'a str,
    pub(crate) models: &'a [MeasuredModel],
    /// The share that each starts with, in percent.
    pub(crate) share: u32,
    /// The largest batch, in rows.
    pub(crate) batch: u32,
    /// How shares are changed, as the configuration says it.
    pub(crate) handover: &'a str,
}

/// A running supervisor; dropping it kills it and its workers.
#[derive(Debug)]
pub(crate) struct RunningServer {
    pub(crate) server: ServerUnderTest,
    name: String,
}

impl RunningServer {
    /// Starts it, and waits until all models are ready.
    pub(crate) async fn start(
        setting: &CheckSettings,
        service: ServingOptions<'_>,
    ) -> Result<Self, StageError> {
        Self::start_with(setting, service.name, &config(setting, service)).await
    }

    /// The same with another configuration; `name` names the log.
    pub(crate) async fn start_with(
        setting: &CheckSettings,
        name: &str,
        config: &str,
    ) -> Result<Self, StageError> {
        Self::start_in(home(setting, name, config)?, name).await
    }

    /// Does the same with optimised models that are kept in a folder for the next supervisor.
    pub(crate) async fn start_keeping(
        setting: &CheckSettings,
        name: &str,
        config: &str,
        kept: &Path,
    ) -> Result<Self, StageError> {
        let home = home(setting, name, config)?;
        home.keep_optimised_in(kept)?;
        Self::start_in(home, name).await
    }

    async fn start_in(home: Home, name: &str) -> Result<Self, StageError> {
        let serving = Self { server: ServerUnderTest::start(home, None)?, name: name.into() };
        serving.wait_ready().await?;
        Ok(serving)
    }

    /// Unlike `ServerReady` this ends at once when a model cannot be served.
    async fn wait_ready(&self) -> Result<(), StageError> {
        let deadline = Instant::now() + PATIENCE;
        let mut look = interval(LOOK_EVERY);
        loop {
            look.tick().await;
            let log = || self.server.log();
            if !self.server.process().alive() {
                return Err(StageError::Unusable(format!("the supervisor ended; its log:\n{}", log())));
            }
            // Refused until the control socket is there.
            let models = self.server.status().await.map(|status| status.models).unwrap_or_default();
            if let Some(model) = models.iter().find(|model| model.state == "unready") {
                let why = model.more.get("why").and_then(Value::as_str).unwrap_or("it does not say why");
                return Err(StageError::Unusable(format!("{} is unready: {why}", model.name)));
            }
            if !models.is_empty() && models.iter().all(|model| model.state == "ready") {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(StageError::Unusable(format!(
                    "not ready within {PATIENCE:?}; its log:\n{}",
                    log()
                )));
            }
        }
    }

    /// One hand-over, up to the first batch at the new share; something must ask for batches.
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

    /// Waits until a model has a single worker, and returns it.
    pub(crate) async fn alone(&self, model: &str) -> Result<WorkerStatusJson, StageError> {
        let alone = |model: &status::ModelStatusJson| model.workers.len() == 1 && incumbent(model).is_some();
        let status = self.server.wait_status(model, "the end of the old worker", alone).await?;
        let gone = || StageError::Unusable(format!("{model} has no worker"));
        incumbent(&status).cloned().ok_or_else(gone)
    }

    /// Stops it. Processes and files that it leaves behind are a figure, and no reason to discard
    /// other figures.
    pub(crate) async fn stop(self, figures: &mut FigureStore) -> Result<(), StageError> {
        match self.server.stop().await {
            Err(home::HarnessError::Left(left)) => figures.set(&["left_behind", &self.name], left),
            stopped => stopped?,
        }
        Ok(())
    }
}

/// A hand-over, and the worker that it put in charge.
#[derive(Debug)]
pub(crate) struct HandoverResult {
    pub(crate) handover: HandoverJson,
    pub(crate) worker: Option<WorkerStatusJson>,
}

impl HandoverResult {
    /// As it is kept among the raw figures.
    pub(crate) fn json(&self) -> Value {
        let HandoverJson { from_sms, to_sms, effect_ms, stall_us, .. } = &self.handover;
        let boot = self.worker.as_ref().and_then(|worker| worker.more.get("boot_ms"));
        json!({ "from_sms": from_sms, "to_sms": to_sms, "effect_ms": effect_ms, "stall_us": stall_us, "boot_ms": boot })
    }
}

/// A supervisor's surroundings; `name` names the log.
pub(crate) fn home(setting: &CheckSettings, name: &str, config: &str) -> Result<Home, StageError> {
    let mut home = Home::with_config(config)?;
    home.set_binary(setting.supervisor());
    home.set_patience(PATIENCE);
    home.set_log(setting.log(name));
    // CUDA keeps compiled kernels in the home directory, where the next supervisor finds them.
    let kept = setting.out.join("cache");
    std::fs::create_dir_all(&kept).map_err(StageError::io("make", &kept))?;
    home.set_env("HOME", kept);
    home.set_env("ORT_DISABLE_TELEMETRY", "1");
    Ok(home)
}

fn incumbent(model: &status::ModelStatusJson) -> Option<&WorkerStatusJson> {
    model.workers.iter().find(|worker| worker.role == "incumbent")
}

/// The GPU as a configuration names it.
pub(crate) fn gpu(setting: &CheckSettings) -> String {
    match &setting.device {
        CheckedDevice::Gpu(index) => format!("{{device: {index}}}"),
        CheckedDevice::Emulated => "{device: emulated, sms: 132}".into(),
    }
}

/// Threads that a model is given.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(THREADS))
}

pub(crate) fn config(setting: &CheckSettings, service: ServingOptions<'_>) -> String {
    let gpu = gpu(setting);
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
        writeln!(text, "{line}").expect("a string takes everything");
    }
    text
}
