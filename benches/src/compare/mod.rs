//! The comparison of the data paths of two builds. The builds take turns, with one round each. The
//! results are ratios of CPU time per request, throughput and median latency.

mod page;

use std::path::PathBuf;
use std::time::Duration;

use shadowslice_shared::errors;

use crate::MeasureError;
use crate::closed_loop::RoundResult;
use crate::plan::{EchoProtocol, EchoSetting, LARGE, SMALL, ServerKind, Transport, matching};
use crate::system::{Build, RunningSupervisor, over_tcp};

/// Measure echo requests through two builds alternately, and write a page with their ratios. With
/// the default options this takes about two minutes.
///
/// Both builds run all the time, each with its own sockets, but only one of them gets requests at a
/// time. A ratio is the median over pairs of successive rounds. A slower build is not a failure,
/// because the ratios depend on the machine.
#[derive(Debug, clap::Args)]
pub(crate) struct CompareOptions {
    /// The baseline's name on the page and its folder, for example `0.1.0=target/baseline`
    #[arg(long, value_name = "NAME=DIR")]
    before: Build,
    /// The name and the folder of the build to compare with the baseline
    #[arg(long, value_name = "NAME=DIR")]
    after: Build,
    /// The length of a round, in seconds
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// The number of pairs of rounds of each setting
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Measure only settings whose names contain this text, for example `http tcp 64 B`
    #[arg(long, default_value = "")]
    only: String,
    /// The file to write the page to. Without it, the program only prints the table
    #[arg(long)]
    page: Option<PathBuf>,
}

/// A setting with its pairs of rounds. Each pair has one round of each build.
struct ComparedSetting {
    setting: EchoSetting,
    pairs: Vec<[RoundResult; 2]>,
}

pub(crate) async fn run(options: &CompareOptions) -> Result<(), MeasureError> {
    let settings = matching(settings(), &options.only)?;
    let most = settings.iter().map(|setting| setting.connections).max().unwrap_or_default();
    let span = Duration::try_from_secs_f64(options.seconds)?;
    let mut systems = Vec::new();
    for build in [&options.before, &options.after] {
        let (home, addresses) = over_tcp(&build.folder, &[SMALL, LARGE], most)?;
        let started = RunningSupervisor::start_on(home, addresses).await;
        systems.push(started.map_err(|error| format!("{}: {}", build.name, errors::chain(&*error)))?);
    }
    let mut rows: Vec<ComparedSetting> =
        settings.into_iter().map(|setting| ComparedSetting { setting, pairs: Vec::new() }).collect();
    for number in 0..options.rounds {
        eprintln!("round {} of {}", number + 1, options.rounds);
        for row in &mut rows {
            row.pairs.push(pair(&systems, &row.setting, span, number % 2 == 1).await?);
        }
    }
    for system in systems {
        system.stop().await?;
    }
    page::report(&rows, options).publish(options.page.as_deref())
}

/// Returns the settings: some common loads, and one load for each kind of cost.
fn settings() -> Vec<EchoSetting> {
    let setting = |protocol, bytes, connections| EchoSetting {
        server: ServerKind::Shadowslice,
        protocol,
        transport: Transport::Tcp,
        bytes,
        connections,
    };
    [
        setting(EchoProtocol::Http, SMALL, 1),
        setting(EchoProtocol::Http, SMALL, 128),
        setting(EchoProtocol::Http, LARGE, 8),
        setting(EchoProtocol::Grpc, SMALL, 1),
        setting(EchoProtocol::Grpc, SMALL, 32),
    ]
    .into()
}

/// Measures one round of each build. If `reversed` is true, the second build runs first.
async fn pair(
    systems: &[RunningSupervisor],
    setting: &EchoSetting,
    span: Duration,
    reversed: bool,
) -> Result<[RoundResult; 2], MeasureError> {
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
