//! `shadowslice profile` measures a model's times and memory on a device for several batch sizes
//! and shares. It uses the same workers as `serve`.

mod bench;
mod driver_view;
mod options;
mod output;
#[cfg(test)]
mod tests;
mod yaml;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::profile::{
    Execution, ExecutionRow, ProcessMemory, Profile, ProfileSource, StartTimes, TableError,
};
use shadowslice_shared::slab::{SlabError, WritableSlab};
use shadowslice_shared::units::Percent;
use tokio::signal::unix::{SignalKind, signal};

use shadowslice_config as config;

use crate::log::Log;
use bench::{Bench, BenchError, ShareMeasurement};
use driver_view::DriverView;
pub use options::ProfileOptions;
use shadowslice_config::{Config, ModelConfig, WarmupInput};
use shadowslice_control::host::{self, HostError, RunDir};
use shadowslice_control::model_cache;
use shadowslice_control::process::{BootMs, ReferenceFile, ReferenceFileError, WorkerSettings};
use shadowslice_shared::errors;
use shadowslice_shared::exit::{self, fail};

#[derive(Debug, thiserror::Error)]
enum ProfileError {
    #[error("{0}")]
    Options(String),
    #[error("cannot write the configuration for the measurement; set TMPDIR to a writable folder")]
    Describe(#[source] std::io::Error),
    #[error("cannot measure on this host")]
    Host(#[from] HostError),
    #[error("cannot allocate shared memory for the inputs of the measurement")]
    Slab(#[from] SlabError),
    #[error("cannot store the reference answers")]
    Reference(#[from] ReferenceFileError),
    #[error("cannot start the runtime; raise the limit on processes")]
    Runtime(#[source] std::io::Error),
    #[error("{0}")]
    FreeAxes(String),
    #[error("cannot measure the model at a share of {0}")]
    Bench(Percent, #[source] BenchError),
    #[error("cannot handle SIGINT and SIGTERM, so nothing was measured; raise the limit on open files")]
    Signals(#[source] std::io::Error),
    #[error("a signal stopped the measurement; no profile is written")]
    Interrupted,
    #[error("the measured times are not a valid profile; measure again")]
    Table(#[from] TableError),
    #[error(
        "cannot write the profile to {0}, so nothing was measured; create the folder, or give another --output"
    )]
    NoOutput(PathBuf, #[source] std::io::Error),
    #[error("cannot write the profile to {0}")]
    Write(PathBuf, #[source] std::io::Error),
}

impl ProfileError {
    fn code(&self) -> u8 {
        match self {
            Self::Options(_) | Self::FreeAxes(_) => exit::CONFIG,
            Self::Bench(..) | Self::Table(_) | Self::Interrupted => exit::REFUSED,
            _ => exit::UNAVAILABLE,
        }
    }
}

/// Runs the command and returns its exit code.
pub fn run(options: &ProfileOptions) -> u8 {
    let log = Log::start();
    let measured = measure(options);
    log.end();
    measured.unwrap_or_else(|error| fail(&errors::chain(&error), error.code()))
}

fn measure(options: &ProfileOptions) -> Result<u8, ProfileError> {
    if let Some(path) = &options.output {
        output::check_writable(path).map_err(|error| ProfileError::NoOutput(path.clone(), error))?;
    }
    let scratch = tempfile::Builder::new().prefix("profile-").tempdir().map_err(ProfileError::Describe)?;
    let config = configuration(options, scratch.path())?;
    let model = &config.models[0];
    let programs = host::programs()?;
    let run_dir = RunDir::take(&config.run_dir, None).map_err(HostError::from)?;
    let gpus = host::gpus(&config.gpus, &run_dir.private(), &programs.worker, false, &[])?;
    let driver = DriverView::of(&config.gpus[0]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(ProfileError::Runtime)?;
    let settings = WorkerSettings {
        programs,
        // PYTHONPATH can name the folder of the model's Python packages.
        variables: vec!["PYTHONPATH".to_owned()],
        memory: None,
        register: run_dir.private().join("workers"),
        data_path: runtime.handle().clone(),
    };
    let bench = Bench {
        model,
        command: &options.command(),
        gpu: Arc::clone(&gpus[0]),
        settings: &settings,
        engines: &model_cache::folder(&run_dir.private()),
        library: &host::onnxruntime_library(&config)?,
        timeouts: config.timeouts,
        response_bytes: config.limits.response_bytes,
        reference: ReferenceFile::create(&model.name)?,
        requests: WritableSlab::create("shadowslice-profile", model.queue.memory)?,
        runs: options.runs,
        time_limit: options.seconds,
        all_memory: &|pid| driver.memory_of(pid),
    };
    let columns = runtime.block_on(unless_interrupted(all(&bench, options.shares.clone())));
    gpus.iter().for_each(|gpu| gpu.stop(columns.is_err()));
    let profile = assemble(model, columns?, driver.source())?;
    let comment = format!("{}, measured by `shadowslice profile`.", model.name);
    put(options, &yaml::write(&profile, &comment))
}

/// Runs the measurement until it ends or the process receives a signal. On a signal, drops the
/// measurement, which stops its workers and removes its files.
async fn unless_interrupted(
    measuring: impl Future<Output = Result<Vec<ShareMeasurement>, ProfileError>>,
) -> Result<Vec<ShareMeasurement>, ProfileError> {
    let listen = |kind| signal(kind).map_err(ProfileError::Signals);
    let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    tokio::select! {
        columns = measuring => columns,
        _ = interrupt.recv() => Err(ProfileError::Interrupted),
        _ = terminate.recv() => Err(ProfileError::Interrupted),
    }
}

/// Runs the measurement. If the first worker found that the model must be loaded differently, for
/// example without channels-last convolutions, runs the measurement again.
async fn measure_with_retry<T>(measure: impl AsyncFn() -> Result<T, BenchError>) -> Result<T, BenchError> {
    match measure().await {
        Err(BenchError::OtherForm(why)) => {
            tracing::info!(why, "the model must be loaded in another form; measuring again");
            measure().await
        }
        measured => measured,
    }
}

async fn all(bench: &Bench<'_>, mut shares: Vec<Percent>) -> Result<Vec<ShareMeasurement>, ProfileError> {
    let failed = |share| {
        move |error| match error {
            BenchError::FreeAxes(which) => ProfileError::FreeAxes(which),
            error => ProfileError::Bench(share, error),
        }
    };
    bench.prepare().await.map_err(failed(Percent::WHOLE))?;
    shares.sort_unstable();
    let mut columns = match bench.gpu.division() {
        Ok(division) => {
            match measure_with_retry(async || bench.measure_inside(division, &shares).await).await {
                Err(BenchError::NoPartitions(why)) => {
                    tracing::warn!(
                        why,
                        "the model cannot run on partitions; measuring each share in a worker with an MPS percentage"
                    );
                    Vec::new()
                }
                measured => measured.map_err(failed(Percent::WHOLE))?,
            }
        }
        Err(_) => Vec::new(),
    };
    if columns.is_empty() {
        for share in shares {
            let measured = measure_with_retry(async || bench.measure(share).await).await;
            columns.push(measured.map_err(failed(share))?);
        }
    }
    // Two shares may be rounded to the same number of SMs.
    columns.dedup_by_key(|column| column.sms);
    Ok(columns)
}

fn configuration(options: &ProfileOptions, scratch: &Path) -> Result<Config, ProfileError> {
    let json = |path: &PathBuf| {
        let whole = std::path::absolute(path).map_err(ProfileError::Describe)?;
        Ok::<_, ProfileError>(serde_json::json!(whole))
    };
    let mut model = serde_json::json!({
        "name": options.name(), "engine": options.engine(), "path": json(&options.model)?,
        "slo": "1s", "queue": {"memory": "1Gi"},
    });
    if let Some(profile) = &options.emulate {
        model["profile"] = json(profile)?;
    }
    if let Some(python) = &options.python {
        model["python"] = serde_json::json!({"executable": json(python)?});
    }
    if let Some(max) = options.max_batch {
        model["batch"] = serde_json::json!({"max": max});
    }
    if !options.shape.is_empty() {
        model["warmup"] =
            options.shape.iter().map(|(name, axes)| (name.clone(), serde_json::json!(axes))).collect();
    }
    let mut gpu = serde_json::json!({"device": options.device});
    match options.device.parse::<u32>() {
        Ok(index) => gpu["device"] = serde_json::json!(index),
        Err(_) if options.device == "emulated" => gpu["sms"] = serde_json::json!(options.sms),
        Err(_) => {}
    }
    let run_dir = json(&scratch.to_owned())?;
    let mut document = serde_json::json!({"run_dir": run_dir, "gpus": [gpu], "models": [model]});
    if let Some(library) = &options.library {
        document["onnxruntime"] = serde_json::json!({"library": json(library)?});
    }
    // The configuration is loaded from a file. The file can contain JSON, because JSON is valid
    // YAML.
    let file = scratch.join("profile.yaml");
    std::fs::write(&file, document.to_string()).map_err(ProfileError::Describe)?;
    let invalid = |why: &str| ProfileError::Options(options::with_options(why, &file));
    let config = config::load_here(&file).map_err(|error| invalid(&errors::chain(&error)))?;
    match &config.models[0].broken {
        Some(why) => Err(invalid(why)),
        None => Ok(config),
    }
}

fn assemble(
    model: &ModelConfig,
    columns: Vec<ShareMeasurement>,
    measured: Option<ProfileSource>,
) -> Result<Profile, ProfileError> {
    let sizes: Vec<u32> =
        columns.first().map(|first| first.ms.iter().map(|&(size, _)| size).collect()).unwrap_or_default();
    let row = |index: usize| columns.iter().map(|column| column.ms[index].1).collect();
    let rows =
        sizes.iter().enumerate().map(|(index, &batch)| ExecutionRow { batch, ms: row(index) }).collect();
    let sms = columns.iter().map(|column| column.sms).collect();
    // A start takes longest with the fewest SMs. The profile contains the longest start time.
    let boots = columns.iter().map(|column| column.boot);
    let start = boots.map(start).reduce(longest).unwrap_or_default();
    // The context and some workspaces grow with the share. The profile contains the largest
    // measurement, so that every share fits.
    let most_memory = columns.iter().map(|column| column.memory).reduce(largest).unwrap_or_default();
    let (source, memory, bandwidth) = match (measured, &model.profile) {
        (Some(measured), _) => (measured, most_memory, 0.0),
        (None, Some(given)) => (given.source.clone(), given.memory, given.bandwidth),
        (None, None) => (ProfileSource::Illustrative, ProcessMemory::default(), 0.0),
    };
    let shape = |(name, given): (&String, &WarmupInput)| Some((name.clone(), given.shape.clone()?));
    let shapes = model.warmup.inputs.iter().filter_map(shape).collect();
    Ok(Profile { source, memory, start, bandwidth, shapes, execution: Execution::new(sms, rows)? })
}

fn start(boot: BootMs) -> StartTimes {
    let BootMs { spawn, libraries, context, session, warmup, proof } = boot;
    let span = |ms: f64| Duration::from_secs_f64(ms / 1e3);
    StartTimes { process: span(spawn + libraries + context), load: span(session), warm: span(warmup + proof) }
}

fn largest(one: ProcessMemory, other: ProcessMemory) -> ProcessMemory {
    ProcessMemory {
        context: one.context.max(other.context),
        weights: one.weights.max(other.weights),
        activations: one.activations.max(other.activations),
    }
}

fn longest(one: StartTimes, other: StartTimes) -> StartTimes {
    StartTimes {
        process: one.process.max(other.process),
        load: one.load.max(other.load),
        warm: one.warm.max(other.warm),
    }
}

fn put(options: &ProfileOptions, text: &str) -> Result<u8, ProfileError> {
    match &options.output {
        Some(path) => {
            std::fs::write(path, text).map_err(|error| ProfileError::Write(path.clone(), error))?;
            Ok(0)
        }
        None => Ok(exit::print(text)),
    }
}
