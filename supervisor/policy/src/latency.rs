//! Predictions of a batch's execution time, from the model's profile and from observed batches.
//!
//! The ratios between the times of different batch sizes change slowly. The pace, a factor on the times
//! of all sizes, changes as soon as other workers on the GPU start or stop executing. A [`Predictor`]
//! keeps the ratios and the pace separately, so that it learns a new pace from a few batches of any
//! size.

use std::collections::BTreeMap;
use std::time::Duration;

use shadowslice_shared::profile::{Execution, Profile};
use shadowslice_shared::units::Sms;

/// The maximum number of row counts with an observed time. A model warms up about a dozen batch sizes.
/// The predictor estimates the time of any other row count from the nearest observed row count.
const MAX_ROW_COUNTS: usize = 64;

/// The weight of a new observation in the mean time of its row count.
const OBSERVATION_WEIGHT: f64 = 0.125;

/// The weight of a new observation in the pace.
const PACE_WEIGHT: f64 = 0.5;

/// The maximum factor by which the pace of one batch can differ from the current pace. Larger factors
/// are clipped, which limits the effect of an outlier.
const MAX_SURPRISE: f64 = 3.0;

/// The maximum pace. The minimum pace is its inverse. Observed times can imply a pace outside these
/// bounds, for example if a worker reports an execution time of zero. In that case, the predictor
/// adjusts the mean time of the observed row count instead of the pace.
const MAX_PACE: f64 = 64.0;

/// The weight of a new observation in the mean error of the predictions.
const ERROR_WEIGHT: f64 = 0.125;

/// The multiple of the mean error that a cautious prediction adds.
const CAUTION: f64 = 1.5;

/// The weight of an observation in the mean times of all other row counts. About a hundred batches of
/// any size correct a wrong mean time.
const AGING: f64 = 0.01;

/// The multiple of a batch's predicted time after which the batch counts as hung.
const HANG_FACTOR: u32 = 20;

/// The minimum time after which a batch counts as hung, because a busy host can delay any batch.
const MIN_HANG_LIMIT: Duration = Duration::from_secs(1);

/// The time after which a batch without a prediction counts as hung. The time is long, because the
/// first execution may compile kernels.
pub const BLIND_HANG_LIMIT: Duration = Duration::from_secs(30);

/// The times of all batches with the same number of rows, in seconds.
#[derive(Debug, Clone, Copy)]
struct Observed {
    /// The mean time, converted to a pace of 1. Recent observations have a higher weight.
    mean: f64,
    /// The time from the profile, if the model has one.
    profiled: Option<f64>,
}

/// A predictor of the execution times of a model's batches on a given number of SMs.
#[derive(Debug, Clone)]
pub struct Predictor {
    profile: Option<Execution>,
    sms: Sms,
    /// The sizes to which batches are padded, in rows, ascending. A batch larger than the last size is
    /// not padded.
    sizes: Vec<u32>,
    observed: BTreeMap<u32, Observed>,
    /// The current factor on the observed times, never zero.
    pace: f64,
    /// The mean error of recent predictions, as a fraction of the prediction.
    error: f64,
}

impl Predictor {
    /// Creates a predictor for `sms` SMs. Without a profile, the predictor returns no prediction until
    /// it has learnt from a batch or from the warm-up.
    pub fn new(profile: Option<&Profile>, sms: Sms) -> Self {
        let profile = profile.map(|profile| profile.execution.clone());
        Self { profile, sms, sizes: Vec::new(), observed: BTreeMap::new(), pace: 1.0, error: 0.0 }
    }

    /// Returns the same predictor for another number of SMs, without observations.
    #[must_use]
    pub fn on(&self, sms: Sms) -> Self {
        let (profile, sizes) = (self.profile.clone(), self.sizes.clone());
        Self { profile, sms, sizes, observed: BTreeMap::new(), pace: 1.0, error: 0.0 }
    }

    /// Sets the sizes to which batches are padded, in rows.
    #[must_use]
    pub fn padded_to(mut self, mut sizes: Vec<u32>) -> Self {
        sizes.sort_unstable();
        self.sizes = sizes;
        self
    }

