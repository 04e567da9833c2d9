//! Mixes of models that are drawn, not chosen: each seed draws one mix.

use std::fmt;
use std::path::{Path, PathBuf};

use fastrand::Rng;

use crate::simulate::Mechanism;

/// The SMs of the GPU.
pub(crate) const SMS: u32 = 132;

/// Models of a mix, from the fewest to the most.
const MODELS: (usize, usize) = (2, 6);

/// An SLO as a multiple of the time that one request takes on the whole GPU, from the tightest to
/// the loosest. Its logarithm is drawn evenly.
const SLACK: (f64, f64) = (3.5, 40.0);

/// The least SLO that is drawn, in ms.
const LEAST_SLO_MS: f64 = 4.0;

const PERCENTILES: [f64; 4] = [90.0, 95.0, 99.0, 99.9];
const BATCHES: [u32; 4] = [4, 8, 16, 32];
const PRIORITIES: [u32; 4] = [1, 1, 2, 3];

/// How much of the GPU the loads take on average.
const UTILISATIONS: [f64; 6] = [0.1, 0.2, 0.3, 0.5, 0.7, 0.85];

/// The loads that a mix may have.
const LOADS: [&str; 7] = ["poisson", "gamma", "step", "flash", "surge", "anti", "zipf"];

/// The priorities of seven models, and what their loads may be and may take of the GPU: each in
/// turns.
const SEVEN: [u32; 7] = [1, 1, 2, 2, 2, 3, 3];
const SEVEN_LOADS: [&str; 4] = ["poisson", "step", "surge", "zipf"];
const SEVEN_UTILISATIONS: [f64; 3] = [0.6, 0.85, 1.1];

/// A profile that models are drawn with.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Known {
    pub(crate) name: String,
    pub(crate) profile: PathBuf,
    /// The time of one request on the whole GPU, in ms.
    pub(crate) one_ms: f64,
}

/// A mix and its load.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mix {
    pub(crate) seed: u64,
    entries: Vec<String>,
    pub(crate) utilisation: f64,
    pub(crate) load: &'static str,
}

impl Mix {
    /// Returns the same models under another load.
    pub(crate) fn under(&self, load: &'static str) -> Self {
        Self { load, ..self.clone() }
    }

    /// Returns its configuration.
    pub(crate) fn text(&self, mechanism: Mechanism) -> String {
        let entry = |entry: &String| format!("  - {{{entry}, handover: {}}}\n", mechanism.word());
        configuration(self.entries.iter().map(entry).collect())
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, entries, utilisation, load } = self;
        write!(f, "seed {seed}: {} models, {load} at {utilisation}", entries.len())
    }
}

/// Returns a description of the random mixes, for the page.
pub(crate) fn described() -> String {
    let ((fewest, most), (tightest, loosest)) = (MODELS, SLACK);
    format!(
        "Each model has a measured profile of `configs/profiles` on {SMS} SMs, and an SLO of {tightest} to {loosest}\n\
         times the time of one request (at least {LEAST_SLO_MS} ms). Drawn are the percentile ({})\n\
         and the largest batch ({}).\n\n\
         * *Seven models*: priorities {}, a load of {},\n  \
         and a utilisation of {}.\n\
         * *Mixes*: {fewest} to {most} models, priorities of {}, a load of\n  \
         {}, and a utilisation of\n  \
         {}.",
        listed(&PERCENTILES),
        listed(&BATCHES),
        listed(&SEVEN),
        listed(&SEVEN_LOADS),
        listed(&SEVEN_UTILISATIONS),
        listed(&PRIORITIES),
        listed(&LOADS),
        listed(&UTILISATIONS),
    )
}

fn listed<T: ToString>(choices: &[T]) -> String {
    choices.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// Draws a mix of few models.
pub(crate) fn drawn(known: &[Known], seed: u64) -> Mix {
    let mut random = Rng::with_seed(seed);
    let count = random.usize(MODELS.0..=MODELS.1);
    let models = (0..count).map(|index| {
        let profile = of(&mut random, known);
        let terms = Drawn::by(&mut random, profile);
        entry(&format!("{}-{index}", profile.name), profile, &terms, *of(&mut random, &PRIORITIES))
    });
    let entries = models.collect();
    let (utilisation, load) = (*of(&mut random, &UTILISATIONS), *of(&mut random, &LOADS));
    Mix { seed, entries, utilisation, load }
}

/// Draws seven models of three priorities, no two alike where there are enough profiles. `turn`
/// decides the load and what it takes of the GPU.
pub(crate) fn seven(known: &[Known], seed: u64, turn: usize) -> Mix {
    let mut random = Rng::with_seed(seed);
    let mut order: Vec<&Known> = known.iter().collect();
    random.shuffle(&mut order);
    let models = SEVEN.iter().zip(order.iter().cycle()).enumerate();
    let entries = models.map(|(index, (&priority, profile))| {
        let terms = Drawn::by(&mut random, profile);
        entry(&format!("{}-{index}", profile.name), profile, &terms, priority)
    });
    let entries = entries.collect();
    let load = SEVEN_LOADS[turn % SEVEN_LOADS.len()];
    let utilisation = SEVEN_UTILISATIONS[turn / SEVEN_LOADS.len() % SEVEN_UTILISATIONS.len()];
    Mix { seed, entries, utilisation, load }
}

/// What is drawn for every model.
#[derive(Debug)]
struct Drawn {
    slo_ms: f64,
    percentile: f64,
    batch: u32,
}

impl Drawn {
    fn by(random: &mut Rng, profile: &Known) -> Self {
        let slack = SLACK.0 * (SLACK.1 / SLACK.0).powf(random.f64());
        Self {
            slo_ms: (profile.one_ms * slack).round().max(LEAST_SLO_MS),
            percentile: *of(random, &PERCENTILES),
            batch: *of(random, &BATCHES),
        }
    }
}

/// Returns a configuration with a model for each of these profiles, by name, on such a GPU.
pub(crate) fn all<'p>(profiles: impl Iterator<Item = (&'p str, &'p Path)>) -> String {
    let entry = |(name, profile)| format!("  - {{{}, slo: 10s}}\n", model(name, profile));
    configuration(profiles.map(entry).collect())
}

fn configuration(models: String) -> String {
    format!("gpus: [{{device: emulated, sms: {SMS}}}]\nmodels:\n{models}")
}

fn of<'a, T>(random: &mut Rng, from: &'a [T]) -> &'a T {
    &from[random.usize(..from.len())]
}

fn entry(name: &str, profile: &Known, drawn: &Drawn, priority: u32) -> String {
    let Drawn { slo_ms, percentile, batch } = drawn;
    let slo = format!("{{latency: {slo_ms}ms, percentile: {percentile}}}");
    let model = model(name, &profile.profile);
    format!("{model}, slo: {slo}, batch: {{max: {batch}}}, priority: {priority}")
}

fn model(name: &str, profile: &Path) -> String {
    let tensors = "[{input: x, output: y, datatype: FP32, shape: [64]}]";
    format!("name: {name}, engine: emulated, tensors: {tensors}, profile: '{}'", profile.display())
}
