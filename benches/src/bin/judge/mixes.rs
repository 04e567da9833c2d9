//! Mixes of models that are drawn, not chosen: each seed draws one mix.

use std::path::{Path, PathBuf};

use fastrand::Rng;

use crate::simulate::Mechanism;

/// The SMs of the GPU.
pub(crate) const SMS: u32 = 132;

/// Models of a mix, from the fewest to the most.
const MODELS: (usize, usize) = (2, 6);

/// An SLO as a multiple of the time that one request takes on the whole GPU, from the tightest to
/// the loosest, even by its logarithm;
const SLACK: (f64, f64) = (3.5, 40.0);

/// and never less than so many milliseconds.
const LEAST_SLO_MS: f64 = 4.0;

const PERCENTILES: [f64; 4] = [90.0, 95.0, 99.0, 99.9];
const BATCHES: [u32; 4] = [4, 8, 16, 32];
const PRIORITIES: [u32; 4] = [1, 1, 2, 3];

/// How much of the GPU the loads take on average.
const UTILISATIONS: [f64; 4] = [0.3, 0.5, 0.7, 0.85];

/// The loads that a mix may have.
const LOADS: [&str; 7] = ["poisson", "gamma", "step", "flash", "surge", "anti", "zipf"];

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
    entries: Vec<String>,
    pub(crate) utilisation: f64,
    pub(crate) load: &'static str,
}

impl Mix {
    pub(crate) fn models(&self) -> usize {
        self.entries.len()
    }

    /// Its configuration; with these shares in percent, if they are given.
    pub(crate) fn text(&self, mechanism: Mechanism, shares: &[u32]) -> String {
        let entry = |(index, entry): (usize, &String)| {
            let share = shares.get(index).map(|share| format!(", share: {{initial: {share}%}}"));
            format!("  - {{{entry}, handover: {}{}}}\n", mechanism.word(), share.unwrap_or_default())
        };
        configuration(self.entries.iter().enumerate().map(entry).collect())
    }
}

/// How mixes are drawn, as text for the page.
pub(crate) fn described() -> String {
    let ((fewest, most), (tightest, loosest)) = (MODELS, SLACK);
    format!(
        "A mix has {fewest} to {most} models with the profiles of `configs/profiles` on {SMS} SMs, each with an\n\
         SLO of {tightest} to {loosest} times what one request takes on all of them ({LEAST_SLO_MS} ms or more).\n\
         Drawn are the percentage of requests that keep it ({}), the largest batch\n\
         ({}), the priority ({}), the load\n\
         ({}), and what that takes of the GPU on average\n\
         ({}).",
        listed(&PERCENTILES),
        listed(&BATCHES),
        listed(&PRIORITIES),
        listed(&LOADS),
        listed(&UTILISATIONS),
    )
}

fn listed<T: ToString>(choices: &[T]) -> String {
    choices.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

pub(crate) fn drawn(known: &[Known], seed: u64) -> Mix {
    let mut random = Rng::with_seed(seed);
    let models = (0..random.usize(MODELS.0..=MODELS.1)).map(|index| {
        let Known { name, profile, one_ms } = of(&mut random, known);
        let slack = SLACK.0 * (SLACK.1 / SLACK.0).powf(random.f64());
        let slo_ms = (one_ms * slack).round().max(LEAST_SLO_MS);
        let percentile = of(&mut random, &PERCENTILES);
        let slo = format!("{{latency: {slo_ms}ms, percentile: {percentile}}}");
        let (batch, priority) = (of(&mut random, &BATCHES), of(&mut random, &PRIORITIES));
        entry(&format!("{name}-{index}"), profile, &slo, *batch, *priority)
    });
    let entries = models.collect();
    let (utilisation, load) = (*of(&mut random, &UTILISATIONS), *of(&mut random, &LOADS));
    Mix { entries, utilisation, load }
}

/// A configuration with a model for each of these profiles, by name, on such a GPU.
pub(crate) fn all<'p>(profiles: impl Iterator<Item = (&'p str, &'p Path)>) -> String {
    let entry = |(name, profile)| format!("  - {{{}}}\n", entry(name, profile, "10s", 1, 1));
    configuration(profiles.map(entry).collect())
}

fn configuration(models: String) -> String {
    format!("gpus: [{{device: emulated, sms: {SMS}}}]\nmodels:\n{models}")
}

fn of<'a, T>(random: &mut Rng, from: &'a [T]) -> &'a T {
    &from[random.usize(..from.len())]
}

fn entry(name: &str, profile: &Path, slo: &str, batch: u32, priority: u32) -> String {
    let tensors = "[{input: x, output: y, datatype: FP32, shape: [64]}]";
    let profile = profile.display();
    format!(
        "name: {name}, engine: emulated, tensors: {tensors}, profile: '{profile}', slo: {slo}, batch: {{max: {batch}}}, priority: {priority}"
    )
}