    /// Returns the size in rows of the largest batch below `rows` that needs no padding. Returns `None`
    /// if a batch of `rows` rows needs no padding, or if no smaller size exists.
    pub(crate) fn unpadded_below(&self, rows: u32) -> Option<u32> {
        let above = self.sizes.partition_point(|&size| size < rows);
        if self.sizes.get(above)? == &rows {
            return None;
        }
        self.sizes[..above].last().copied()
    }

    fn padded(&self, rows: u32) -> u32 {
        let above = self.sizes.partition_point(|&size| size < rows);
        self.sizes.get(above).copied().unwrap_or(rows)
    }

    /// Updates the predictions with a batch of `rows` rows that executed for `took`.
    pub fn observe(&mut self, rows: u32, took: Duration) {
        let (rows, took) = (self.padded(rows), took.as_secs_f64());
        self.follow(rows, took);
        let took = took / self.pace;
        if let Some(seen) = self.observed.get_mut(&rows) {
            seen.mean += OBSERVATION_WEIGHT * (took - seen.mean);
        } else if self.observed.len() < MAX_ROW_COUNTS {
            let profiled = self.profiled(rows);
            self.observed.insert(rows, Observed { mean: took, profiled });
        }
        self.age(rows);
    }

    /// Moves the mean times of the other row counts towards the times that the observed row count
    /// implies. Otherwise a mean time that is too long would never be corrected, because the scheduler
    /// sends no batches of that size.
    fn age(&mut self, rows: u32) {
        let Some(&Observed { mean: seen, profiled: own }) = self.observed.get(&rows) else { return };
        for (&other, Observed { mean, profiled }) in &mut self.observed {
            if other == rows {
                continue;
            }
            let implied = match (own, *profiled) {
                (Some(own), Some(time)) => seen * time / own.max(1e-9),
                // Without a profile, the observation implies only an upper bound of the other mean
                // time.
                _ => mean.min(seen * (f64::from(other) / f64::from(rows.max(1))).max(1.0)),
            };
            *mean += AGING * (implied - *mean);
        }
    }

    /// Updates the pace. Without a profile, the first batch of a row count does not change the pace,
    /// because the predicted time of that batch is only an estimate.
    fn follow(&mut self, rows: u32, took: f64) {
        let known = self.profile.is_some() || self.observed.contains_key(&rows);
        let Some(expected) = self.at_pace_1(rows).filter(|_| known) else { return };
        let ratio = took / expected.max(1e-9);
        let ratio = ratio.clamp(self.pace / MAX_SURPRISE, self.pace * MAX_SURPRISE);
        self.error += ERROR_WEIGHT * ((ratio / self.pace - 1.0).abs() - self.error);
        let pace = self.pace + PACE_WEIGHT * (ratio - self.pace);
        self.pace = pace.clamp(1.0 / MAX_PACE, MAX_PACE);
    }

    /// Adds a time that the worker measured in its warm-up. Without a profile, the predictor uses this
    /// time until it observes a batch of this row count.
    pub fn expect(&mut self, rows: u32, took: Duration) {
        if self.profile.is_none() && !self.observed.contains_key(&rows) {
            self.observe(rows, took);
        }
    }

    /// Returns the observed row counts, each with its mean time at the current pace.
    pub fn observed(&self) -> impl Iterator<Item = (u32, Duration)> {
        self.observed.iter().map(|(&rows, seen)| (rows, span(self.pace * seen.mean)))
    }

    /// Predicts how long a batch of `rows` rows executes. Returns `None` if there is neither a profile
    /// nor an observation.
    ///
    /// For a row count without observations, the prediction is the time from the profile, corrected by
    /// the nearest observed row count. Without a profile, the prediction is based on the nearest
    /// observed row count: more rows take proportionally longer, and fewer rows take the same time.
    pub fn predict(&self, rows: u32) -> Option<Duration> {
        self.at_pace_1(self.padded(rows)).map(|seconds| span(self.pace * seconds))
    }

    /// Returns a time that a batch is unlikely to exceed. The margin grows with the error of recent
    /// predictions, for example when other workers on the GPU start and stop executing.
    pub fn cautious(&self, rows: u32) -> Option<Duration> {
        Some(span(self.predict(rows)?.as_secs_f64() * (1.0 + CAUTION * self.error)))
    }

