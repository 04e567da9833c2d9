//! Random mixes of models. Each mix is drawn from one seed.

use std::fmt;
use std::path::{Path, PathBuf};

use fastrand::Rng;

use super::simulate::ShareMechanism;

/// The number of SMs of the simulated GPU.
pub(crate) const SMS: u32 = 132;

/// The minimum and the maximum number of models in a mix.
const MODELS: (usize, usize) = (2, 6);

/// The minimum and the maximum ratio of an SLO to the time of one request on the whole GPU. The
/// logarithm of the ratio is uniformly distributed.
const SLACK: (f64, f64) = (3.5, 40.0);

/// The minimum SLO of a model, in ms.
const LEAST_SLO_MS: f64 = 4.0;

/// The percentiles from which the percentile of an SLO is drawn.
const PERCENTILES: [f64; 4] = [90.0, 95.0, 99.0, 99.9];
/// The maximum batch sizes from which a model's maximum batch size is drawn.
const BATCHES: [u32; 4] = [4, 8, 16, 32];
/// The priorities from which a model's priority is drawn. Priority 1 is twice as likely as priority
/// 2 or 3.
const PRIORITIES: [u32; 4] = [1, 1, 2, 3];

/// The mean fractions of the GPU from which the utilisation of a load is drawn.
const UTILISATIONS: [f64; 6] = [0.1, 0.2, 0.3, 0.5, 0.7, 0.85];

/// The loads from which the load of a mix is drawn.
const LOADS: [&str; 7] = ["poisson", "gamma", "step", "flash", "surge", "anti", "zipf"];

/// The priorities of the models in a mix of seven models.
const SEVEN: [u32; 7] = [1, 1, 2, 2, 2, 3, 3];
/// The loads of the mixes of seven models. Successive mixes use successive loads.
const SEVEN_LOADS: [&str; 4] = ["poisson", "step", "surge", "zipf"];
/// The utilisations of the mixes of seven models. The utilisation changes after all [`SEVEN_LOADS`]
/// have been used.
const SEVEN_UTILISATIONS: [f64; 3] = [0.6, 0.85, 1.1];

/// A measured profile from which a model of a mix can be drawn.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MeasuredProfile {
    pub(crate) name: String,
    pub(crate) profile: PathBuf,
    /// The time of one request on the whole GPU, in ms.
    pub(crate) one_ms: f64,
}

/// A random mix of models and its load.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RandomMix {
    pub(crate) seed: u64,
    entries: Vec<String>,
    pub(crate) utilisation: f64,
    pub(crate) load: &'static str,
}

impl RandomMix {
    /// Returns a mix of the same models under another load.
    pub(crate) fn under(&self, load: &'static str) -> Self {
        Self { load, ..self.clone() }
    }

    /// Returns the configuration of the mix.
    pub(crate) fn text(&self, mechanism: ShareMechanism) -> String {
        let entry = |entry: &String| format!("  - {{{entry}, handover: {}}}\n", mechanism.config_value());
        configuration(self.entries.iter().map(entry).collect())
    }
}

impl fmt::Display for RandomMix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, entries, utilisation, load } = self;
        write!(f, "seed {seed}: {} models, {load} at {utilisation}", entries.len())
    }
}

/// Returns a description of the random mixes, for the page.
pub(crate) fn description() -> String {
    let ((fewest, most), (tightest, loosest)) = (MODELS, SLACK);
    format!(
        "The GPU has {SMS} SMs. Each model has a measured profile from `configs/profiles`. Its SLO is\n\
         {tightest} to {loosest} times the time of one request (at least {LEAST_SLO_MS} ms). The SLO's percentile\n\
         ({}) and the maximum batch size ({}) are random.\n\n\
         * *Seven models* have the priorities {}. The [loads](internals.md#loads) are\n  \
         {} at a utilisation of {}.\n\
         * *Mixes* have {fewest} to {most} models with random priorities ({}). The loads are\n  \
         {} at a utilisation of\n  \
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

/// Draws a mix of 2 to 6 models.
pub(crate) fn drawn(known: &[MeasuredProfile], seed: u64) -> RandomMix {
    let mut random = Rng::with_seed(seed);
    let count = random.usize(MODELS.0..=MODELS.1);
    let models = (0..count).map(|index| {
        let profile = of(&mut random, known);
        let terms = DrawnTerms::by(&mut random, profile);
        entry(&format!("{}-{index}", profile.name), profile, &terms, *of(&mut random, &PRIORITIES))
    });
    let entries = models.collect();
    let (utilisation, load) = (*of(&mut random, &UTILISATIONS), *of(&mut random, &LOADS));
    RandomMix { seed, entries, utilisation, load }
}

/// Draws a mix of seven models with three priorities. If there are enough profiles, all models have
/// different profiles. `turn` selects the load and the utilisation.
pub(crate) fn seven(known: &[MeasuredProfile], seed: u64, turn: usize) -> RandomMix {
    let mut random = Rng::with_seed(seed);
    let mut order: Vec<&MeasuredProfile> = known.iter().collect();
    random.shuffle(&mut order);
    let models = SEVEN.iter().zip(order.iter().cycle()).enumerate();
    let entries = models.map(|(index, (&priority, profile))| {
        let terms = DrawnTerms::by(&mut random, profile);
        entry(&format!("{}-{index}", profile.name), profile, &terms, priority)
    });
    let entries = entries.collect();
    let load = SEVEN_LOADS[turn % SEVEN_LOADS.len()];
    let utilisation = SEVEN_UTILISATIONS[turn / SEVEN_LOADS.len() % SEVEN_UTILISATIONS.len()];
    RandomMix { seed, entries, utilisation, load }
}

/// The randomly drawn properties of a model.
#[derive(Debug)]
struct DrawnTerms {
    slo_ms: f64,
    percentile: f64,
    batch: u32,
}

impl DrawnTerms {
    fn by(random: &mut Rng, profile: &MeasuredProfile) -> Self {
        let slack = SLACK.0 * (SLACK.1 / SLACK.0).powf(random.f64());
        Self {
            slo_ms: (profile.one_ms * slack).round().max(LEAST_SLO_MS),
            percentile: *of(random, &PERCENTILES),
            batch: *of(random, &BATCHES),
        }
    }
}

/// Returns a configuration with one model for each of these profiles.
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

fn entry(name: &str, profile: &MeasuredProfile, drawn: &DrawnTerms, priority: u32) -> String {
    let DrawnTerms { slo_ms, percentile, batch } = drawn;
    let slo = format!("{{latency: {slo_ms}ms, percentile: {percentile}}}");
    let model = model(name, &profile.profile);
    format!("{model}, slo: {slo}, batch: {{max: {batch}}}, priority: {priority}")
}

fn model(name: &str, profile: &Path) -> String {
    let tensors = "[{input: x, output: y, datatype: FP32, shape: [64]}]";
    format!("name: {name}, engine: emulated, tensors: {tensors}, profile: '{}'", profile.display())
}
