//! The command `shadowslice-simulate`, which runs policies in a simulated world with the models of a
//! configuration.

mod load;
mod policies;
mod scenario;
mod table;
#[cfg(test)]
mod tests;
mod trace;

use std::path::PathBuf;

use serde::Serialize;
use shadowslice_policy::sharing::PolicyInput;
use shadowslice_simulator::bound;
use shadowslice_simulator::loads::MAX_SECONDS;
use shadowslice_simulator::perturb::{self, Belief, Difference};
use shadowslice_simulator::results::{LoadInfo, SimulationRun};
use shadowslice_simulator::scenario::Scenario;
use shadowslice_simulator::world::{self, WorldSettings};

use shadowslice_config as config;

use load::{DrawnLoad, LoadError, LoadSource};
use policies::{NamedPolicy, NoSuchLayout, PolicyArgument};
use scenario::NotSimulated;
use shadowslice_config::{Config, ConfigError};
use shadowslice_shared::errors;
use shadowslice_shared::exit::{self, fail};
use trace::Trace;

/// Simulate how policies share the GPUs of a configuration.
///
/// The simulation needs only profiles. It needs no GPUs and no model files. It runs the same policy
/// code as the supervisor.
#[derive(Debug, clap::Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct SimulateOptions {
    /// The configuration, with emulated GPUs and a profile for each model.
    config: PathBuf,
    /// The load: poisson, gamma, mmpp, diurnal, step, flash, anti, surge, zipf, or a .csv file with one
    /// arrival per line in the form `seconds,model`. Several loads run one after the other.
    #[arg(long, required = true, num_args = 1.., value_name = "LOAD")]
    load: Vec<LoadSource>,
    /// The policy: adaptive, unpartitioned, static, equal, half, priority-half, gslice, gpulet. The suffix
    /// `+admission` adds admission control, which refuses requests that cannot be answered in time. With
    /// adaptive, long batches wait between two pieces for other models' batches that would be late; under
    /// `adaptive+no-preemption` they do not. `layouts` runs each layout that adaptive may try for the whole run;
    /// `layout:halves` runs one of them.
    #[arg(long, num_args = 1.., value_name = "POLICY", default_value = "adaptive")]
    policy: Vec<PolicyArgument>,
    /// The seed of all random numbers.
    #[arg(long, num_args = 1.., value_name = "SEED", default_value = "1")]
    seed: Vec<u64>,
    /// The duration of named loads, and the length to use of loads from files, in seconds [default: 120 s for
    /// named loads, all of a file].
    #[arg(long, value_parser = seconds, allow_negative_numbers = true)]
    seconds: Option<f64>,
    /// The mean fraction of each GPU that a named load uses if each request has its minimum cost.
    #[arg(long, value_parser = utilisation, allow_negative_numbers = true, default_value = "0.7")]
    utilisation: f64,
    /// The differences between the world and the profiles: a comma-separated list of form, scale, noise,
    /// starts, proportional, slices.
    #[arg(long, value_name = "DIFFERENCES", default_value = "profile")]
    truth: Difference,
    /// The profiles that the policy gets: profile, truth, none, or a comma-separated list of form, scale,
    /// starts.
    #[arg(long, value_name = "BELIEF", default_value = "profile")]
    belief: Belief,
    /// Do not model contention for memory bandwidth. Emulated GPUs do not model it either.
    #[arg(long)]
    no_interference: bool,
    /// Write the arrivals to this file, in the format of --load. Works with one load and one seed.
    #[arg(long, value_name = "FILE.csv", value_parser = csv)]
    write_arrivals: Option<PathBuf>,
    /// Print a line to standard error whenever a decision of the policy changes.
    #[arg(long)]
    trace: bool,
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, thiserror::Error)]
enum SimulateError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Scenario(#[from] NotSimulated),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Layout(#[from] NoSuchLayout),
}

impl SimulateError {
    fn code(&self) -> u8 {
        match self {
            Self::Config(_) | Self::Scenario(_) => exit::CONFIG,
            Self::Load(LoadError::Read { .. } | LoadError::Write { .. }) => exit::UNAVAILABLE,
            Self::Load(_) | Self::Layout(_) => exit::USAGE,
        }
    }
}

