//! Differences between the simulated world and the configured profiles (truth), and between the
//! profiles that a policy gets and the configured profiles (belief).
//!
//! ```text
//! --truth  profile | LIST          LIST: form, scale, noise, starts, proportional, slices, joined by commas
//! --belief profile | truth | none | LIST of form, scale, starts
//! ```
//!
//! * `form`: execution times follow Amdahl's law over the SMs, `t(b, S) = a + c/S`, through the
//!   first and the last point of each row of the profile. The curve therefore has no knee. Below
//!   the profile's smallest number of SMs, more SMs save less time than in the profile.
//! * `scale`: a factor for each model multiplies all its execution times. The seed draws it,
//!   uniformly from 0.7 to 1.3.
//! * `noise`: a factor for each batch multiplies its execution time. It is normal with a standard
//!   deviation of 10 %.
//! * `starts`: a factor for each model multiplies its start times. The seed draws it from 0.5 to 2,
//!   and the logarithm is uniformly distributed.
//! * `proportional`: workers whose shares do not fit onto the GPU together divide the GPU in
//!   proportion to their shares. On real GPUs their kernels take turns. Policies do not know about
//!   this.
//! * `slices`: workers use the whole GPU in time slices, as without MPS. Policies do not know about
//!   this.
//!
//! For example, `--truth form,noise --belief profile` simulates a world with a different form and
//! noise, and gives the unchanged profiles to the policy. `--truth profile --belief scale` gives
//! wrong times to the policy, and `--belief none` gives no profiles. Truth and belief draw their
//! factors independently.

use std::str::FromStr;

use shadowslice_shared::profile::{Execution, ExecutionRow, Profile};
use shadowslice_shared::units::Sms;

use crate::random::{Random, RandomPurpose};
use crate::scenario::Scenario;
use crate::world::GpuSharing;

/// The standard deviation of the factor that `noise` applies, whose mean is 1.
const NOISE: f64 = 0.1;

/// The maximum relative change that `scale` makes to execution times.
const SCALE: f64 = 0.3;

/// The largest factor that `starts` applies to start times.
const STARTS: f64 = 2.0;

/// A set of differences from the configured profiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Difference {
    form: bool,
    scale: bool,
    noise: bool,
    starts: bool,
    sharing: GpuSharing,
}

/// The profiles that a policy gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Belief {
    /// The profiles of the simulated world, so that the policy knows the truth.
    Truth,
    /// No profiles, so that the policy has to learn from measurements.
    Nothing,
    /// The configured profiles, with these differences.
    Profile(Difference),
}

/// An error in the text of a difference or a belief.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DifferenceError {
    #[error(
        "unknown difference {0:?}; give `profile`, or a comma-separated list of form, scale, noise, starts, proportional, slices"
    )]
    Unknown(String),
    /// A difference that only the simulated world can have, and that therefore cannot be part of a
    /// belief.
    #[error("{0} cannot be part of --belief; use --truth {0}")]
    NotBelieved(&'static str),
}

impl FromStr for Difference {
    type Err = DifferenceError;

    fn from_str(text: &str) -> Result<Self, DifferenceError> {
        let mut difference = Self::default();
        if text == "profile" {
            return Ok(difference);
        }
        for word in text.split(',') {
            match word.trim() {
                "form" => difference.form = true,
                "scale" => difference.scale = true,
                "noise" => difference.noise = true,
                "starts" => difference.starts = true,
                "proportional" => difference.sharing = GpuSharing::Proportional,
                "slices" => difference.sharing = GpuSharing::Slices,
                other => return Err(DifferenceError::Unknown(other.to_owned())),
            }
        }
        Ok(difference)
    }
}

impl FromStr for Belief {
    type Err = DifferenceError;

    fn from_str(text: &str) -> Result<Self, DifferenceError> {
        match text {
            "truth" => Ok(Self::Truth),
            "none" => Ok(Self::Nothing),
            list => match list.parse::<Difference>()? {
                Difference { noise: true, .. } => Err(DifferenceError::NotBelieved("noise")),
                Difference { sharing: GpuSharing::Proportional, .. } => {
                    Err(DifferenceError::NotBelieved("proportional"))
                }
                Difference { sharing: GpuSharing::Slices, .. } => Err(DifferenceError::NotBelieved("slices")),
                difference => Ok(Self::Profile(difference)),
            },
        }
    }
}

