//! The demo, which serves three models on an emulated GPU. It changes their shares repeatedly under
//! load, and checks every answer.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the demo writes to the user's terminal")]

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
use shadowslice_tests::server::ServerUnderTest;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::report::DemoReport;
use crate::resizes::Resizes;
use crate::workload::Workload;

const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

/// Serves three models on an emulated GPU, changes the share of each under load, and checks every
/// answer.
///
/// The exit code is 0 only if no request was lost, refused or answered wrongly, every resize
/// completed, and the stopped server left no processes or files behind.
#[derive(Debug, Parser)]
struct Arguments {
    /// The duration of the load, in seconds.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(5..=86_400))]
    seconds: u64,
}

#[tokio::main]
async fn main() -> ExitCode {
    let Arguments { seconds } = Arguments::parse();
    let result = tokio::select! {
        result = run(Duration::from_secs(seconds)) => result,
        _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
    };
    match result {
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

/// Runs the complete demo. Returns true if the demo passed.
async fn run(span: Duration) -> Result<bool, Box<dyn Error>> {
    let workloads = workload::all()?;
    let mut server = ServerUnderTest::start(Home::new()?, Some(&config()))?;
    println!("starting the supervisor with {} models, each in its own worker process ...", workloads.len());
    server.wait_ready().await?;
    println!(
        "ready; sending {} s of load from independent clients, and resizing each model repeatedly",
        span.as_secs()
    );
    println!("to watch, run: SHADOWSLICE_RUN_DIR={} shadowslice status", server.home().run_dir().display());

    let resizes = under_load(&server, &workloads, span).await;
    let report = DemoReport { workloads: &workloads, resizes: &resizes };
    let (status, log) = (server.status().await?, server.log());
    println!("\nstopping the supervisor ...");
    let stopped = server.stop().await;
    report.table(&status);
    let mut passed = report.verdict(&status);
    match stopped {
        Ok(()) => println!("the supervisor stopped and left no process, socket or file behind"),
        Err(error) => {
            println!("FAILED: the supervisor did not stop properly: {}", chain(&error));
            passed = false;
        }
    }
    if !passed {
        println!("the end of the supervisor's log:\n{log}");
    }
    Ok(passed)
}

/// Sends load to all models, and resizes the models under this load. Returns the resizes of each
/// model, in the order of the models.
async fn under_load(server: &ServerUnderTest, workloads: &[Workload], span: Duration) -> Vec<Resizes> {
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
    let mut tick = interval_at(start + PROGRESS_INTERVAL, PROGRESS_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tick.tick().await;
        report::progress(start.elapsed(), workloads);
    }
}

fn config() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("configs").join("demo.yaml")
}
