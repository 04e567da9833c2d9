//! The servers of the comparison, with 40 models and the memory for a few of them.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use shadowslice_shared::profile::wake_time;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::server::ServerUnderTest;
use tempfile::TempDir;

use crate::MeasureError;
use crate::exchange::model;

use super::super::VsTritonOptions;
use super::super::case::SMALL;
use super::super::servers::free_address;
use super::super::triton::TritonServer;
use super::client::{REQUEST_TIMEOUT, model_name};
use super::plan::MODELS;
use super::results::WakeCounts;

/// The GPU memory of a CUDA context, in MiB (measured on an H200, see `configs/profiles/resnet50.yaml`).
/// Each server has one context.
pub(super) const CONTEXT_MIB: usize = 169;

/// The weights of a model, in MiB, which leave the GPU when the model sleeps.
pub(super) const WEIGHTS_MIB: usize = 100;

/// The other GPU memory of a model, in MiB, which stays while the model sleeps. A ViT-B/16 with 330 MiB of
/// weights keeps 64 MiB on an H200.
pub(super) const REST_MIB: usize = 20;

/// The number of models that are awake in shadowslice at the same time.
pub(super) const AWAKE: usize = 4;

/// The memory of the emulated GPU, in MiB: the context, what stays of all models, and the weights of those
/// that are awake.
pub(super) const MEMORY_MIB: usize = CONTEXT_MIB + MODELS * REST_MIB + AWAKE * WEIGHTS_MIB;

/// The number of models that Triton can load into the same memory.
pub(super) const LOADED: usize = (MEMORY_MIB - CONTEXT_MIB) / (WEIGHTS_MIB + REST_MIB);

/// The time in which ONNX Runtime makes a session of ResNet-50 (97 MiB) on one core of an Intel Xeon,
/// without a GPU and with the file in the page cache (measured on 2026-11-30).
pub(super) const SESSION_TIME: Duration = Duration::from_millis(120);

/// Returns the time in which the emulated GPU gets the weights of a model.
pub(super) fn copy_time() -> Duration {
    wake_time((WEIGHTS_MIB as u64) << 20)
}

/// shadowslice with models that sleep.
pub(super) struct SleepingModels {
    server: ServerUnderTest,
    pub(super) http: SocketAddr,
}

impl SleepingModels {
    /// Starts the supervisor, and returns when all models are ready.
    pub(super) async fn start(options: &VsTritonOptions) -> Result<Self, MeasureError> {
        let http = free_address()?;
        let file = fs::canonicalize(echo_folder(options).join("1/model.onnx"))?;
        let home = Home::with_config(&config(http, &file))?;
        home.write("profile.yaml", profile())?;
        Ok(Self { server: ServerUnderTest::start_ready(home).await?, http })
    }

    /// Returns the wakes of all models since the start of the supervisor.
    pub(super) async fn wakes(&self) -> Result<WakeCounts, MeasureError> {
        let status = self.server.status().await?;
        let mut counts = WakeCounts::default();
        for sleep in status.models.iter().filter_map(|model| model.more.get("sleep")) {
            counts.wakes += sleep["wakes"].as_u64().unwrap_or_default();
            counts.seconds += sleep["wake_s"].as_f64().unwrap_or_default();
        }
        Ok(counts)
    }

    /// Stops the supervisor.
    pub(super) async fn stop(self) -> Result<(), MeasureError> {
        match self.server.stop().await {
            // The process of the shared worker may end after the supervisor, which does not change figures.
            Err(HarnessError::LeftBehind(_)) => Ok(()),
            stopped => Ok(stopped?),
        }
    }
}

fn config(http: SocketAddr, file: &Path) -> String {
    let keys = format!(
        "path: {}, engine: onnxruntime, profile: profile.yaml, slo: {}s, isolation: shared, \
         sleep: on-pressure, batch: {{max: 32}}",
        file.display(),
        REQUEST_TIMEOUT.as_secs()
    );
    let model = |index| format!("  - {{name: {}, {keys}}}\n", model_name(index));
    let models: String = (0..MODELS).map(model).collect();
    format!(
        "listen: {{http: [\"unix:http.sock\", \"{http}\"], grpc: [\"unix:grpc.sock\"], metrics: []}}\n\
         gpus: [{{device: emulated, sms: 132, memory: {MEMORY_MIB}Mi}}]\n\
         controller: {{policy: static}}\n\
         ready: all\n\
         models:\n{models}"
    )
}

