//! The ground on which models run: the run directory, the host's programs and GPUs, the threads. A
//! supervisor that serves and `check --run` have the same.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use shadowslice_config::Config;
use shadowslice_control::backend::{GpuBackend, Gpus, MpsHandover};
use shadowslice_control::controller::{Context, GroupLedger, MemoryLedger};
use shadowslice_control::host::{self, HostError, RunDir};
use shadowslice_control::nvml::Watch;
use shadowslice_control::process::{
    StartQueue, Users, held, kill_leftover_workers, may_raise_priority, reap_orphans,
};
use shadowslice_datapath::clock::Clock;
use shadowslice_shared::exit;
use tokio::runtime::Runtime;

use crate::serve::{Failed, NO_THREADS, unavailable};

/// A data-path thread takes from the queue that all threads share after so many tasks, even if its
/// own is not empty. Its own queue holds 256 tasks: with more active connections, those in the
/// shared queue would wait while the others get tens of answers each.
const SHARED_QUEUE_TURN: u32 = 2;

pub(crate) struct Ground {
    pub(crate) run_dir: RunDir,
    pub(crate) gpus: Gpus,
    pub(crate) runtime: Runtime,
    pub(crate) context: Context,
    /// Reads the GPUs for as long as it is there.
    pub(crate) watch: Watch,
}

impl Ground {
    /// Takes the run directory, with the `lock` of the supervisor that this one succeeds, if it does.
    /// `mps_handovers` are the MPS daemons of that supervisor.
    pub(crate) fn prepare(
        config: &Config,
        lock: Option<OwnedFd>,
        mps_handovers: Option<&[MpsHandover]>,
    ) -> Result<Self, Failed> {
        reap_orphans();
        let unfit = |error: HostError| unavailable("cannot serve on this host", &error);
        let library = host::onnxruntime_library(config).map_err(unfit)?;
        let mut programs = host::programs().map_err(unfit)?;
        // A package that is upgraded replaces it, by one that may not understand this supervisor.
        programs.worker = held(&programs.worker)
            .map_err(|error| unavailable("cannot read the worker's program", &error))?;
        let run_dir = RunDir::take(&config.run_dir, lock).map_err(|error| unfit(error.into()))?;
        if mps_handovers.is_none() {
            kill_leftover_workers(&run_dir.private().join("workers"));
        }
        host::raise_file_limit();
        let users = config.workers.users.clone().map(|users| Arc::new(Users::new(users)));
        if users.is_some() && !nix::unistd::geteuid().is_root() {
            let why = "workers.users: only root can run workers as other users; run the supervisor as root"
                .to_owned();
            return Err(Failed { why, code: exit::CONFIG });
        }
        let place = match &users {
            Some(_) => run_dir.passable().map_err(|error| unfit(error.into()))?,
            None => run_dir.private(),
        };
        let mps_handovers = mps_handovers.unwrap_or_default();
        let gpus = host::gpus(&config.gpus, &place, &programs.worker, users.is_some(), mps_handovers)
            .map_err(unfit)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(host::data_path_threads())
            .thread_name("data-path")
            .global_queue_interval(SHARED_QUEUE_TURN)
            .enable_all()
            .build()
            .map_err(|error| unavailable(NO_THREADS, &error))?;
        // Requests and answers pass through this process.
        if let Err(error) = nix::sys::prctl::set_dumpable(false) {
            tracing::warn!(
                %error,
                "cannot protect the supervisor's memory; other processes of this user can read requests and responses in it"
            );
        }
        let watch = Watch::start(&config.gpus);
        let memory = || Arc::new(MemoryLedger::new(config.controller.standby_memory));
        let context = Context {
            programs,
            library,
            engines: place.join("tensorrt"),
            register: run_dir.private().join("workers"),
            users,
            variables: config.workers.environment.clone(),
            worker_memory: config.workers.memory,
            timeouts: config.timeouts,
            response_bytes: config.limits.response_bytes,
            clock: Clock::start(),
            data_path: runtime.handle().clone(),
            lower_shadows: may_raise_priority(),
            gpus: gpus.clone(),
            readings: watch.readings(),
            memory: gpus.iter().map(|_| memory()).collect(),
            groups: gpus.iter().map(|gpu| Arc::new(GroupLedger::new(groups_of(&**gpu)))).collect(),
            policy_acts: config.controller.acting_policy().is_some(),
            starts: StartQueue::of_host(),
        };
        Ok(Self { run_dir, gpus, runtime, context, watch })
    }
}

/// Zero where the GPU does not divide.
fn groups_of(gpu: &dyn GpuBackend) -> usize {
    gpu.division().map_or(0, |division| division.count())
}
