//! The simulations: what is asked of `shadowslice simulate`, and its answers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde::Deserialize;
use shadowslice_simulator::results::Run;

use crate::criteria::JUDGED;
use crate::mixes::drawn;
use crate::profiles::{NoMixes, known};

/// All that are named.
pub(crate) const LOADS: [&str; 9] =
    ["poisson", "gamma", "mmpp", "diurnal", "step", "flash", "anti", "surge", "zipf"];

/// Those of them whose rates never change.
pub(crate) const STEADY: [&str; 3] = ["poisson", "gamma", "zipf"];

/// The baselines; each alone, and with adaptive's doors.
const BASELINES: [&str; 6] = ["unpartitioned", "static", "equal", "half", "gslice", "gpulet"];

/// How the world differs from the profiles where beliefs are judged.
pub(crate) const OTHER_WORLD: &str = "form,scale,noise,starts";

/// A world, and what adaptive believes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum World {
    /// As the profiles say; everybody plays.
    Profiled,
    /// The same for longer, under steady loads and adaptive alone.
    Steady,
    /// Another one, of which adaptive is told the truth.
    Told,
    /// The same, but it is told the profiles.
    Misled,
}

/// How the simulations are made.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Setup {
    /// The `shadowslice` that simulates
    #[arg(long, default_value = "target/release/shadowslice")]
    pub(crate) bin: PathBuf,
    /// The mix of models
    #[arg(long, default_value = "configs/mix.yaml")]
    pub(crate) config: PathBuf,
    /// Draw another mix for each seed instead
    #[arg(long, conflicts_with = "config")]
    pub(crate) mixes: bool,
    /// The profiles that its models are drawn from
    #[arg(long, default_value = "configs/profiles")]
    pub(crate) profiles: PathBuf,
    /// The first of the seeds, which follow one another
    #[arg(long, default_value_t = 1101)]
    pub(crate) first_seed: u64,
    /// How many there are
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(2..=1000))]
    pub(crate) seeds: u64,
    /// How long each run is, in simulated seconds
    #[arg(long, default_value_t = 45)]
    pub(crate) seconds: u32,
    /// The same where it is looked whether steady loads come to rest
    #[arg(long, default_value_t = 180)]
    pub(crate) steady_seconds: u32,
    /// Where the simulations' answers are kept
    #[arg(long, default_value = "target/judgement")]
    pub(crate) runs: PathBuf,
    /// Judge the answers that lie there, and simulate nothing
    #[arg(long)]
    pub(crate) as_they_lie: bool,
}

/// Why there are no runs.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoRuns {
    #[error("cannot run {}; `make build` makes it", path.display())]
    Start { path: PathBuf, source: io::Error },
    #[error("`{command}` failed ({status}); what it said stands above")]
    Failed { command: String, status: std::process::ExitStatus },
    #[error("cannot keep a simulation's answer at {}", path.display())]
    Keep { path: PathBuf, source: io::Error },
    #[error("cannot draw mixes")]
    Mixes {
        #[from]
        source: NoMixes,
    },
    #[error("cannot read {}; without --as-they-lie it is made", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not what `shadowslice simulate --json` prints; make it again", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
}

#[derive(Debug, Deserialize)]
struct Report {
    runs: Vec<Run>,
}

impl World {
    fn name(self) -> &'static str {
        match self {
            Self::Profiled => "profiled",
            Self::Steady => "steady",
            Self::Told => "told",
            Self::Misled => "misled",
        }
    }

    /// Whose runs there are.
    pub(crate) fn policies(self) -> Vec<String> {
        let judged = [JUDGED.to_owned()];
        match self {
            Self::Profiled => judged.into_iter().chain(baselines()).collect(),
            Self::Steady | Self::Told | Self::Misled => judged.to_vec(),
        }
    }

    /// What comes in its runs.
    pub(crate) fn loads(self) -> &'static [&'static str] {
        match self {
            Self::Profiled | Self::Told | Self::Misled => &LOADS,
            Self::Steady => &STEADY,
        }
    }

    fn beliefs(self) -> &'static [&'static str] {
        match self {
            Self::Profiled | Self::Steady => &[],
            Self::Told => &["--truth", OTHER_WORLD, "--belief", "truth"],
            Self::Misled => &["--truth", OTHER_WORLD, "--belief", "profile"],
        }
    }
}

/// What is simulated at once: some seeds on one mix.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Task {
    pub(crate) config: String,
    /// How much of the GPU is asked, if not as much as when nothing is said.
    pub(crate) utilisation: Option<String>,
    pub(crate) seeds: Vec<String>,
}