#[derive(Debug, Serialize)]
struct SimulationReport {
    runs: Vec<SimulationRun>,
}

/// Runs the command, and returns its exit code.
pub(crate) fn run(options: &SimulateOptions) -> u8 {
    match simulate(options) {
        Ok(report) => show(&report, options.json),
        Err(fault) => fail(&errors::chain(&fault), fault.code()),
    }
}

fn simulate(options: &SimulateOptions) -> Result<SimulationReport, SimulateError> {
    if options.write_arrivals.is_some() && options.load.len() * options.seed.len() > 1 {
        return Err(LoadError::Several.into());
    }
    let config = config::load_here(&options.config)?;
    let profiled = scenario::of(&config)?;
    let mut runs = Vec::new();
    for source in &options.load {
        for &seed in &options.seed {
            let scenario = perturb::apply(&profiled, options.truth, options.belief, seed);
            let load = source.draw(&scenario, seed, options.seconds, options.utilisation)?;
            if let Some(path) = &options.write_arrivals {
                load.write(path, &scenario)?;
            }
            let (seconds, settings) = (load.seconds, settings(options, &config, seed));
            let bound_rps = bound::fluid(&scenario, &load.arrivals, seconds);
            let trial = LoadInfo { load: source.to_string(), seed, seconds, bound_rps };
            for argument in &options.policy {
                let policies = argument.policies(&scenario, &load.arrivals, seconds)?;
                let run = |policy| run_policy(policy, &scenario, &settings, &trial, &load, options.trace);
                runs.extend(policies.into_iter().map(run));
            }
        }
    }
    Ok(SimulationReport { runs })
}

fn settings(options: &SimulateOptions, config: &Config, seed: u64) -> WorldSettings {
    WorldSettings {
        interval: config.controller.interval,
        dwell: config.timeouts.dwell,
        interference: !options.no_interference,
        sharing: options.truth.sharing(),
        pause: config.controller.preempt,
        noise: options.truth.noise(),
        seed,
    }
}

fn run_policy(
    policy: NamedPolicy,
    scenario: &Scenario,
    settings: &WorldSettings,
    trial: &LoadInfo,
    load: &DrawnLoad,
    traced: bool,
) -> SimulationRun {
    let NamedPolicy { name, pauses, mut policy } = policy;
    let settings = WorldSettings { pause: settings.pause && pauses, ..*settings };
    let mut started = scenario.clone();
    for (model, initial) in started.models.iter_mut().zip(policy.initial()) {
        model.terms.initial = initial;
    }
    let names: Vec<String> = scenario.models.iter().map(|model| model.terms.name.clone()).collect();
    let mut trace = traced.then(Trace::default);
    let mut decide = |facts: &PolicyInput| {
        let decision = policy.decide(facts);
        let lines = trace.as_mut().map(|trace| trace.lines(facts, &decision, &names));
        lines.into_iter().flatten().for_each(|line| exit::print_error(&line));
        decision
    };
    let outcome = world::run(&started, &settings, load.arrivals.iter().copied(), &mut decide);
    SimulationRun::new(&name, trial, scenario, &outcome)
}

fn show(report: &SimulationReport, json: bool) -> u8 {
    if json {
        let json = serde_json::to_string(report).expect("numbers and text are always JSON");
        exit::print(&format!("{json}\n"))
    } else {
        exit::print(&table::of(&report.runs))
    }
}

fn csv(text: &str) -> Result<PathBuf, String> {
    let named = text.ends_with(".csv").then(|| PathBuf::from(text));
    named.ok_or_else(|| "give a file that ends in .csv, because --load accepts no other files".to_owned())
}

fn seconds(text: &str) -> Result<f64, String> {
    let invalid = || format!("give a number of seconds above 0, at most {MAX_SECONDS}");
    let seconds: f64 = text.parse().map_err(|_| invalid())?;
    if seconds > 0.0 && seconds <= MAX_SECONDS { Ok(seconds) } else { Err(invalid()) }
}

fn utilisation(text: &str) -> Result<f64, String> {
    let invalid = || "give a fraction of the GPU from 0 to 100, for example 0.7".to_owned();
    let utilisation: f64 = text.parse().map_err(|_| invalid())?;
    if (0.0..=100.0).contains(&utilisation) { Ok(utilisation) } else { Err(invalid()) }
}
