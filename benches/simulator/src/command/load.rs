//! The loads that the command line selects.

use std::convert::Infallible;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use shadowslice_shared::units::Timestamp;
use shadowslice_simulator::loads::{self, BadLine, MAX_ARRIVALS, NamedLoad, NoSuchLoad};
use shadowslice_simulator::scenario::{Scenario, SimulatedArrival};

/// The default duration of a named load, in seconds.
const DEFAULT_SECONDS: f64 = 120.0;

/// The maximum size of a file of arrivals, in bytes.
const MAX_FILE_BYTES: u64 = 4 << 30;

/// An argument of `--load`: the name of a load, or a file of arrivals.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LoadSource {
    Named(NamedLoad),
    File(PathBuf),
}

/// The arrivals of a load, and its duration in seconds.
#[derive(Debug)]
pub(super) struct DrawnLoad {
    pub(super) arrivals: Vec<SimulatedArrival>,
    pub(super) seconds: f64,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    #[error("cannot read {}; give the name of a load or a file of arrivals", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is larger than {MAX_FILE_BYTES} bytes; give a smaller file", .0.display())]
    TooLong(PathBuf),
    #[error("cannot parse {}", path.display())]
    Line { path: PathBuf, source: BadLine },
    #[error("{} has no arrival; write one per line, for example `0.25,digits`", path.display())]
    Empty { path: PathBuf },
    #[error(
        "{} has no arrival before {seconds} s, and the first one is at {first} s; increase --seconds, or write earlier times",
        path.display()
    )]
    AllLater { path: PathBuf, seconds: f64, first: f64 },
    #[error("the load {0} has more than {MAX_ARRIVALS} arrivals; decrease --seconds")]
    TooMany(NamedLoad),
    #[error("--write-arrivals works with one load and one seed; give one of each")]
    Several,
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl FromStr for LoadSource {
    type Err = NoSuchLoad;

    fn from_str(text: &str) -> Result<Self, NoSuchLoad> {
        if text.ends_with(".csv") {
            return Ok(Self::File(text.parse().unwrap_or_else(|never: Infallible| match never {})));
        }
        text.parse().map(Self::Named)
    }
}

impl fmt::Display for LoadSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(named) => named.fmt(f),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

impl LoadSource {
    /// Draws the arrivals of a named load, or reads the arrivals in a file.
    pub(super) fn draw(
        &self,
        scenario: &Scenario,
        seed: u64,
        seconds: Option<f64>,
        utilisation: f64,
    ) -> Result<DrawnLoad, LoadError> {
        match self {
            Self::Named(named) => {
                let seconds = seconds.unwrap_or(DEFAULT_SECONDS);
                let arrivals = named.arrivals(scenario, seed, seconds, utilisation).take(MAX_ARRIVALS + 1);
                let arrivals: Vec<_> = arrivals.collect();
                if arrivals.len() > MAX_ARRIVALS {
                    return Err(LoadError::TooMany(*named));
                }
                Ok(DrawnLoad { arrivals, seconds })
            }
            Self::File(path) => from_file(path, scenario, seconds),
        }
    }
}

impl DrawnLoad {
    /// Writes the arrivals to a file that `--load` can read.
    pub(super) fn write(&self, path: &Path, scenario: &Scenario) -> Result<(), LoadError> {
        let written = || {
            let mut file = BufWriter::new(File::create(path)?);
            for arrival in &self.arrivals {
                let name = &scenario.models[arrival.model].terms.name;
                writeln!(file, "{}", loads::line(arrival, name))?;
            }
            file.flush()
        };
        written().map_err(|source| LoadError::Write { path: path.to_owned(), source })
    }
}

fn from_file(path: &PathBuf, scenario: &Scenario, seconds: Option<f64>) -> Result<DrawnLoad, LoadError> {
    let read = |source| LoadError::Read { path: path.clone(), source };
    if fs::metadata(path).map_err(read)?.len() > MAX_FILE_BYTES {
        return Err(LoadError::TooLong(path.clone()));
    }
    let text = fs::read_to_string(path).map_err(read)?;
    let names = scenario.models.iter().map(|model| model.terms.name.as_str());
    let mut arrivals =
        loads::read(&text, names).map_err(|source| LoadError::Line { path: path.clone(), source })?;
    let at = |arrival: &SimulatedArrival| arrival.at.since_origin().as_secs_f64();
    let ends = arrivals.first().map(at).zip(arrivals.last().map(at));
    let (first, last) = ends.ok_or_else(|| LoadError::Empty { path: path.clone() })?;
    // Later code divides by the duration. If the only arrival is at 0 s, the load therefore gets a
    // minimum duration.
    let Some(seconds) = seconds else { return Ok(DrawnLoad { arrivals, seconds: last.max(1e-3) }) };
    let end = Timestamp::after_origin(Duration::from_secs_f64(seconds));
    arrivals.retain(|arrival| arrival.at < end);
    if arrivals.is_empty() {
        return Err(LoadError::AllLater { path: path.clone(), seconds, first });
    }
    Ok(DrawnLoad { arrivals, seconds })
}
