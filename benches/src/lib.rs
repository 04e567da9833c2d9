//! Benchmarks of shadowslice. [`bench()`] has a subcommand for each benchmark that writes a page.
//! [`echo()`] measures requests per second, latency and CPU time of echo requests for each protocol
//! with several numbers of connections, and compares these figures with those of a bare echo server.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark writes to its user's terminal")]

mod bare;
mod closed_loop;
mod compare;
mod cost_profile;
mod echo;
mod exchange;
mod grpc;
mod http;
mod machine;
mod plan;
mod policy_eval;
mod report;
mod scaling;
mod servers;
mod sim_vs_real;
mod spread;
mod system;
mod vs_triton;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use shadowslice_shared::errors;
use tokio::signal::unix::{SignalKind, signal};

use crate::compare::CompareOptions;
use crate::cost_profile::CostProfileOptions;
use crate::policy_eval::EvaluationOptions;
use crate::scaling::ScalingOptions;
use crate::sim_vs_real::SimVsRealOptions;
use crate::vs_triton::VsTritonOptions;

pub use crate::echo::echo;

/// An error that ends a benchmark.
type MeasureError = Box<dyn Error + Send + Sync>;

/// Run a benchmark, and write a page with its results.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-bench")]
struct BenchArguments {
    #[command(subcommand)]
    benchmark: Benchmark,
}

/// The benchmarks that write a page.
#[derive(Debug, Subcommand)]
enum Benchmark {
    Compare(CompareOptions),
    CostProfile(CostProfileOptions),
    PolicyEval(EvaluationOptions),
    Scaling(ScalingOptions),
    SimVsReal(SimVsRealOptions),
    VsTriton(VsTritonOptions),
}

/// Runs the benchmark of the command line.
pub fn bench() -> ExitCode {
    finish(match BenchArguments::parse().benchmark {
        Benchmark::Compare(options) => until_interrupted(compare::run(&options)),
        Benchmark::CostProfile(options) => until_interrupted(cost_profile::run(&options)),
        Benchmark::PolicyEval(options) => policy_eval::run(&options),
        Benchmark::Scaling(options) => until_interrupted(scaling::run(&options)),
        Benchmark::SimVsReal(options) => sim_vs_real::run(&options),
        Benchmark::VsTriton(options) => vs_triton::run(&options),
    })
}

/// Returns the exit status of a program. If the program failed, prints its error.
fn finish(ended: Result<(), MeasureError>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", errors::chain(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Runs a measurement on this thread, which sends the complete load. A signal drops the future, and
/// the drop stops its servers.
fn until_interrupted<T>(measured: impl Future<Output = Result<T, MeasureError>>) -> Result<T, MeasureError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut terminated = signal(SignalKind::terminate())?;
        tokio::select! {
            measured = measured => measured,
            _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
            _ = terminated.recv() => Err("terminated".into()),
        }
    })
}