/// Returns a profile with the memory of a model. A batch takes almost no time beyond its computation.
fn profile() -> String {
    format!(
        "source: {{kind: illustrative}}\n\
         memory: {{context: {CONTEXT_MIB}Mi, weights: {WEIGHTS_MIB}Mi, activations: {REST_MIB}Mi}}\n\
         start: {{process: 1ms, load: 1ms, warm: 1ms}}\n\
         execution_ms:\n  sms: [66]\n  1: [0.001]\n  32: [0.001]\n"
    )
}

/// A backend of Triton.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TritonBackend {
    /// The backend of `minimal_backend.c`, whose instances take this time to start.
    Minimal(Duration),
    /// The Python backend with `model.py`.
    Python,
}

/// Triton with models that the client loads.
pub(super) struct LoadedModels {
    pub(super) server: TritonServer,
    _repository: TempDir,
}

impl LoadedModels {
    /// Starts Triton without a loaded model.
    pub(super) async fn start(
        options: &VsTritonOptions,
        backend: TritonBackend,
    ) -> Result<Self, MeasureError> {
        let repository = tempfile::tempdir()?;
        fill(repository.path(), &fs::canonicalize(echo_folder(options))?, backend)?;
        let load = match backend {
            TritonBackend::Minimal(load) => load,
            TritonBackend::Python => Duration::ZERO,
        };
        let server = TritonServer::start_empty(options, repository.path(), load).await?;
        Ok(Self { server, _repository: repository })
    }

    /// Stops Triton. It may have crashed under the load, which the lost requests show, so an error is only
    /// printed.
    pub(super) async fn stop(self) {
        if let Err(error) = self.server.stop().await {
            eprintln!("note: Triton ended before it was stopped; see triton.log ({error})");
        }
    }
}

/// Fills a model repository with copies of the model in the folder `echo`.
fn fill(repository: &Path, echo: &Path, backend: TritonBackend) -> Result<(), MeasureError> {
    let mut config = fs::read_to_string(echo.join("config.pbtxt"))?;
    if backend != TritonBackend::Python {
        config = config.replace("backend: \"python\"", "backend: \"minimal\"");
    }
    for index in 0..MODELS {
        let folder = repository.join(model_name(index));
        fs::create_dir(&folder)?;
        fs::write(folder.join("config.pbtxt"), &config)?;
        symlink(echo.join("1"), folder.join("1"))?;
    }
    Ok(())
}

/// Returns the folder of the model that returns its input, which all models copy.
fn echo_folder(options: &VsTritonOptions) -> PathBuf {
    options.rivals.join("models").join(model(SMALL))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_servers_have_the_same_memory() {
        assert_eq!((MEMORY_MIB, LOADED), (1_369, 10));
        let text = config("127.0.0.1:1".parse().unwrap(), Path::new("/model.onnx"));
        assert!(
            text.contains("memory: 1369Mi") && text.matches("sleep: on-pressure").count() == MODELS,
            "{text}"
        );
    }

    #[test]
    fn a_repository_has_all_models_with_the_backend() {
        let (echo, repository) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir(echo.path().join("1")).unwrap();
        fs::write(echo.path().join("config.pbtxt"), "backend: \"python\"\nmax_batch_size: 32\n").unwrap();
        fill(repository.path(), echo.path(), TritonBackend::Minimal(SESSION_TIME)).unwrap();
        let config = fs::read_to_string(repository.path().join("model-39/config.pbtxt")).unwrap();
        assert_eq!(config, "backend: \"minimal\"\nmax_batch_size: 32\n");
        assert!(repository.path().join("model-00/1").is_dir());
        assert_eq!(fs::read_dir(repository.path()).unwrap().count(), MODELS);
    }
}