/// The baselines' names.
pub(crate) fn baselines() -> Vec<String> {
    let alone = BASELINES.iter().map(|&name| name.to_owned());
    alone.chain(BASELINES.iter().map(|name| format!("{name}+doors"))).collect()
}

impl Setup {
    /// Everybody's runs in a world.
    pub(crate) fn runs_in(&self, world: World) -> Result<Vec<Run>, NoRuns> {
        let keep = |source| NoRuns::Keep { path: self.runs.clone(), source };
        fs::create_dir_all(&self.runs).map_err(keep)?;
        let tasks = self.tasks()?;
        let mut runs = Vec::new();
        for load in world.loads() {
            let began = Instant::now();
            for task in &tasks {
                runs.extend(self.runs_of(task, world, load)?);
            }
            if !self.as_they_lie {
                eprintln!("{load}, {}: {:.0} s", world.name(), began.elapsed().as_secs_f64());
            }
        }
        Ok(runs)
    }

    fn tasks(&self) -> Result<Vec<Task>, NoRuns> {
        if !self.mixes {
            return Ok(vec![self.of_config()]);
        }
        let known = known(&self.profiles, &self.runs.join("all.yaml"))?;
        let task = |seed: u64| {
            let (mix, path) = (drawn(&known, seed), self.runs.join(format!("mix-{seed}.yaml")));
            fs::write(&path, mix.text).map_err(|source| NoMixes::Write { path: path.clone(), source })?;
            let config = path.display().to_string();
            Ok(Task { config, utilisation: Some(mix.utilisation.to_string()), seeds: vec![seed.to_string()] })
        };
        self.seeds().map(task).collect()
    }

    /// What is simulated, as it is shown to people.
    pub(crate) fn shown(&self) -> Task {
        if !self.mixes {
            return self.of_config();
        }
        let [config, part, seed] = ["mix-SEED.yaml", "PART", "SEED"].map(str::to_owned);
        Task { config, utilisation: Some(part), seeds: vec![seed] }
    }

    fn seeds(&self) -> impl Iterator<Item = u64> {
        (self.first_seed..).take(self.seeds as usize)
    }

    fn of_config(&self) -> Task {
        let seeds = self.seeds().map(|seed| seed.to_string()).collect();
        Task { config: self.config.display().to_string(), utilisation: None, seeds }
    }

    fn runs_of(&self, task: &Task, world: World, load: &str) -> Result<Vec<Run>, NoRuns> {
        let mix = if self.mixes { format!("-{}", task.seeds.join("-")) } else { String::new() };
        let path = self.runs.join(format!("{}-{load}{mix}.json", world.name()));
        if !self.as_they_lie {
            self.simulate(task, world, load, &path)?;
        }
        let text = fs::read(&path).map_err(|source| NoRuns::Read { path: path.clone(), source })?;
        let report: Report = serde_json::from_slice(&text).map_err(|source| NoRuns::Json { path, source })?;
        Ok(report.runs)
    }

    fn simulate(&self, task: &Task, world: World, load: &str, path: &Path) -> Result<(), NoRuns> {
        let arguments = self.arguments(task, world, load);
        let mut command = Command::new(&self.bin);
        command.args(&arguments).stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command.output().map_err(|source| NoRuns::Start { path: self.bin.clone(), source })?;
        if !output.status.success() {
            let command = format!("shadowslice {}", arguments.join(" "));
            return Err(NoRuns::Failed { command, status: output.status });
        }
        fs::write(path, output.stdout).map_err(|source| NoRuns::Keep { path: path.to_owned(), source })
    }

    /// The command line, without the program.
    pub(crate) fn arguments(&self, task: &Task, world: World, load: &str) -> Vec<String> {
        let seconds = if world == World::Steady { self.steady_seconds } else { self.seconds }.to_string();
        let given = ["simulate", &task.config, "--load", load, "--seconds", &seconds, "--json"];
        let mut arguments: Vec<String> = given.map(str::to_owned).to_vec();
        arguments.extend(task.utilisation.iter().flat_map(|part| ["--utilisation".to_owned(), part.clone()]));
        arguments.extend(world.beliefs().iter().map(|&word| word.to_owned()));
        arguments.push("--policy".to_owned());
        arguments.extend(world.policies());
        arguments.push("--seed".to_owned());
        arguments.extend(task.seeds.iter().cloned());
        arguments
    }
}
