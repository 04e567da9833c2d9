//! The cost of a request, counted rather than timed: system calls, context switches, page faults,
//! instructions, allocations and copies per request, for one or several builds side by side.

mod callgrind;
pub(crate) mod context_switches;
mod kernel_counts;
mod page;
mod profile;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use crate::closed_loop::send;
use crate::plan::{EchoProtocol, EchoSetting, LARGE, SMALL, ServerKind, Transport};
use crate::system::{Build, RunningSupervisor, home};
use crate::{MeasureError, chain, finish};

use callgrind::CallgrindProfile;
use context_switches::ContextSwitches;
use kernel_counts::{KernelCounts, PerfStat};

/// Requests before anything is counted.
const WARM_UP: u64 = 500;

/// A large request takes about so many times as long as a small one.
const LARGE_RATIO: u64 = 10;

/// Under Callgrind requests take about so many times as long.
const PROFILED_RATIO: u64 = 5;

/// Counts what an echo request costs, and writes a page.
///
/// System calls, wake-ups and page faults come from `perf stat`, context switches from `/proc`,
/// instructions, allocations and copies from Valgrind's Callgrind. What is not installed is said,
/// and left out.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-cost-profile")]
struct Options {
    /// Binaries to count, and what the page calls them, such as `before=target/before`; once for
    /// each build [default: those beside this program]
    #[arg(long, value_name = "NAME=DIR")]
    binaries: Vec<Build>,
    /// Small requests of one count; of large ones a tenth, and of those profiled a fifth
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(100..=10_000_000))]
    requests: u64,
    /// Only the settings that have this text in their names, such as `http unix 64 B`
    #[arg(long, default_value = "")]
    only: String,
    /// Leaves Callgrind out, which takes most of the time
    #[arg(long)]
    no_profile: bool,
    /// Where the page goes; without it the tables are only shown
    #[arg(long)]
    page: Option<PathBuf>,
}

/// Something of each of the two processes.
#[derive(Debug, Clone, Default)]
pub(crate) struct PerProcess<T> {
    pub(crate) supervisor: T,
    pub(crate) worker: T,
}

/// Which tools there are not, and why.
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
    /// Of the supervisor, with the number of requests that were profiled.
    profile: Option<(u64, CallgrindProfile)>,
}

/// The whole program, as its command line says.
pub fn cost_profile() -> ExitCode {
    let options = Options::parse();
    finish(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            tokio::select! {
                counted = run(&options) => counted,
                _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
            }
        })
    })
}

async fn run(options: &Options) -> Result<(), MeasureError> {
    let own = || -> Result<Build, MeasureError> {
        let program = std::env::current_exe()?;
        let folder = program.parent().ok_or("this program has no folder")?;
        Ok(Build { name: "this build".into(), folder: folder.to_owned() })
    };
    let builds = if options.binaries.is_empty() { vec![own()?] } else { options.binaries.clone() };
    let skipped = options.no_profile.then(|| "it was left out by `--no-profile`".to_owned());
    let missing =
        MissingTools { calls: kernel_counts::missing().await, profile: skipped.or(profile::missing().await) };
    for reason in [&missing.calls, &missing.profile].into_iter().flatten() {
        eprintln!("note: some columns are left out: {reason}");
    }
    let settings: Vec<EchoSetting> =
        settings().into_iter().filter(|setting| setting.to_string().contains(&options.only)).collect();
    let mut counts = Vec::new();
    for setting in &settings {
        for build in &builds {
            eprintln!("{setting}: {}", build.name);
            let counted = count(build, setting, options.requests, &missing).await;
            counts.push(counted.map_err(|error| format!("{setting}, {}: {}", build.name, chain(&*error)))?);
        }
    }
    if counts.is_empty() {
        return Err(format!("no setting's name holds {:?}", options.only).into());
    }
    println!("{}", page::tables(&counts));
    if let Some(path) = &options.page {
        fs::write(path, page::of(&counts, &missing))
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        println!("the page: {}", path.display());
    }
    Ok(())
}

/// Both protocols, both sizes, few and many connections.
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

/// Counts what can be counted at full speed. Clients connect and warm up before.
async fn native(
    folder: &Path,
    setting: &EchoSetting,
    requests: u64,
    with_calls: bool,
) -> Result<(PerProcess<ContextSwitches>, Option<PerProcess<KernelCounts>>), MeasureError> {
    let system = RunningSupervisor::start(home(folder, &[setting.bytes], setting.connections)?).await?;
    let worker = *system.workers().first().ok_or("there is no worker")?;
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
