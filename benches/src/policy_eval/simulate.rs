//! The simulations: calls of `shadowslice-simulate`, and their results.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde::Deserialize;
use shadowslice_simulator::results::SimulationRun;

use super::mixes::{MeasuredProfile, RandomMix, drawn, seven};
use super::profiles::{MixError, known};

/// The policy that the page compares with the other policies.
pub(crate) const EVALUATED: &str = "adaptive";

/// The evaluated policy without pauses.
pub(crate) const WITHOUT_PREEMPTION: &str = "adaptive+no-preemption";

/// The baseline: MPS without shares. In easy mixes, the evaluated policy must not be worse than
/// this.
pub(crate) const BASE: &str = "unpartitioned";

/// The policy that keeps the initial layout of the adaptive policy for the whole run.
pub(crate) const OPEN: &str = "unpartitioned+admission";

/// All policies on the page.
pub(crate) const POLICIES: [&str; 8] = [
    EVALUATED,
    WITHOUT_PREEMPTION,
    BASE,
    OPEN,
    "half+admission",
    "equal+admission",
    "priority-half+admission",
    "gpulet+admission",
];

/// The policy argument that runs every other layout of the adaptive policy, each for a whole run.
const LAYOUTS: &str = "layouts";
/// The prefix of a fixed layout's name in the results.
pub(crate) const LAYOUT: &str = "layout:";

/// The differences between the simulated world and the profiles. Policies know only the profiles,
/// so the times that they expect are wrong.
pub(crate) const WORLD: &str = "form,scale,noise,starts";

/// The name of a load with constant rates.
pub(crate) const STEADY: &str = "poisson";
/// The duration of the runs that show whether shares stop changing under a steady load, in seconds.
pub(crate) const STEADY_SECONDS: u32 = 90;

/// The mechanism with which a model changes its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShareMechanism {
    InProcess,
    Shadow,
}

impl ShareMechanism {
    /// Returns the value of `handover` in the configuration.
    pub(crate) fn config_value(self) -> &'static str {
        match self {
            Self::InProcess => "in-process",
            Self::Shadow => "shadow",
        }
    }
}

/// A mix and its runs, one for each policy.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MixRuns {
    pub(crate) mix: RandomMix,
    pub(crate) runs: Vec<SimulationRun>,
}

/// The options of the simulations.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Setup {
    /// The `shadowslice-simulate` binary
    #[arg(long, default_value = "target/release/shadowslice-simulate")]
    pub(crate) bin: PathBuf,
    /// The folder of the profiles from which models are drawn
    #[arg(long, default_value = "configs/profiles")]
    pub(crate) profiles: PathBuf,
    /// The first seed. The seeds are consecutive
    #[arg(long, default_value_t = 4001)]
    pub(crate) first_seed: u64,
    /// The number of mixes whose shares change in-process
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) mixes: u64,
    /// The number of mixes, counted from the first, to run again with hand-overs
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) shadows: u64,
    /// The number of mixes of seven models
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) sevens: u64,
    /// The duration of each run, in simulated seconds
    #[arg(long, default_value_t = 20)]
    pub(crate) seconds: u32,
    /// The folder to write the mixes to
    #[arg(long, default_value = "target/policy-evaluation")]
    pub(crate) runs: PathBuf,
}

/// An error of a simulation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SimulationError {
    #[error("cannot run {}; run `make build` to build it", path.display())]
    Start { path: PathBuf, source: io::Error },
    #[error("`{command}` failed ({status}); see its output above")]
    Failed { command: String, status: std::process::ExitStatus },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot draw mixes")]
    Mixes {
        #[from]
        source: MixError,
    },
    #[error("cannot parse the output of `{command}` as JSON")]
    Json { command: String, source: serde_json::Error },
}

#[derive(Debug, Deserialize)]
struct SimulationReport {
    runs: Vec<SimulationRun>,
}

impl Setup {
    /// Returns `count` mixes of 2 to 6 models, one for each seed.
    pub(crate) fn mixes(&self, count: u64) -> Result<Vec<RandomMix>, SimulationError> {
        let known = self.known()?;
        Ok((self.first_seed..).take(count as usize).map(|seed| drawn(&known, seed)).collect())
    }

    /// Returns mixes of seven models, one for each seed.
    pub(crate) fn sevens(&self) -> Result<Vec<RandomMix>, SimulationError> {
        let (known, seeds) = (self.known()?, self.first_seed..);
        let turns = seeds.take(self.sevens as usize).enumerate();
        Ok(turns.map(|(turn, seed)| seven(&known, seed, turn)).collect())
    }

