//! The simulations: the calls of `shadowslice-simulate`, and its answers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde::Deserialize;
use shadowslice_simulator::results::Run;

use crate::mixes::{Mix, drawn};
use crate::profiles::{NoMixes, known};

/// The policy that is judged.
pub(crate) const JUDGED: &str = "adaptive";

/// MPS as it is: the state that the policy must not make worse.
pub(crate) const BASE: &str = "unpartitioned";

/// All policies that run with the drawn shares and loads.
pub(crate) const POLICIES: [&str; 9] =
    [JUDGED, BASE, "unpartitioned+doors", "equal", "half", "half+doors", "gslice", "gpulet", "gpulet+doors"];

/// The name of the best fixed shares that were found, with late requests refused.
pub(crate) const FOUND: &str = "best fixed shares+doors";

/// The name of running without MPS.
pub(crate) const SLICES: &str = "time slicing";

/// How the world differs from the profiles, which are all that a policy is told.
pub(crate) const WORLD: &str = "form,scale,noise,starts";

/// Shares that are tried for each model, in percent.
const SHARES: [u32; 3] = [75, 50, 25];

/// A load that does not change, and for how long it comes where it is looked whether shares come to rest.
pub(crate) const STEADY: &str = "poisson";
pub(crate) const STEADY_SECONDS: u32 = 90;

/// How a share changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mechanism {
    InProcess,
    Shadow,
}

impl Mechanism {
    pub(crate) const ALL: [Self; 2] = [Self::InProcess, Self::Shadow];

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
    pub(crate) seed: u64,
    pub(crate) runs: Vec<Run>,
}

/// How the simulations are made.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Setup {
    /// The `shadowslice` that simulates
    #[arg(long, default_value = "target/release/shadowslice-simulate")]
    pub(crate) bin: PathBuf,
    /// The profiles that models are drawn from
    #[arg(long, default_value = "configs/profiles")]
    pub(crate) profiles: PathBuf,
    /// The first of the seeds, which follow one another
    #[arg(long, default_value_t = 2001)]
    pub(crate) first_seed: u64,
    /// How many mixes there are
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) mixes: u64,
    /// How long each run is, in simulated seconds
    #[arg(long, default_value_t = 20)]
    pub(crate) seconds: u32,
    /// Where the mixes are written to
    #[arg(long, default_value = "target/judgement")]
    pub(crate) runs: PathBuf,
}

/// Why there are no runs.
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
    /// All mixes under all policies.
    pub(crate) fn trials(&self, mechanism: Mechanism) -> Result<Vec<Trial>, NoRuns> {
        self.each(|mix, seed| {
            let path = self.write(&mix.text(mechanism, &[]), mechanism.word(), seed)?;
            let ask = Ask {
                config: &path,
                load: mix.load,
                utilisation: mix.utilisation,
                seed,
                seconds: self.seconds,
            };
            let mut runs = self.simulate(&ask, WORLD, &POLICIES)?;
            runs.push(self.search(mix, mechanism, &ask)?);
            let sliced = self.simulate(&ask, &format!("{WORLD},slices"), &[BASE])?;
            runs.extend(sliced.into_iter().map(|run| Run { policy: SLICES.to_owned(), ..run }));
            Ok(Trial { seed, runs })
        })
    }

    /// The judged policy under loads that do not change, for longer.
    pub(crate) fn rest(&self) -> Result<Vec<Trial>, NoRuns> {
        self.each(|mix, seed| {
            let path = self.write(&mix.text(Mechanism::InProcess, &[]), "steady", seed)?;
            let ask = Ask {
                config: &path,
                load: STEADY,
                utilisation: mix.utilisation,
                seed,
                seconds: STEADY_SECONDS,
            };
            Ok(Trial { seed, runs: self.simulate(&ask, WORLD, &[JUDGED])? })
        })
    }

    /// Shares that never change: the best for this load that are found model by model.
    fn search(&self, mix: &Mix, mechanism: Mechanism, ask: &Ask<'_>) -> Result<Run, NoRuns> {
        let mut shares = vec![100; mix.models()];
        let of = |shares: &[u32]| -> Result<Run, NoRuns> {
            let path =
                self.write(&mix.text(mechanism, shares), &format!("{}-fixed", mechanism.word()), ask.seed)?;
            let mut runs = self.simulate(&Ask { config: &path, ..*ask }, WORLD, &["static+doors"])?;
            Ok(Run { policy: FOUND.to_owned(), ..runs.swap_remove(0) })
        };
        let mut best = of(&shares)?;
        for model in 0..mix.models() {
            for share in SHARES {
                let mut tried = shares.clone();
                tried[model] = share;
                let run = of(&tried)?;
                if run.goodput_rps > best.goodput_rps {
                    (best, shares) = (run, tried);
                }
            }
        }
        Ok(best)
    }

    /// Every mix, on all cores.
    fn each(&self, of: impl Fn(&Mix, u64) -> Result<Trial, NoRuns> + Sync) -> Result<Vec<Trial>, NoRuns> {
        fs::create_dir_all(&self.runs).map_err(|source| NoRuns::Write { path: self.runs.clone(), source })?;
        let known = known(&self.profiles, &self.runs.join("all.yaml"))?;
        let seeds: Vec<u64> = (self.first_seed..).take(self.mixes as usize).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut trials = Vec::new();
            while let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                trials.push(of(&drawn(&known, seed), seed)?);
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
        trials.sort_by_key(|trial| trial.seed);
        Ok(trials)
    }

    fn write(&self, text: &str, kind: &str, seed: u64) -> Result<PathBuf, NoRuns> {
        let path = self.runs.join(format!("{kind}-{seed}.yaml"));
        fs::write(&path, text).map_err(|source| NoRuns::Write { path: path.clone(), source })?;
        Ok(path)
    }

    fn simulate(&self, ask: &Ask<'_>, truth: &str, policies: &[&str]) -> Result<Vec<Run>, NoRuns> {
        let arguments = ask.arguments(truth, policies);
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

/// A simulation to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) config: &'a Path,
    pub(crate) load: &'a str,
    pub(crate) utilisation: f64,
    pub(crate) seed: u64,
    pub(crate) seconds: u32,
}

impl Ask<'_> {
    /// The command line, without the program.
    pub(crate) fn arguments(&self, truth: &str, policies: &[&str]) -> Vec<String> {
        let Self { config, load, utilisation, seed, seconds } = self;
        let config = config.display().to_string();
        let (seed, seconds, part) = (seed.to_string(), seconds.to_string(), utilisation.to_string());
        let given = [&*config, "--load", load, "--seconds", &seconds, "--utilisation", &part];
        let world = ["--seed", &seed, "--truth", truth, "--no-interference", "--json", "--policy"];
        given.into_iter().chain(world).chain(policies.iter().copied()).map(str::to_owned).collect()
    }
}
