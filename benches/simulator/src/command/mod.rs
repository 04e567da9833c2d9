//! The command: runs policies in a simulated world of a configuration's models.

mod contender;
mod load;
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
use shadowslice_simulator::results::{Run, Trial};
use shadowslice_simulator::scenario::Scenario;
use shadowslice_simulator::world::{self, Settings};

use shadowslice_config as config;

use contender::{Contender, Entrant, NoSuchLayout};
use load::{BadLoad, Load, Source};
use scenario::NotSimulated;
use shadowslice_config::{Config, ConfigError};
use shadowslice_shared::errors;
use shadowslice_shared::exit::{self, fail};
use trace::Trace;

/// Simulate how policies would share the GPUs of a configuration.
///
/// The simulation needs profiles, but no GPUs and no model files. The policies run the same code as
/// in the supervisor.
#[derive(Debug, clap::Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct Options {
    /// The configuration, with emulated GPUs and a profile for every model.
    config: PathBuf,
    /// The load: poisson, gamma, mmpp, diurnal, step, flash, anti, surge, zipf, or a .csv file with
    /// one arrival per line as `seconds,model`. Several loads run one after the other.
    #[arg(long, required = true, num_args = 1.., value_name = "LOAD")]
    load: Vec<Source>,
    /// The policy: adaptive, unpartitioned, static, equal, half, priority-half, gslice, gpulet.
    /// With the suffix `+admission`, requests that cannot be answered in time are refused. `layouts`
    /// runs each layout that adaptive can try, fixed for the whole run; `layout:halves` is one of
    /// them.
    #[arg(long, num_args = 1.., value_name = "POLICY", default_value = "adaptive")]
    policy: Vec<Contender>,
    /// The seed of all random numbers.
    #[arg(long, num_args = 1.., value_name = "SEED", default_value = "1")]
    seed: Vec<u64>,
    /// The length of named loads, and the used part of loads from files, in seconds [default: 120
    /// and all].
    #[arg(long, value_parser = seconds, allow_negative_numbers = true)]
    seconds: Option<f64>,
    /// The part of each GPU that a named load uses on average, if each request costs as little as
    /// possible.
    #[arg(long, value_parser = utilisation, allow_negative_numbers = true, default_value = "0.7")]
    utilisation: f64,
    /// The differences of the simulated world from the profiles: some of form, scale, noise,
    /// starts, proportional, slices, separated by commas.
    #[arg(long, value_name = "DIFFERENCES", default_value = "profile")]
    truth: Difference,
    /// The policy's knowledge: profile, truth, none, or some of form, scale, starts, separated by
    /// commas.
    #[arg(long, value_name = "BELIEF", default_value = "profile")]
    belief: Belief,
    /// Ignore that models slow each other down by their use of memory bandwidth, as emulated GPUs do.
    #[arg(long)]
    no_interference: bool,
    /// Also write the arrivals to this file, for --load, to replay them elsewhere. Works with one
    /// load and one seed.
    #[arg(long, value_name = "FILE.csv", value_parser = csv)]
    write_arrivals: Option<PathBuf>,
    /// Print the policy's decisions to standard error, one line for each change.
    #[arg(long)]
    trace: bool,
    /// Print JSON, for scripts.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Scenario(#[from] NotSimulated),
    #[error(transparent)]
    Load(#[from] BadLoad),
    #[error(transparent)]
    Layout(#[from] NoSuchLayout),
}

impl Fault {
    fn code(&self) -> u8 {
        match self {
            Self::Config(_) | Self::Scenario(_) => exit::CONFIG,
            Self::Load(BadLoad::Read { .. } | BadLoad::Write { .. }) => exit::UNAVAILABLE,
            Self::Load(_) | Self::Layout(_) => exit::USAGE,
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    runs: Vec<Run>,
}

/// Returns the exit code.
pub(crate) fn run(options: &Options) -> u8 {
    match simulate(options) {
        Ok(report) => show(&report, options.json),
        Err(fault) => fail(&errors::chain(&fault), fault.code()),
    }
}

fn simulate(options: &Options) -> Result<Report, Fault> {
    if options.write_arrivals.is_some() && options.load.len() * options.seed.len() > 1 {
        return Err(BadLoad::Several.into());
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
            let trial = Trial { load: source.to_string(), seed, seconds, bound_rps };
            for contender in &options.policy {
                let entrants = contender.entrants(&scenario, &load.arrivals, seconds)?;
                let run = |entrant| contend(entrant, &scenario, &settings, &trial, &load, options.trace);
                runs.extend(entrants.into_iter().map(run));
            }
        }
    }
    Ok(Report { runs })
}

fn settings(options: &Options, config: &Config, seed: u64) -> Settings {
    Settings {
        interval: config.controller.interval,
        dwell: config.timeouts.dwell,
        interference: !options.no_interference,
        sharing: options.truth.sharing(),
        noise: options.truth.noise(),
        seed,
    }
}

fn contend(
    entrant: Entrant,
    scenario: &Scenario,
    settings: &Settings,
    trial: &Trial,
    load: &Load,
    traced: bool,
) -> Run {
    let Entrant { name, mut policy } = entrant;
    let mut started = scenario.clone();
    for (served, initial) in started.models.iter_mut().zip(policy.initial()) {
        served.terms.initial = initial;
    }
    let names: Vec<String> = scenario.models.iter().map(|served| served.terms.name.clone()).collect();
    let mut trace = traced.then(Trace::default);
    let mut decide = |facts: &PolicyInput| {
        let decision = policy.decide(facts);
        let lines = trace.as_mut().map(|trace| trace.lines(facts, &decision, &names));
        lines.into_iter().flatten().for_each(|line| exit::say(&line));
        decision
    };
    let outcome = world::run(&started, settings, load.arrivals.iter().copied(), &mut decide);
    Run::new(&name, trial, scenario, &outcome)
}

fn show(report: &Report, json: bool) -> u8 {
    if json {
        let json = serde_json::to_string(report).expect("numbers and text are always JSON");
        exit::print(&format!("{json}\n"))
    } else {
        exit::print(&table::of(&report.runs))
    }
}

fn csv(text: &str) -> Result<PathBuf, String> {
    let named = text.ends_with(".csv").then(|| PathBuf::from(text));
    named.ok_or_else(|| "give a file that ends in .csv, or --load will not take it".to_owned())
}

fn seconds(text: &str) -> Result<f64, String> {
    let wrong = || format!("give a number of seconds above 0, at most {MAX_SECONDS}");
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    if seconds > 0.0 && seconds <= MAX_SECONDS { Ok(seconds) } else { Err(wrong()) }
}

fn utilisation(text: &str) -> Result<f64, String> {
    let wrong = || "give a part of the GPU from 0 to 100, such as 0.7".to_owned();
    let utilisation: f64 = text.parse().map_err(|_| wrong())?;
    if (0.0..=100.0).contains(&utilisation) { Ok(utilisation) } else { Err(wrong()) }
}
