//! The simulated side: the calls of `shadowslice-simulate`, and the files that both sides use.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Deserialize;
use shadowslice_simulator::results::Run;
use shadowslice_tests::home::sibling_binary;

use crate::arrivals::{self, Arrival, INTERVAL, LEAD, PHASES_MS};
use crate::cases::{CASES, Case};
use crate::figures::Figures;
use crate::{Failure, Options};

/// The configuration without `share.initial`: under `adaptive` a simulation begins as if it had
/// been running, and so does a supervisor without a configured initial share.
fn without_shares(mix: &str) -> String {
    mix.lines()
        .filter(|line| !line.trim_start().starts_with("share:"))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Simulates cases.
#[derive(Debug)]
pub(crate) struct Simulator {
    program: PathBuf,
    folder: PathBuf,
    seconds: u32,
    utilisation: String,
    seed: String,
}

#[derive(Debug, Deserialize)]
struct Report {
    runs: Vec<Run>,
}

impl Simulator {
    /// Writes a configuration for each policy into the folder that is kept.
    pub(crate) fn prepare(options: &Options) -> Result<Self, Failure> {
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
                format!("controller: {{policy: {}, interval: {}ms}}", case.policy, INTERVAL.as_millis());
            let mix = if case.policy == "adaptive" { without_shares(&mix) } else { mix.clone() };
            let mix = mix.replace("handover: shadow", &format!("handover: {}", case.handover));
            fs::write(&path, format!("{mix}\n{controller}\n")).map_err(about("write", &path))?;
        }
        Ok(simulator)
    }

    /// The configuration of a case, for both sides.
    pub(crate) fn config(&self, case: Case) -> PathBuf {
        self.folder.join(format!("{}-{}.yaml", case.policy, case.handover))
    }

    /// A case's arrivals, and the simulator's result in each phase.
    pub(crate) fn trial(&self, case: Case) -> Result<(Vec<Arrival>, Vec<Figures>), Failure> {
        let drawn = self.drawn(case)?;
        let lasted = LEAD + Duration::from_secs(self.seconds.into());
        let seconds = lasted.as_secs_f64().to_string();
        let mut simulated = Vec::new();
        for phase in PHASES_MS.map(Duration::from_millis) {
            let path = self.folder.join(format!("{}-{}ms.csv", case.load, phase.as_millis()));
            fs::write(&path, arrivals::text(&arrivals::later(&drawn, LEAD - phase)))
                .map_err(about("write", &path))?;
            let run = self.simulate(case, &path, &["--seconds", &seconds])?;
            simulated.push(Figures::simulated(&run, lasted));
        }
        Ok((arrivals::later(&drawn, LEAD), simulated))
    }

    /// A load's arrivals from the first second on.
    fn drawn(&self, case: Case) -> Result<Vec<Arrival>, Failure> {
        let path = self.folder.join(format!("{}.csv", case.load));
        let drawn = path.display().to_string();
        let seconds = self.seconds.to_string();
        let [utilisation, seed] = [&*self.utilisation, &*self.seed];
        let drawing = ["--seconds", &seconds, "--seed", seed, "--utilisation", utilisation];
        self.simulate(case, Path::new(case.load), &[&drawing[..], &["--write-arrivals", &drawn]].concat())?;
        arrivals::read(&fs::read_to_string(&path).map_err(about("read", &path))?)
    }

    /// The emulated device knows no memory bandwidth, so the simulated device must not know it
    /// either.
    fn simulate(&self, case: Case, load: &Path, more: &[&str]) -> Result<Run, Failure> {
        let mut command = Command::new(&self.program);
        command.arg(self.config(case)).arg("--load").arg(load);
        command.args(["--policy", case.policy, "--no-interference", "--json"]).args(more);
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        if !output.status.success() {
            return Err(format!("{command:?} failed ({}); its output stands above", output.status).into());
        }
        let report: Report = serde_json::from_slice(&output.stdout)?;
        report.runs.into_iter().next().ok_or_else(|| "the simulation says nothing".into())
    }
}

fn about<'p>(what: &'p str, path: &'p Path) -> impl FnOnce(std::io::Error) -> Failure + 'p {
    move |error| format!("cannot {what} {}: {error}", path.display()).into()
}
