//! The host environment: the run directory, the programs, the GPUs and the threads. `serve` and
//! `check --run` use the same environment.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use shadowslice_config::Config;
use shadowslice_control::backend::{GpuBackend, Gpus, MpsHandover};
use shadowslice_control::controller::{Context, GroupLedger, MemoryLedger};
use shadowslice_control::host::{self, HostError, RunDir};
use shadowslice_control::model_cache;
use shadowslice_control::nvml::Watch;
use shadowslice_control::process::{
    StartQueue, Users, WorkerSettings, held, kill_leftover_workers, may_raise_priority, reap_orphans,
};
use shadowslice_control::residency::ResidencyBoard;
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::pipeline::GpuPauses;
use shadowslice_datapath::tenants::Tenants;
use shadowslice_shared::exit;
use tokio::runtime::Runtime;

use crate::serve::{Failed, NO_THREADS, unavailable};

/// The number of tasks after which a data-path thread takes a task from the queue that all threads share,
/// even if its own queue is not empty. Its own queue holds 256 tasks. With more active connections, those
/// in the shared queue would wait while the others get tens of answers each.
const SHARED_QUEUE_TURN: u32 = 2;

pub(crate) struct Ground {
    pub(crate) run_dir: RunDir,
    pub(crate) gpus: Gpus,
    pub(crate) runtime: Runtime,
    pub(crate) context: Context,
    /// The watch of the GPUs, which ends when it is dropped.
    pub(crate) watch: Watch,
}

impl Ground {
    /// Locks the run directory and starts MPS. During an upgrade, the previous supervisor passes its
    /// `lock` and its MPS daemons.
    pub(crate) fn prepare(
        config: &Config,
        lock: Option<OwnedFd>,
        mps_handovers: Option<&[MpsHandover]>,
    ) -> Result<Self, Failed> {
        reap_orphans();
        let unfit = |error: HostError| unavailable("cannot serve on this host", &error);
        let library = host::onnxruntime_library(config).map_err(unfit)?;
        let mut programs = host::programs().map_err(unfit)?;
        // A package upgrade may replace the file by a worker that does not understand this supervisor.
        programs.worker = held(&programs.worker)
            .map_err(|error| unavailable("cannot read the worker's program", &error))?;
        let run_dir = RunDir::take(&config.run_dir, lock).map_err(|error| unfit(error.into()))?;
        if mps_handovers.is_none() {
            kill_leftover_workers(&run_dir.private().join("workers"));
        }
        host::raise_file_limit();
        let users = users(config)?;
        let place = match &users {
            Some(_) => run_dir.passable().map_err(|error| unfit(error.into()))?,
            None => run_dir.private(),
        };
        let mps_handovers = mps_handovers.unwrap_or_default();
        let gpus = host::gpus(&config.gpus, &place, &programs.worker, users.is_some(), mps_handovers)
            .map_err(unfit)?;
        let runtime = data_path().map_err(|error| unavailable(NO_THREADS, &error))?;
        // Requests and responses pass through this process.
        if let Err(error) = nix::sys::prctl::set_dumpable(false) {
            tracing::warn!(
                %error,
                "cannot protect the supervisor's memory; other processes of this user can read requests and responses in it"
            );
        }
        let watch = Watch::start(&config.gpus);
        let tenants = Tenants::new(&config.tenants);
        gpus.iter().for_each(|gpu| gpu.facts().sm_time.divide_among(&tenants));
        let memory = || Arc::new(MemoryLedger::new(config.controller.standby_memory));
        let context = Context {
            workers: WorkerSettings {
                programs,
                variables: config.workers.environment.clone(),
                memory: config.workers.memory,
                register: run_dir.private().join("workers"),
                data_path: runtime.handle().clone(),
            },
            library,
            shared: Arc::default(),
            engines: model_cache::folder(&place),
            users,
            timeouts: config.timeouts,
            response_bytes: config.limits.response_bytes,
            clock: Clock::start(),
            lower_shadows: may_raise_priority(),
            gpus: gpus.clone(),
            readings: watch.readings(),
            memory: gpus.iter().map(|_| memory()).collect(),
            groups: gpus.iter().map(|gpu| Arc::new(GroupLedger::new(groups_of(&**gpu)))).collect(),
            pauses: gpus.iter().map(|_| GpuPauses::new(config.controller.preempts())).collect(),
            tenants,
            policy_acts: config.controller.acting_policy().is_some(),
            residency: Arc::new(ResidencyBoard::new(gpus.len())),
            starts: StartQueue::of_host(),
        };
        Ok(Self { run_dir, gpus, runtime, context, watch })
    }
}

/// Returns the users as which workers run, if the configuration sets them.
fn users(config: &Config) -> Result<Option<Arc<Users>>, Failed> {
    let Some(users) = config.workers.users.clone() else { return Ok(None) };
    if !nix::unistd::geteuid().is_root() {
        let why = "workers.users: only root can run workers as other users; run the supervisor as root";
        return Err(Failed { why: why.to_owned(), code: exit::CONFIG });
    }
    Ok(Some(Arc::new(Users::new(users))))
}

/// Starts the threads of the data path.
fn data_path() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(host::data_path_threads())
        .thread_name("data-path")
        .global_queue_interval(SHARED_QUEUE_TURN)
        .enable_all()
        .build()
}

/// Returns the number of groups of the GPU, or 0 if it does not divide.
fn groups_of(gpu: &dyn GpuBackend) -> usize {
    gpu.division().map_or(0, |division| division.count())
}