    fn at_pace_1(&self, rows: u32) -> Option<f64> {
        let fewer = self.observed.range(..=rows).next_back();
        if let Some((&seen, &Observed { mean, .. })) = fewer
            && seen == rows
        {
            return Some(mean);
        }
        let more = self.observed.range(rows..).next();
        let nearest = fewer.into_iter().chain(more).min_by_key(|(seen, _)| seen.abs_diff(rows));
        match (nearest, self.profiled(rows)) {
            (Some((_, seen)), Some(time)) => Some(seen.mean * time / seen.profiled?.max(1e-9)),
            (Some((&seen, &Observed { mean, .. })), None) => {
                Some(mean * (f64::from(rows) / f64::from(seen.max(1))).max(1.0))
            }
            (None, time) => time,
        }
    }

    /// Returns the time from the profile, in seconds.
    fn profiled(&self, rows: u32) -> Option<f64> {
        Some(self.profile.as_ref()?.time(rows, self.sms.0.into()).as_secs_f64())
    }

    /// Returns the time after which a batch of `rows` rows counts as hung.
    pub fn hang_limit(&self, rows: u32) -> Duration {
        match self.predict(rows) {
            Some(predicted) => predicted.saturating_mul(HANG_FACTOR).max(MIN_HANG_LIMIT),
            None => BLIND_HANG_LIMIT,
        }
    }
}

