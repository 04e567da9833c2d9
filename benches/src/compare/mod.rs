//! Whether the data path has become slower: two builds side by side, in rounds that alternate, as
//! ratios of CPU time per request, throughput and median latency.

mod page;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::closed_loop::Round;
use crate::plan::{LARGE, Protocol, SMALL, Server, Setting, Transport};
use crate::system::{Binaries, System, over_tcp};
use crate::{Failure, chain, finish};

/// Measures echo requests through two builds in turn, and writes a page with their ratios.
///
/// Both builds run all the time, each with its own sockets; only one of them receives requests at a
/// time. A ratio is the median over pairs of consecutive rounds. The program does not fail if a
/// build is slower, as the ratios depend on the machine.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-compare")]
struct Options {
    /// The baseline build, with its name on the page, such as `0.1.0=target/baseline`
    #[arg(long, value_name = "NAME=DIR")]
    before: Binaries,
    /// The build to compare with the baseline, with its name on the page
    #[arg(long, value_name = "NAME=DIR")]
    after: Binaries,
    /// The length of a round, in seconds
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// The pairs of rounds for each setting
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Measure only the settings whose names contain this text, such as `http tcp 64 B`
    #[arg(long, default_value = "")]
    only: String,
    /// The file for the page [default: only print the table]
    #[arg(long)]
    page: Option<PathBuf>,
}

/// A setting, and a round of each build for each pair.
struct Row {
    setting: Setting,
    pairs: Vec<[Round; 2]>,
}

/// Runs the program, as its command line says.
pub fn compare() -> ExitCode {
    let options = Options::parse();
    finish(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            tokio::select! {
                compared = run(&options) => compared,
                _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
            }
        })
    })
}

async fn run(options: &Options) -> Result<(), Failure> {
    let settings: Vec<Setting> =
        settings().into_iter().filter(|setting| setting.to_string().contains(&options.only)).collect();
    let Some(most) = settings.iter().map(|setting| setting.connections).max() else {
        return Err(format!("no setting's name contains {:?}", options.only).into());
    };
    let span = Duration::try_from_secs_f64(options.seconds)?;
    let mut systems = Vec::new();
    for build in [&options.before, &options.after] {
        let (home, addresses) = over_tcp(&build.folder, &[SMALL, LARGE], most)?;
        let started = System::start_on(home, addresses).await;
        systems.push(started.map_err(|error| format!("{}: {}", build.name, chain(&*error)))?);
    }
    let mut rows: Vec<Row> = settings.into_iter().map(|setting| Row { setting, pairs: Vec::new() }).collect();
    for number in 0..options.rounds {
        eprintln!("round {} of {}", number + 1, options.rounds);
        for row in &mut rows {
            row.pairs.push(pair(&systems, &row.setting, span, number % 2 == 1).await?);
        }
    }
    for system in systems {
        system.stop().await?;
    }
    println!("{}", page::tables(&rows, options));
    if let Some(path) = &options.page {
        fs::write(path, page::of(&rows, options))
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        println!("the page: {}", path.display());
    }
    Ok(())
}

/// Returns the settings: what most clients do, and one for each kind of cost.
fn settings() -> Vec<Setting> {
    let of = |(protocol, bytes, connections)| Setting {
        server: Server::Shadowslice,
        protocol,
        transport: Transport::Tcp,
        bytes,
        connections,
    };
    [
        (Protocol::Http, SMALL, 1),
        (Protocol::Http, SMALL, 128),
        (Protocol::Http, LARGE, 8),
        (Protocol::Grpc, SMALL, 1),
        (Protocol::Grpc, SMALL, 32),
    ]
    .map(of)
    .into()
}

/// Measures a round of each build. Every other time the second build comes first.
async fn pair(
    systems: &[System],
    setting: &Setting,
    span: Duration,
    reversed: bool,
) -> Result<[Round; 2], Failure> {
    let order = if reversed { [1, 0] } else { [0, 1] };
    let mut rounds = [None; 2];
    for index in order {
        let system = &systems[index];
        let clients = system.clients(setting).await?;
        rounds[index] = Some(system.round(clients, span).await?);
    }
    let [Some(before), Some(after)] = rounds else { return Err("a build was not measured".into()) };
    Ok([before, after])
}
