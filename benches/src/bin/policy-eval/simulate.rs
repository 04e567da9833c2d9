//! The simulations: the calls of `shadowslice-simulate`, and its answers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde::Deserialize;
use shadowslice_simulator::results::Run;

use crate::mixes::{Known, Mix, drawn, seven};
use crate::profiles::{NoMixes, known};

/// The policy that is judged.
pub(crate) const JUDGED: &str = "adaptive";

/// MPS as it is: the state that the policy must not make worse.
pub(crate) const BASE: &str = "unpartitioned";

/// The layout that the adaptive policy begins with, kept for the whole run.
pub(crate) const OPEN: &str = "unpartitioned+admission";

/// All policies that are compared.
pub(crate) const POLICIES: [&str; 7] =
    [JUDGED, BASE, OPEN, "half+admission", "equal+admission", "priority-half+admission", "gpulet+admission"];

/// Each other layout of the adaptive policy, kept for the whole run, and how their names begin.
const LAYOUTS: &str = "layouts";
pub(crate) const LAYOUT: &str = "layout:";

/// The ways in which the world differs from the profiles. A policy knows only the profiles.
pub(crate) const WORLD: &str = "form,scale,noise,starts";

/// A load that does not change, and for how long it comes where it is looked whether shares come to
/// rest.
pub(crate) const STEADY: &str = "poisson";
pub(crate) const STEADY_SECONDS: u32 = 90;

/// How a share changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mechanism {
    InProcess,
    Shadow,
}

impl Mechanism {
    /// As the configuration has it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::InProcess => "in-process",
            Self::Shadow => "shadow",
        }
    }
}

/// One mix under all policies.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Trial {
    pub(crate) mix: Mix,
    pub(crate) runs: Vec<Run>,
}

/// How the simulations are made.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Setup {
    /// The simulator
    #[arg(long, default_value = "target/release/shadowslice-simulate")]
    pub(crate) bin: PathBuf,
    /// The folder of the profiles from which models are drawn
    #[arg(long, default_value = "configs/profiles")]
    pub(crate) profiles: PathBuf,
    /// The first seed; the other seeds follow it
    #[arg(long, default_value_t = 4001)]
    pub(crate) first_seed: u64,
    /// The number of mixes whose shares change in-process
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) mixes: u64,
    /// The number of these mixes, from the first on, that run again with shares changed by shadows
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) shadows: u64,
    /// The number of mixes of seven models
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) sevens: u64,
    /// The length of each run, in simulated seconds
    #[arg(long, default_value_t = 20)]
    pub(crate) seconds: u32,
    /// The folder to which the mixes are written
    #[arg(long, default_value = "target/policy-evaluation")]
    pub(crate) runs: PathBuf,
}

/// An error that leaves a mix without runs.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoRuns {
    #[error("cannot run {}; `make build` makes it", path.display())]
    Start { path: PathBuf, source: io::Error },
    #[error("`{command}` failed ({status}); its output stands above")]
    Failed { command: String, status: std::process::ExitStatus },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot draw mixes")]
    Mixes {
        #[from]
        source: NoMixes,
    },
    #[error("`{command}` did not print JSON as expected")]
    Json { command: String, source: serde_json::Error },
}

#[derive(Debug, Deserialize)]
struct Report {
    runs: Vec<Run>,
}

impl Setup {
    /// Returns mixes of few models, one for each seed.
    pub(crate) fn mixes(&self, count: u64) -> Result<Vec<Mix>, NoRuns> {
        let known = self.known()?;
        Ok((self.first_seed..).take(count as usize).map(|seed| drawn(&known, seed)).collect())
    }

    /// Returns mixes of seven models, one for each seed.
    pub(crate) fn sevens(&self) -> Result<Vec<Mix>, NoRuns> {
        let (known, seeds) = (self.known()?, self.first_seed..);
        let turns = seeds.take(self.sevens as usize).enumerate();
        Ok(turns.map(|(turn, seed)| seven(&known, seed, turn)).collect())
    }

    fn known(&self) -> Result<Vec<Known>, NoRuns> {
        fs::create_dir_all(&self.runs).map_err(|source| NoRuns::Write { path: self.runs.clone(), source })?;
        Ok(known(&self.profiles, &self.runs.join("all.yaml"))?)
    }

    /// Runs these mixes under all policies and layouts. Their files are called after `name`.
    pub(crate) fn trials(
        &self,
        mixes: &[Mix],
        mechanism: Mechanism,
        name: &str,
    ) -> Result<Vec<Trial>, NoRuns> {
        let policies: Vec<&str> = POLICIES.into_iter().chain([LAYOUTS]).collect();
        each(mixes, |mix| {
            let path = self.write(&mix.text(mechanism), name, mix.seed)?;
            let ask = Ask { config: &path, seconds: self.seconds, mix };
            Ok(Trial { runs: self.simulate(&ask, &policies)?, mix: mix.clone() })
        })
    }

    /// Runs the judged policy under loads that do not change, for longer. The mixes' files are called
    /// after `name`.
    pub(crate) fn rest(&self, mixes: &[Mix], name: &str) -> Result<Vec<Trial>, NoRuns> {
        each(mixes, |mix| {
            let mix = mix.under(STEADY);
            let path = self.write(&mix.text(Mechanism::InProcess), name, mix.seed)?;
            let ask = Ask { config: &path, seconds: STEADY_SECONDS, mix: &mix };
            let runs = self.simulate(&ask, &[JUDGED])?;
            Ok(Trial { mix, runs })
        })
    }

    fn write(&self, text: &str, kind: &str, seed: u64) -> Result<PathBuf, NoRuns> {
        let path = self.runs.join(format!("{kind}-{seed}.yaml"));
        fs::write(&path, text).map_err(|source| NoRuns::Write { path: path.clone(), source })?;
        Ok(path)
    }

    fn simulate(&self, ask: &Ask<'_>, policies: &[&str]) -> Result<Vec<Run>, NoRuns> {
        let arguments = ask.arguments(policies);
        let command = || format!("shadowslice {}", arguments.join(" "));
        let mut simulation = Command::new(&self.bin);
        simulation.args(&arguments).stdin(Stdio::null()).stderr(Stdio::inherit());
        let output =
            simulation.output().map_err(|source| NoRuns::Start { path: self.bin.clone(), source })?;
        if !output.status.success() {
            return Err(NoRuns::Failed { command: command(), status: output.status });
        }
        let report: Report = serde_json::from_slice(&output.stdout)
            .map_err(|source| NoRuns::Json { command: command(), source })?;
        Ok(report.runs)
    }
}

/// Does something for every mix, on all cores.
fn each(mixes: &[Mix], of: impl Fn(&Mix) -> Result<Trial, NoRuns> + Sync) -> Result<Vec<Trial>, NoRuns> {
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
        let ended = workers.into_iter().map(|worker| worker.join().expect("it does not panic"));
        ended.collect::<Result<Vec<Vec<Trial>>, NoRuns>>()
    })?
    .concat();
    trials.sort_by_key(|trial| trial.mix.seed);
    Ok(trials)
}

/// A simulation to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) config: &'a Path,
    pub(crate) seconds: u32,
    pub(crate) mix: &'a Mix,
}

impl Ask<'_> {
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