impl Difference {
    /// Returns the standard deviation of execution times, as a fraction of the expected time.
    pub fn noise(&self) -> f64 {
        if self.noise { NOISE } else { 0.0 }
    }

    /// Returns the way in which workers share a GPU.
    pub fn sharing(&self) -> GpuSharing {
        self.sharing
    }

    /// Returns the profile with these differences.
    fn of(&self, profile: &Profile, gpu: Sms, mut random: Random) -> Profile {
        let mut differs = profile.clone();
        // Both factors are always drawn, even if only one is used. Otherwise, each difference would
        // change the factor of the other.
        let scale = 1.0 + SCALE * (2.0 * random.fraction() - 1.0);
        let starts = STARTS.powf(2.0 * random.fraction() - 1.0);
        if self.form {
            differs.execution = table(&amdahl_columns(gpu), &profile.execution, amdahl);
        }
        if self.scale {
            let columns = differs.execution.sms().to_vec();
            differs.execution =
                table(&columns, &differs.execution, |row, columns, sms| scale * at(row, columns, sms));
        }
        if self.starts {
            let start = &mut differs.start;
            for span in [&mut start.process, &mut start.load, &mut start.warm] {
                *span = span.mul_f64(starts);
            }
        }
        differs
    }
}

/// Returns the scenario with the differences applied. In the argument `scenario`, each model's
/// `terms.profile` is the configured profile. Models without a profile stay the same.
pub fn apply(scenario: &Scenario, truth: Difference, belief: Belief, seed: u64) -> Scenario {
    let mut changed = scenario.clone();
    for (index, model) in changed.models.iter_mut().enumerate() {
        let Some(profile) = model.terms.profile.clone() else { continue };
        let gpu = scenario.gpus[model.terms.gpu];
        model.truth = truth.of(&profile, gpu, Random::new(seed, RandomPurpose::Truth, index));
        model.terms.profile = match belief {
            Belief::Truth => Some(model.truth.clone()),
            Belief::Nothing => None,
            Belief::Profile(differs) => {
                Some(differs.of(&profile, gpu, Random::new(seed, RandomPurpose::Belief, index)))
            }
        };
    }
    changed
}

/// Returns a table of execution times with these columns. `time` computes each time in ms from the
/// old row, the old columns and the new column. The number of kernels does not change.
fn table(columns: &[Sms], old: &Execution, time: impl Fn(&ExecutionRow, &[Sms], Sms) -> f64) -> Execution {
    let row = |row: &ExecutionRow| {
        let ms = columns.iter().map(|&sms| time(row, old.sms(), sms).clamp(1e-6, 999_999.0));
        ExecutionRow { batch: row.batch, ms: ms.collect() }
    };
    Execution::new(columns.to_vec(), old.rows().iter().map(row).collect())
        .expect("batch sizes and columns ascend, and times are bounded")
        .with_kernels(old.kernels().round() as u32)
}

/// Returns the numbers of SMs for which Amdahl's law is evaluated: multiples of [`Sms::STEP`] below
/// 16, then every eighth number, and the whole GPU.
fn amdahl_columns(gpu: Sms) -> Vec<Sms> {
    let fine = (Sms::STEP..16).step_by(Sms::STEP as usize);
    let mut columns: Vec<u32> = fine.chain((16..gpu.0).step_by(8)).filter(|&sms| sms < gpu.0).collect();
    columns.push(gpu.0);
    columns.into_iter().map(Sms).collect()
}

/// Returns the time in ms by Amdahl's law through the first and the last point of a row. If the
/// speed grows faster than the number of SMs between these points, the serial part is zero.
fn amdahl(row: &ExecutionRow, columns: &[Sms], sms: Sms) -> f64 {
    let inverse = |sms: Sms| 1.0 / f64::from(sms.0);
    let (first, last) = (inverse(columns[0]), inverse(columns[columns.len() - 1]));
    let (slow, fast) = (row.ms[0], row.ms[row.ms.len() - 1]);
    let parallel = if first > last { (slow - fast) / (first - last) } else { slow / first };
    let parallel = parallel.clamp(0.0, slow / first);
    slow + parallel * (inverse(sms) - first)
}

