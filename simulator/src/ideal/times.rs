//! Execution times on the share grid.

use shadowslice_shared::units::Sms;

use crate::scenario::Served;

/// How long each batch of a model executes with each share of the grid.
#[derive(Debug, Clone)]
pub(super) struct Times {
    batches: usize,
    /// By share, then by batch size, in nanoseconds.
    ns: Vec<u64>,
}

impl Times {
    /// The times of a model with up to `levels` steps, and of no more than `requests` at once. A
    /// model leaves SMs idle that would slow it down, so more SMs never take longer.
    pub(super) fn new(served: &Served, levels: usize, requests: usize) -> Self {
        let batches = served.terms.max_batch.min(u32::try_from(requests).unwrap_or(u32::MAX)).max(1);
        let mut ns: Vec<u64> = Vec::with_capacity(levels * batches as usize);
        for level in 1..=levels {
            for batch in 1..=batches {
                let sms = level as f64 * f64::from(Sms::STEP);
                let time = served.truth.execution.time(batch, sms).as_nanos() as u64;
                let with_less = ns.len().checked_sub(batches as usize).map_or(u64::MAX, |at| ns[at]);
                ns.push(time.max(1).min(with_less));
            }
        }
        Self { batches: batches as usize, ns }
    }

    /// Nanoseconds that one, two, ... requests take with a share of `level` steps, at least 1.
    pub(super) fn of(&self, level: usize) -> &[u64] {
        &self.ns[(level - 1) * self.batches..level * self.batches]
    }

    /// Nanoseconds that `batch` requests take with a share of `level` steps; both at least 1.
    pub(super) fn ns(&self, level: usize, batch: usize) -> u64 {
        self.of(level)[batch - 1]
    }
}
