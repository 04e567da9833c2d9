//! The execution times of batches by shape, for models whose inputs have axes of any size. A batch
//! of a large shape may take a thousand times as long as a batch of a warmed-up shape. The engine
//! may also build kernels for the first batch of each shape.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_policy::latency::Predictor;
use shadowslice_shared::units::Sms;

use crate::pipeline::requests::{Metadata, Shapes};

/// The largest number of shapes that are stored for a worker. If this number is reached, a new
/// shape replaces the oldest shape.
const MAX_SHAPES: usize = 64;

#[derive(Debug)]
pub(crate) struct ShapeTimes {
    sms: Sms,
    seen: VecDeque<(Shapes, Predictor)>,
}

impl ShapeTimes {
    /// Creates an empty table for a worker with `sms` SMs. Returns `None` if all requests of the
    /// model have the same shape.
    pub(crate) fn of(metadata: &Metadata, sms: Sms) -> Option<Self> {
        let open = metadata.inputs.iter().any(|input| metadata.tail(&input.shape).contains(&-1));
        open.then(|| Self { sms, seen: VecDeque::new() })
    }

    pub(crate) fn observe(&mut self, shape: &Shapes, rows: u32, took: Duration) {
        let known = self.seen.iter_mut().find(|(known, _)| known == shape);
        if let Some((_, predictor)) = known {
            return predictor.observe(rows, took);
        }
        self.seen.truncate(MAX_SHAPES - 1);
        let mut predictor = Predictor::new(None, self.sms);
        predictor.observe(rows, took);
        self.seen.push_front((shape.clone(), predictor));
    }

    /// Returns the time after which a batch is considered hung. If no batch of this shape was
    /// executed yet, the limit is that of a model without a profile.
    pub(crate) fn hang_limit(&self, shape: &Shapes, rows: u32) -> Duration {
        match self.seen.iter().find(|(known, _)| known == shape) {
            Some((_, predictor)) => predictor.hang_limit(rows),
            None => Predictor::new(None, self.sms).hang_limit(rows),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_kept_shapes_is_bounded() {
        let mut times = ShapeTimes { sms: Sms(10), seen: VecDeque::new() };
        let shape = |axis: i64| Shapes::from([vec![axis]]);
        for axis in 0..1_000 {
            times.observe(&shape(axis), 1, Duration::from_millis(200));
        }
        assert_eq!(times.seen.len(), MAX_SHAPES);
        let limit = |axis: i64| times.hang_limit(&shape(axis), 1);
        assert_eq!((limit(999), limit(0)), (Duration::from_secs(4), Duration::from_secs(30)));
    }
}
