//! The cost of a request, counted rather than timed: system calls, context switches, page faults,
//! instructions, allocations and copies per request, for one or several builds side by side.

mod callgrind;
mod calls;
mod page;
mod profiled;
pub(crate) mod switches;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use crate::closed_loop::send;
use crate::plan::{LARGE, Protocol, SMALL, Server, Setting, Transport};
use crate::system::{Binaries, System, home};
use crate::{Failure, chain, finish};

use callgrind::Profile;
use calls::{Calls, Counting};
use switches::Switches;

/// Requests before anything is counted.
const WARM_UP: u64 = 500;

/// A large request takes about so many times as long as a small one.
const LARGE_RATIO: u64 = 10;

/// Under Callgrind requests take about so many times as long.
const PROFILED_RATIO: u64 = 5;

/// Counts what an echo request costs, and writes a page.
///
/// System calls, wake-ups and page faults come from `perf stat`, context switches from `/proc`,
/// instructions, allocations and copies from Valgrind's Callgrind. A tool that is not installed is
/// reported and skipped.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-costs")]
struct Options {
    /// The folder of the binaries to measure, with their name on the page, such as
    /// `before=target/before`; repeat this option for each build [default: the folder of this
    /// program]
    #[arg(long, value_name = "NAME=DIR")]
    binaries: Vec<Binaries>,
    /// The number of small requests in a measurement; a tenth of it for large requests, a fifth for
    /// profiled ones
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(100..=10_000_000))]
    requests: u64,
    /// Measure only the settings whose names contain this text, such as `http unix 64 B`
    #[arg(long, default_value = "")]
    only: String,
    /// Skip Callgrind, which takes most of the time
    #[arg(long)]
    no_profile: bool,
    /// The file for the page [default: only print the tables]
    #[arg(long)]
    page: Option<PathBuf>,
}

/// Something of each of the two processes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Parts<T> {
    pub(crate) supervisor: T,
    pub(crate) worker: T,
}

/// Which tools there are not, and why.
#[derive(Debug, Default)]
struct Missing {
    calls: Option<String>,
    profile: Option<String>,
}

/// The counts of one setting of one build.
struct Count {
    build: String,
    setting: Setting,
    requests: u64,
    switches: Parts<Switches>,
    calls: Option<Parts<Calls>>,
    /// Of the supervisor, with the number of requests that were profiled.
    profile: Option<(u64, Profile)>,
}

/// The whole program, as its command line says.
pub fn costs() -> ExitCode {
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

async fn run(options: &Options) -> Result<(), Failure> {
    let own = || -> Result<Binaries, Failure> {
        let program = std::env::current_exe()?;
        let folder = program.parent().ok_or("this program has no folder")?;
        Ok(Binaries { name: "this build".into(), folder: folder.to_owned() })
    };
    let builds = if options.binaries.is_empty() { vec![own()?] } else { options.binaries.clone() };
    let skipped = options.no_profile.then(|| "it was left out by `--no-profile`".to_owned());
    let missing = Missing { calls: calls::missing().await, profile: skipped.or(profiled::missing().await) };
    for reason in [&missing.calls, &missing.profile].into_iter().flatten() {
        eprintln!("note: some columns are left out: {reason}");
    }
    let settings: Vec<Setting> =
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
fn settings() -> Vec<Setting> {
    let kinds = [(SMALL, 1), (SMALL, 8), (SMALL, 128), (LARGE, 1), (LARGE, 8)];
    let of = |protocol, (bytes, connections)| Setting {
        server: Server::Shadowslice,
        protocol,
        transport: Transport::Unix,
        bytes,
        connections,
    };
    [Protocol::Http, Protocol::Grpc]
        .into_iter()
        .flat_map(|protocol| kinds.map(|kind| of(protocol, kind)))
        .collect()
}

async fn count(build: &Binaries, setting: &Setting, small: u64, missing: &Missing) -> Result<Count, Failure> {
    let requests = if setting.bytes == SMALL { small } else { small / LARGE_RATIO };
    let (switches, calls) = native(&build.folder, setting, requests, missing.calls.is_none()).await?;
    let profile = match missing.profile {
        Some(_) => None,
        None => {
            let requests = requests / PROFILED_RATIO;
            Some((requests, profiled::profile(&build.folder, setting, requests).await?))
        }
    };
    Ok(Count { build: build.name.clone(), setting: *setting, requests, switches, calls, profile })
}

/// Counts what can be counted at full speed. Clients connect and warm up before.
async fn native(
    folder: &Path,
    setting: &Setting,
    requests: u64,
    with_calls: bool,
) -> Result<(Parts<Switches>, Option<Parts<Calls>>), Failure> {
    let system = System::start(home(folder, &[setting.bytes], setting.connections)?).await?;
    let worker = *system.workers().first().ok_or("there is no worker")?;
    let supervisor = system.supervisor();
    let mut clients = send(system.clients(setting).await?, WARM_UP).await?;
    let switches = || Parts { supervisor: Switches::of(&[supervisor]), worker: Switches::of(&[worker]) };
    let before = switches();
    clients = send(clients, requests).await?;
    let after = switches();
    let mut calls = None;
    if with_calls {
        let counting =
            [supervisor, worker].map(|pid| Counting::begin(pid, system.folder().join(format!("perf.{pid}"))));
        let [of_supervisor, of_worker] = counting;
        let (of_supervisor, of_worker) = (of_supervisor.await?, of_worker.await?);
        clients = send(clients, requests).await?;
        calls = Some(Parts { supervisor: of_supervisor.end().await?, worker: of_worker.end().await? });
    }
    drop(clients);
    system.stop().await?;
    let switches =
        Parts { supervisor: after.supervisor - before.supervisor, worker: after.worker - before.worker };
    Ok((switches, calls))
}
