//! The simulated runs: the calls of `shadowslice-simulate`, and the files that both the simulated
//! and the real runs use.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Deserialize;
use shadowslice_simulator::results::SimulationRun;
use shadowslice_tests::home::sibling_binary;

use crate::MeasureError;

use super::SimVsRealOptions;
use super::arrivals::{self, INTERVAL, LEAD, PHASES_MS, ReplayArrival};
use super::cases::{CASES, ReplayCase, ReplayShares};
use super::outcomes::RunOutcome;

/// Returns the configuration with these initial shares. If no shares are configured, the policy
/// `adaptive` chooses the initial shares, both in a simulation and in a supervisor.
fn with_shares(mix: &str, shares: ReplayShares) -> String {
    let mut percent = match shares {
        ReplayShares::OfFile => return mix.to_owned(),
        ReplayShares::OfPolicy => [].iter(),
        ReplayShares::Percent(ref shares) => shares.iter(),
    };
    let line = |line: &str| match line.trim_start().starts_with("share:") {
        true => percent.next().map(|share| format!("    share: {{initial: {share}%}}\n")).unwrap_or_default(),
        false => format!("{line}\n"),
    };
    mix.lines().map(line).collect()
}

/// Returns the configuration with this memory of the GPU, for which models in a shared worker sleep.
fn with_memory(mix: String, memory: Option<&str>) -> String {
    let Some(memory) = memory else { return mix };
    mix.replace("device: emulated", &format!("device: emulated\n    memory: {memory}"))
        .replace("engine: emulated", "engine: emulated\n    isolation: shared\n    sleep: on-pressure")
}

/// The simulator that runs the cases.
#[derive(Debug)]
pub(crate) struct Simulator {
    program: PathBuf,
    folder: PathBuf,
    seconds: u32,
    utilisation: String,
    seed: String,
}

#[derive(Debug, Deserialize)]
struct SimulationReport {
    runs: Vec<SimulationRun>,
}

impl Simulator {
    /// Writes a configuration for each case into the folder of the option `--keep`.
    pub(crate) fn prepare(options: &SimVsRealOptions) -> Result<Self, MeasureError> {
        let folder = std::path::absolute(&options.keep)?;
        fs::create_dir_all(&folder).map_err(about("make", &folder))?;
        let mix = fs::read_to_string(&options.config).map_err(about("read", &options.config))?;
        let profiles = std::path::absolute(&options.config)?.with_file_name("profiles");
        let link = folder.join("profiles");
        if link.is_symlink() {
            fs::remove_file(&link).map_err(about("replace", &link))?;
        }
        symlink(profiles, &link).map_err(about("make", &link))?;
        let (utilisation, seed) = (options.utilisation.to_string(), options.seed.to_string());
        let simulator = Self {
            program: sibling_binary("shadowslice-simulate")?,
            folder,
            seconds: options.seconds,
            utilisation,
            seed,
        };
        for case in CASES {
            let path = simulator.config(case);
            let controller =
                format!("controller: {{policy: {}, interval: {}ms}}", case.configured, INTERVAL.as_millis());
            let mix = with_memory(with_shares(&mix, case.shares), case.memory);
            let mix = mix.replace("handover: shadow", &format!("handover: {}", case.handover));
            fs::write(&path, format!("{mix}\n{controller}\n")).map_err(about("write", &path))?;
        }
        Ok(simulator)
    }

    /// Returns the path of a case's configuration. Both the simulated and the real runs use it.
    pub(crate) fn config(&self, case: ReplayCase) -> PathBuf {
        self.folder.join(format!("{}-{}.yaml", case.policy, case.handover))
    }

    /// Returns the arrivals of a case, and the case's simulated outcome in each phase.
    pub(crate) fn trial(
        &self,
        case: ReplayCase,
    ) -> Result<(Vec<ReplayArrival>, Vec<RunOutcome>), MeasureError> {
        let drawn = self.drawn(case)?;
        let lasted = LEAD + Duration::from_secs(self.seconds.into());
        let seconds = lasted.as_secs_f64().to_string();
        let mut simulated = Vec::new();
        for phase in PHASES_MS.map(Duration::from_millis) {
            let path = self.folder.join(format!("{}-{}ms.csv", case.load, phase.as_millis()));
            fs::write(&path, arrivals::text(&arrivals::later(&drawn, LEAD - phase)))
                .map_err(about("write", &path))?;
            let run = self.simulate(case, &path, &["--seconds", &seconds])?;
            simulated.push(RunOutcome::simulated(&run, lasted));
        }
        Ok((arrivals::later(&drawn, LEAD), simulated))
    }

    /// Draws the arrivals of a load. The times do not include [`LEAD`].
    fn drawn(&self, case: ReplayCase) -> Result<Vec<ReplayArrival>, MeasureError> {
        let path = self.folder.join(format!("{}.csv", case.load));
        let drawn = path.display().to_string();
        let seconds = self.seconds.to_string();
        let [utilisation, seed] = [&*self.utilisation, &*self.seed];
        let drawing = ["--seconds", &seconds, "--seed", seed, "--utilisation", utilisation];
        self.simulate(case, Path::new(case.load), &[&drawing[..], &["--write-arrivals", &drawn]].concat())?;
        arrivals::read(&fs::read_to_string(&path).map_err(about("read", &path))?)
    }

    /// Simulates a case. Sets the option `--no-interference`, because the emulated device does not
    /// model memory bandwidth.
    fn simulate(&self, case: ReplayCase, load: &Path, more: &[&str]) -> Result<SimulationRun, MeasureError> {
        let mut command = Command::new(&self.program);
        command.arg(self.config(case)).arg("--load").arg(load);
        command.args(["--policy", case.configured, "--no-interference", "--json"]).args(more);
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        if !output.status.success() {
            return Err(format!("{command:?} failed ({}); see its output above", output.status).into());
        }
        let report: SimulationReport = serde_json::from_slice(&output.stdout)?;
        report.runs.into_iter().next().ok_or_else(|| "the output of shadowslice-simulate has no run".into())
    }
}

fn about<'p>(what: &'p str, path: &'p Path) -> impl FnOnce(std::io::Error) -> MeasureError + 'p {
    move |error| format!("cannot {what} {}: {error}", path.display()).into()
}