fn at(row: &ExecutionRow, columns: &[Sms], sms: Sms) -> f64 {
    row.ms[columns.iter().position(|&column| column == sms).unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::scenario::fixtures::{model, on_one_gpu};

    fn scenario() -> Scenario {
        let mut model = model("a", 1.0);
        let row = |batch| ExecutionRow { batch, ms: vec![8.0, 4.0, 4.0] };
        let execution = Execution::new(vec![Sms(10), Sms(20), Sms(100)], vec![row(1), row(4)]).unwrap();
        model.terms.profile.as_mut().unwrap().execution = execution;
        on_one_gpu(100, vec![model])
    }

    fn applied(truth: &str, belief: &str, seed: u64) -> Scenario {
        apply(&scenario(), truth.parse().unwrap(), belief.parse().unwrap(), seed)
    }

    fn time(profile: &Profile, sms: f64) -> f64 {
        profile.execution.time(1, sms).as_secs_f64() * 1e3
    }

    #[test]
    fn truth_and_belief_are_the_profile_by_default() {
        let same = applied("profile", "profile", 1);
        assert_eq!(Some(&same.models[0].truth), scenario().models[0].terms.profile.as_ref());
        assert_eq!(same.models[0].terms, scenario().models[0].terms);
        let other = applied("form,scale,starts", "truth", 1);
        assert_eq!(Some(&other.models[0].truth), other.models[0].terms.profile.as_ref());
        assert_ne!(other.models[0].truth, same.models[0].truth);
        assert_eq!(applied("profile", "none", 1).models[0].terms.profile, None);
    }

    #[test]
    fn amdahls_law_has_no_knee_and_the_same_ends() {
        let truth = &applied("form", "profile", 1).models[0].truth;
        assert!((time(truth, 10.0) - 8.0).abs() < 0.2);
        assert!((time(truth, 100.0) - 4.0).abs() < 1e-9);
        assert!(time(truth, 20.0) > 5.0 && time(truth, 20.0) < 6.5, "the knee at 20 SMs is gone");
        assert!(time(truth, 2.0) < 40.0, "less than in inverse proportion");
    }

    #[test]
    fn differences_keep_the_number_of_kernels() {
        let mut counted = scenario();
        let profile = counted.models[0].terms.profile.as_mut().unwrap();
        profile.execution = profile.execution.clone().with_kernels(77);
        let truth = "form,scale".parse().unwrap();
        let applied = apply(&counted, truth, Belief::Truth, 1);
        assert_eq!(applied.models[0].truth.execution.kernels(), 77.0);
    }

    #[test]
    fn factors_stay_in_their_bounds_and_differ_by_seed_and_purpose() {
        let factor = |seed| time(&applied("scale", "profile", seed).models[0].truth, 20.0) / 4.0;
        let factors: Vec<f64> = (0..200).map(factor).collect();
        assert!(factors.iter().all(|factor| (0.7..=1.3).contains(factor)));
        assert!(factors.iter().any(|&factor| factor < 0.75) && factors.iter().any(|&factor| factor > 1.25));
        let both = applied("scale", "scale", 1);
        assert_ne!(Some(&both.models[0].truth), both.models[0].terms.profile.as_ref());
        let start = |seed| applied("starts", "profile", seed).models[0].truth.start.load;
        let starts: Vec<Duration> = (0..200).map(start).collect();
        let (least, most) = (starts.iter().min().unwrap(), starts.iter().max().unwrap());
        assert!(*least >= Duration::from_millis(500) && *least < Duration::from_millis(550));
        assert!(*most <= Duration::from_millis(2000) && *most > Duration::from_millis(1900));
    }

    #[test]
    fn noise_cannot_be_believed_and_words_are_checked() {
        assert_eq!("form,noise".parse::<Difference>().unwrap().noise(), 0.1);
        for word in ["noise", "proportional", "slices"] {
            assert_eq!(word.parse::<Belief>(), Err(DifferenceError::NotBelieved(word)));
        }
        assert_eq!("forms".parse::<Difference>(), Err(DifferenceError::Unknown("forms".into())));
        "".parse::<Difference>().unwrap_err();
    }
}
