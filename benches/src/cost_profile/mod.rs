//! The cost of a request as counts instead of times, for one or more builds. The counts are system
//! calls, context switches, page faults, instructions, allocations and copies per request.

mod callgrind;
pub(crate) mod context_switches;
mod kernel_counts;
mod page;
mod profile;

use std::path::{Path, PathBuf};

use shadowslice_shared::errors;

use crate::MeasureError;
use crate::closed_loop::send;
use crate::plan::{EchoProtocol, EchoSetting, LARGE, SMALL, ServerKind, Transport, matching};
use crate::system::{Build, RunningSupervisor, home, own_folder};

use callgrind::CallgrindProfile;
use context_switches::ContextSwitches;
use kernel_counts::{KernelCounts, PerfStat};

/// The number of requests that are sent before the count begins.
const WARM_UP: u64 = 500;

/// The number of small requests for each large request. A large request takes about ten times as
/// long as a small request.
const LARGE_RATIO: u64 = 10;

/// The number of counted requests for each profiled request. Fewer requests are profiled, because
/// Callgrind slows them down.
const PROFILED_RATIO: u64 = 5;

/// Count the cost of an echo request, and write a page.
///
/// `perf stat` counts system calls, wake-ups and page faults. `/proc` reports context switches.
/// Valgrind's Callgrind counts instructions, allocations and copies. If a tool is missing, a note
/// says so and its columns are left out. With the default options this takes about four minutes on
/// two cores.
#[derive(Debug, clap::Args)]
pub(crate) struct CostProfileOptions {
    /// A build to measure: its name on the page and its folder, for example `before=target/before`. Repeat
    /// the option for each build [default: the folder of this program]
    #[arg(long, value_name = "NAME=DIR")]
    binaries: Vec<Build>,
    /// The number of small requests to count. A tenth of this number of large requests is counted,
    /// and a fifth is profiled
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(100..=10_000_000))]
    requests: u64,
    /// Measure only settings whose names contain this text, for example `http unix 64 B`
    #[arg(long, default_value = "")]
    only: String,
    /// Do not run Callgrind, which takes most of the time
    #[arg(long)]
    no_profile: bool,
    /// The file to write the page to. Without it, the program only prints the tables
    #[arg(long)]
    page: Option<PathBuf>,
}

/// One value for each of the two processes, supervisor and worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct PerProcess<T> {
    pub(crate) supervisor: T,
    pub(crate) worker: T,
}

/// The reason why each tool cannot be used, or `None` for a tool that can be used.
#[derive(Debug, Default)]
struct MissingTools {
    calls: Option<String>,
    profile: Option<String>,
}

/// The counts of one setting of one build.
struct SettingCounts {
    build: String,
    setting: EchoSetting,
    requests: u64,
    switches: PerProcess<ContextSwitches>,
    calls: Option<PerProcess<KernelCounts>>,
    /// The supervisor's profile, and the number of profiled requests.
    profile: Option<(u64, CallgrindProfile)>,
}

pub(crate) async fn run(options: &CostProfileOptions) -> Result<(), MeasureError> {
    let mut builds = options.binaries.clone();
    if builds.is_empty() {
        builds.push(Build { name: "this build".into(), folder: own_folder()? });
    }
    let skipped = options.no_profile.then(|| "`--no-profile` is set".to_owned());
    let missing =
        MissingTools { calls: kernel_counts::missing().await, profile: skipped.or(profile::missing().await) };
    for reason in [&missing.calls, &missing.profile].into_iter().flatten() {
        eprintln!("note: leaving out some columns, because {reason}");
    }
    let settings = matching(settings(), &options.only)?;
    let mut counts = Vec::new();
    for setting in &settings {
        for build in &builds {
            eprintln!("{setting}: {}", build.name);
            let counted = count(build, setting, options.requests, &missing).await;
            counts.push(
                counted.map_err(|error| format!("{setting}, {}: {}", build.name, errors::chain(&*error)))?,
            );
        }
    }
    page::report(&counts, &missing).publish(options.page.as_deref())
}

/// Returns the settings: each protocol and tensor size, with few and with many connections.
fn settings() -> Vec<EchoSetting> {
    let kinds = [(SMALL, 1), (SMALL, 8), (SMALL, 128), (LARGE, 1), (LARGE, 8)];
    let of = |protocol, (bytes, connections)| EchoSetting {
        server: ServerKind::Shadowslice,
        protocol,
        transport: Transport::Unix,
        bytes,
        connections,
    };
    [EchoProtocol::Http, EchoProtocol::Grpc]
        .into_iter()
        .flat_map(|protocol| kinds.map(|kind| of(protocol, kind)))
        .collect()
}

async fn count(
    build: &Build,
    setting: &EchoSetting,
    small: u64,
    missing: &MissingTools,
) -> Result<SettingCounts, MeasureError> {
    let requests = if setting.bytes == SMALL { small } else { small / LARGE_RATIO };
    let (switches, calls) = native(&build.folder, setting, requests, missing.calls.is_none()).await?;
    let profile = match missing.profile {
        Some(_) => None,
        None => {
            let requests = requests / PROFILED_RATIO;
            Some((requests, profile::profile(&build.folder, setting, requests).await?))
        }
    };
    Ok(SettingCounts { build: build.name.clone(), setting: *setting, requests, switches, calls, profile })
}

/// Counts context switches and system calls of a supervisor that runs at full speed. The count
/// begins after the clients have connected and warmed up.
async fn native(
    folder: &Path,
    setting: &EchoSetting,
    requests: u64,
    with_calls: bool,
) -> Result<(PerProcess<ContextSwitches>, Option<PerProcess<KernelCounts>>), MeasureError> {
    let system = RunningSupervisor::start(home(folder, &[setting.bytes], setting.connections)?).await?;
    let worker = *system.workers().first().ok_or("the supervisor has no worker")?;
    let supervisor = system.supervisor();
    let mut clients = send(system.clients(setting).await?, WARM_UP).await?;
    let switches = || PerProcess {
        supervisor: ContextSwitches::of(&[supervisor]),
        worker: ContextSwitches::of(&[worker]),
    };
    let before = switches();
    clients = send(clients, requests).await?;
    let after = switches();
    let mut calls = None;
    if with_calls {
        let counting =
            [supervisor, worker].map(|pid| PerfStat::begin(pid, system.folder().join(format!("perf.{pid}"))));
        let [of_supervisor, of_worker] = counting;
        let (of_supervisor, of_worker) = (of_supervisor.await?, of_worker.await?);
        clients = send(clients, requests).await?;
        calls = Some(PerProcess { supervisor: of_supervisor.end().await?, worker: of_worker.end().await? });
    }
    drop(clients);
    system.stop().await?;
    let switches =
        PerProcess { supervisor: after.supervisor - before.supervisor, worker: after.worker - before.worker };
    Ok((switches, calls))
}