    fn known(&self) -> Result<Vec<MeasuredProfile>, SimulationError> {
        fs::create_dir_all(&self.runs)
            .map_err(|source| SimulationError::Write { path: self.runs.clone(), source })?;
        Ok(known(&self.profiles, &self.runs.join("all.yaml"))?)
    }

    /// Runs these mixes under all policies and layouts. `name` is the prefix of the names of the
    /// mixes' files.
    pub(crate) fn trials(
        &self,
        mixes: &[RandomMix],
        mechanism: ShareMechanism,
        name: &str,
    ) -> Result<Vec<MixRuns>, SimulationError> {
        let policies: Vec<&str> = POLICIES.into_iter().chain([LAYOUTS]).collect();
        each(mixes, |mix| {
            let path = self.write(&mix.text(mechanism), name, mix.seed)?;
            let call = SimulateCall { config: &path, seconds: self.seconds, mix };
            Ok(MixRuns { runs: self.simulate(&call, &policies)?, mix: mix.clone() })
        })
    }

    /// Runs these mixes under the evaluated policy with a steady load, for [`STEADY_SECONDS`].
    /// `name` is the prefix of the names of the mixes' files.
    pub(crate) fn rest(&self, mixes: &[RandomMix], name: &str) -> Result<Vec<MixRuns>, SimulationError> {
        each(mixes, |mix| {
            let mix = mix.under(STEADY);
            let path = self.write(&mix.text(ShareMechanism::InProcess), name, mix.seed)?;
            let call = SimulateCall { config: &path, seconds: STEADY_SECONDS, mix: &mix };
            let runs = self.simulate(&call, &[EVALUATED])?;
            Ok(MixRuns { mix, runs })
        })
    }

    fn write(&self, text: &str, kind: &str, seed: u64) -> Result<PathBuf, SimulationError> {
        let path = self.runs.join(format!("{kind}-{seed}.yaml"));
        fs::write(&path, text).map_err(|source| SimulationError::Write { path: path.clone(), source })?;
        Ok(path)
    }

    fn simulate(
        &self,
        call: &SimulateCall<'_>,
        policies: &[&str],
    ) -> Result<Vec<SimulationRun>, SimulationError> {
        let arguments = call.arguments(policies);
        let command = || format!("shadowslice-simulate {}", arguments.join(" "));
        let mut simulation = Command::new(&self.bin);
        simulation.args(&arguments).stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = simulation
            .output()
            .map_err(|source| SimulationError::Start { path: self.bin.clone(), source })?;
        if !output.status.success() {
            return Err(SimulationError::Failed { command: command(), status: output.status });
        }
        let report: SimulationReport = serde_json::from_slice(&output.stdout)
            .map_err(|source| SimulationError::Json { command: command(), source })?;
        Ok(report.runs)
    }
}

/// Calls `of` for every mix, on all cores in parallel. Returns the results in the order of the
/// seeds.
fn each(
    mixes: &[RandomMix],
    of: impl Fn(&RandomMix) -> Result<MixRuns, SimulationError> + Sync,
) -> Result<Vec<MixRuns>, SimulationError> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut trials = Vec::new();
        while let Some(mix) = mixes.get(next.fetch_add(1, Ordering::Relaxed)) {
            trials.push(of(mix)?);
        }
        Ok(trials)
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let mut trials = thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let ended = workers
            .into_iter()
            .map(|worker| worker.join().expect("workers return errors instead of panicking"));
        ended.collect::<Result<Vec<Vec<MixRuns>>, SimulationError>>()
    })?
    .concat();
    trials.sort_by_key(|trial| trial.mix.seed);
    Ok(trials)
}

/// The parameters of a call of `shadowslice-simulate`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SimulateCall<'a> {
    pub(crate) config: &'a Path,
    pub(crate) seconds: u32,
    pub(crate) mix: &'a RandomMix,
}

impl SimulateCall<'_> {
    /// Returns the command line, without the program.
    pub(crate) fn arguments(&self, policies: &[&str]) -> Vec<String> {
        let Self { config, seconds, mix } = self;
        let config = config.display().to_string();
        let (seed, seconds, part) = (mix.seed.to_string(), seconds.to_string(), mix.utilisation.to_string());
        let given = [&*config, "--load", mix.load, "--seconds", &seconds, "--utilisation", &part];
        let world = ["--seed", &seed, "--truth", WORLD, "--no-interference", "--json", "--policy"];
        given.into_iter().chain(world).chain(policies.iter().copied()).map(str::to_owned).collect()
    }
}