fn span(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::profile::{ExecutionRow, ProcessMemory, ProfileSource, StartTimes};

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Returns a profile in which a row takes 10 ms on 10 SMs, and 5 ms on 20 SMs.
    fn profile() -> Profile {
        let row =
            |batch: u32| ExecutionRow { batch, ms: vec![10.0 * f64::from(batch), 5.0 * f64::from(batch)] };
        Profile {
            source: ProfileSource::Illustrative,
            memory: ProcessMemory::default(),
            start: StartTimes::default(),
            bandwidth: 0.1,
            shapes: Default::default(),
            execution: Execution::new(vec![Sms(10), Sms(20)], vec![row(1), row(8)]).unwrap(),
        }
    }

    fn near(predicted: Option<Duration>, expected: Duration) -> bool {
        predicted.is_some_and(|predicted| predicted.abs_diff(expected) < MS / 1000)
    }

    #[test]
    fn a_batch_takes_as_long_as_the_size_it_is_padded_to() {
        let mut predictor = Predictor::new(Some(&profile()), Sms(20)).padded_to(vec![1, 4, 8]);
        let times = [1, 2, 4, 5, 8, 9].map(|rows| predictor.predict(rows).unwrap());
        assert_eq!((times[1], times[3]), (times[2], times[4]));
        assert!(times[0] < times[1] && times[2] < times[3]);
        predictor.observe(5, 80 * MS);
        assert_eq!(predictor.observed().map(|(rows, _)| rows).collect::<Vec<_>>(), [8]);
        assert_eq!(
            [1, 3, 4, 7, 8, 9].map(|rows| predictor.unpadded_below(rows)),
            [None, Some(1), None, Some(4), None, None]
        );
        assert_eq!(Predictor::new(None, Sms(20)).unpadded_below(3), None);
    }

    #[test]
    fn the_profile_predicts_until_batches_are_observed() {
        let mut predictor = Predictor::new(Some(&profile()), Sms(20));
        assert!(near(predictor.predict(4), 20 * MS));
        predictor.observe(4, 30 * MS);
        let observed: Vec<_> = predictor.observed().collect();
        assert!(matches!(observed[..], [(4, took)] if near(Some(took), 30 * MS)), "{observed:?}");
        assert!(near(predictor.predict(4), 30 * MS));
        assert!(near(predictor.predict(8), 60 * MS), "corrected as its neighbour");
    }

    #[test]
    fn without_a_profile_neighbouring_row_counts_predict() {
        let mut predictor = Predictor::new(None, Sms(20));
        assert_eq!(predictor.predict(1), None);
        predictor.observe(4, 10 * MS);
        assert!(near(predictor.predict(2), 10 * MS));
        assert!(near(predictor.predict(8), 20 * MS));
    }

    #[test]
    fn the_warm_up_predicts_only_without_a_profile() {
        let mut blind = Predictor::new(None, Sms(20));
        blind.expect(1, 10 * MS);
        assert!(near(blind.predict(1), 10 * MS));
        let mut seeing = Predictor::new(Some(&profile()), Sms(20));
        seeing.expect(1, 70 * MS);
        assert!(near(seeing.predict(1), 5 * MS));
    }

    #[test]
    fn another_pace_is_followed_within_a_few_batches_whatever_their_sizes() {
        let mut predictor = Predictor::new(Some(&profile()), Sms(20));
        for rows in 1..=8 {
            predictor.observe(rows, 5 * MS * rows);
        }
        // Other workers start to execute, and this model runs only batches of two rows.
        for _ in 0..6 {
            predictor.observe(2, 20 * MS);
        }
        for rows in 1..=8 {
            let off = predictor.predict(rows).unwrap().as_secs_f64() / (0.010 * f64::from(rows)) - 1.0;
            assert!(off.abs() < 0.1, "{rows} rows: {off}");
        }
    }

    #[test]
    fn a_size_that_is_tried_no_more_is_not_held_slow_for_ever() {
        for profile in [None, Some(profile())] {
            let mut predictor = Predictor::new(profile.as_ref(), Sms(20));
            predictor.observe(1, 5 * MS);
            (0..50).for_each(|_| predictor.observe(8, 900 * MS));
            (0..500).for_each(|_| predictor.observe(1, 5 * MS));
            assert!(predictor.predict(8).unwrap() < 50 * MS, "{:?}", predictor.predict(8));
        }
    }

    #[test]
    fn a_single_slow_batch_is_soon_forgotten() {
        let mut predictor = Predictor::new(Some(&profile()), Sms(20));
        predictor.observe(1, 5 * MS);
        predictor.observe(1, 900 * MS);
        for _ in 0..40 {
            predictor.observe(1, 5 * MS);
        }
        assert!(predictor.predict(1).unwrap() < 6 * MS);
    }

    #[test]
    fn zero_times_and_endless_ones_spoil_nothing_for_ever() {
        for profile in [None, Some(profile())] {
            for nonsense in [Duration::ZERO, Duration::MAX] {
                let mut predictor = Predictor::new(profile.as_ref(), Sms(20));
                (0..5_000).for_each(|_| predictor.observe(2, nonsense));
                assert!(predictor.pace.is_normal());
                (0..500).for_each(|_| predictor.observe(2, 10 * MS));
                let predicted = predictor.predict(2).unwrap();
                assert!(predicted.abs_diff(10 * MS) < MS, "{predicted:?} after {nonsense:?}");
            }
        }
    }

    #[test]
    fn without_a_profile_another_size_says_nothing_of_the_pace() {
        let mut predictor = Predictor::new(None, Sms(20));
        predictor.observe(1, 10 * MS);
        predictor.observe(8, 12 * MS);
        assert!(near(predictor.predict(1), 10 * MS));
        assert!(near(predictor.predict(8), 12 * MS));
    }

    #[test]
    fn hangs_are_far_beyond_the_prediction() {
        let mut predictor = Predictor::new(None, Sms(20));
        assert_eq!(predictor.hang_limit(1), BLIND_HANG_LIMIT);
        predictor.observe(1, MS);
        assert_eq!(predictor.hang_limit(1), MIN_HANG_LIMIT);
        predictor.observe(8, 100 * MS);
        assert_eq!(predictor.hang_limit(8), 2000 * MS);
        predictor.observe(16, Duration::MAX);
        assert_eq!(predictor.hang_limit(16), Duration::MAX);
    }

    #[test]
    fn the_number_of_observed_row_counts_is_bounded() {
        let mut predictor = Predictor::new(None, Sms(20));
        for rows in 1..=1000 {
            predictor.observe(rows, MS * rows);
        }
        assert_eq!(predictor.observed.len(), MAX_ROW_COUNTS);
        assert!(near(predictor.predict(1000), 1000 * MS));
    }
}
