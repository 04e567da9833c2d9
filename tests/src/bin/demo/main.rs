//! The demo: three models on an emulated GPU, resized again and again while they serve, with every
//! answer checked.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a demo writes to its user's terminal")]

mod report;
mod resizes;
mod workload;

use std::convert::Infallible;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use futures_util::future::join_all;
use shadowslice_tests::home::Home;
use shadowslice_tests::server::Server;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::report::Report;
use crate::resizes::Resizes;
use crate::workload::Workload;

/// How often progress is shown.
const PROGRESS_EVERY: Duration = Duration::from_secs(2);

/// Serves three models on an emulated GPU, resizes each of them under load, and checks every answer.
///
/// The exit code is 0 only if no request was lost, refused or answered wrongly, every resize completed,
/// and the stopped server left nothing behind.
#[derive(Debug, Parser)]
struct Arguments {
    /// The length of the load, in seconds.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(5..=86_400))]
    seconds: u64,
}

#[tokio::main]
async fn main() -> ExitCode {
    let Arguments { seconds } = Arguments::parse();
    let shown = tokio::select! {
        shown = show(Duration::from_secs(seconds)) => shown,
        _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
    };
    match shown {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// Runs the whole demo; says whether all went well.
async fn show(span: Duration) -> Result<bool, Box<dyn Error>> {
    let workloads = workload::all()?;
    let mut server = Server::start(Home::new()?, Some(&config()))?;
    println!("starting the server with {} models, one process each ...", workloads.len());
    server.wait_ready().await?;
    println!(
        "ready; {} s of load from independent clients, each model resized again and again",
        span.as_secs()
    );
    println!("by hand: SHADOWSLICE_RUN_DIR={} shadowslice status", server.home().run_dir().display());

    let resizes = under_load(&server, &workloads, span).await;
    let report = Report { workloads: &workloads, resizes: &resizes };
    let (status, log) = (server.status().await?, server.log());
    println!("\nstopping the server ...");
    let stopped = server.stop().await;
    report.table(&status);
    let mut well = report.verdict(&status);
    match stopped {
        Ok(()) => println!("the server stopped; no process, socket or file of it is left"),
        Err(error) => {
            println!("FAILED: the server did not stop as it should: {}", chain(&error));
            well = false;
        }
    }
    if !well {
        println!("the end of the server's log:\n{log}");
    }
    Ok(well)
}

/// Loads all models and resizes them meanwhile; returns the resizes by model, in the same order.
async fn under_load(server: &Server, workloads: &[Workload], span: Duration) -> Vec<Resizes> {
    let start = Instant::now();
    let loads = (1..).zip(workloads).map(|(seed, workload)| workload.load(server, span, seed));
    let loads = join_all(loads);
    let resizing = resizes::all(server, workloads, start, span);
    tokio::select! {
        (resizes, _) = async { tokio::join!(resizing, loads) } => resizes,
        never = progress(start, workloads) => match never {},
    }
}

async fn progress(start: Instant, workloads: &[Workload]) -> Infallible {
    let mut tick = interval_at(start + PROGRESS_EVERY, PROGRESS_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tick.tick().await;
        report::progress(start.elapsed(), workloads);
    }
}

fn config() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("configs").join("demo.yaml")
}
