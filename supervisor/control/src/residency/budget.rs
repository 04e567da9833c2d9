//! The memory of a GPU that is left for the weights of models. All memory is in bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use shadowslice_shared::profile::ProcessMemory;

use crate::nvml::Usage;

/// The budget of a GPU. It distinguishes the weights of models that can sleep from the other memory of
/// their workers, which stays in use.
#[derive(Debug)]
pub(super) struct WeightsBudget {
    /// The maximum memory of all workers. `None` means all memory that is free.
    limit: Option<u64>,
    /// The other memory of the workers and, without a limit, all memory of other programs.
    overhead: i128,
    /// The memory that workers may use at the last reading.
    total: Option<i128>,
    /// The models that were known at the last update, with their weights on the GPU.
    known: BTreeMap<usize, u64>,
    changed_at: Instant,
}

/// A model whose weights are on the GPU or sleep.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelWeights {
    pub(super) id: usize,
    /// The weights on the GPU; 0 if the model sleeps.
    pub(super) bytes: u64,
}

/// The memory of a worker on an emulated GPU, according to the model's profile.
#[derive(Debug, Clone, Copy)]
pub(super) struct EmulatedWorker {
    pub(super) pid: i32,
    pub(super) memory: ProcessMemory,
    /// True if the weights can be released, so that [`ModelWeights`] contains them.
    pub(super) can_sleep: bool,
}

impl WeightsBudget {
    pub(super) fn new(limit: Option<u64>, now: Instant) -> Self {
        Self { limit, overhead: 0, total: limit.map(i128::from), known: BTreeMap::new(), changed_at: now }
    }

    /// Records which weights are on the GPU.
    pub(super) fn update(&mut self, models: &[ModelWeights], now: Instant) {
        let current: BTreeMap<usize, u64> = models.iter().map(|model| (model.id, model.bytes)).collect();
        let on_gpu = |(id, bytes): (&usize, &u64)| (*id, *bytes > 0);
        if current.iter().map(on_gpu).eq(self.known.iter().map(on_gpu)) {
            // Only the sizes of workers have changed, because of the last reading.
            self.known = current;
            return;
        }
        // The last reading counts the weights of a new model as other memory.
        let is_new = |id: &usize| !self.known.contains_key(id);
        let new: u64 = current.iter().filter(|(id, _)| is_new(id)).map(|(_, bytes)| bytes).sum();
        self.overhead = (self.overhead - i128::from(new)).max(0);
        (self.known, self.changed_at) = (current, now);
    }

    /// Takes a reading of the driver into account, unless the weights on the GPU have changed since.
    pub(super) fn read(&mut self, usage: &Usage, read_at: Instant, pids: &BTreeSet<i32>) {
        if read_at <= self.changed_at {
            return;
        }
        let used: u64 = pids.iter().filter_map(|pid| usage.bytes_of(*pid)).sum();
        let possible = i128::from(usage.memory.free) + i128::from(used);
        self.total = Some(self.limit.map_or(possible, |limit| possible.min(i128::from(limit))));
        self.overhead = (i128::from(used) - self.weights()).max(0);
    }

    /// Takes the workers of an emulated GPU into account. Workers of one process share a context.
    pub(super) fn emulate(&mut self, workers: &[EmulatedWorker]) {
        let contexts: BTreeMap<i32, u64> =
            workers.iter().map(|worker| (worker.pid, worker.memory.context)).collect();
        let other = |worker: &EmulatedWorker| {
            let weights = if worker.can_sleep { 0 } else { worker.memory.weights };
            i128::from(worker.memory.activations) + i128::from(weights)
        };
        let contexts: i128 = contexts.into_values().map(i128::from).sum();
        self.overhead = contexts + workers.iter().map(other).sum::<i128>();
    }

    fn weights(&self) -> i128 {
        self.known.values().copied().map(i128::from).sum()
    }

    /// Returns the memory that no worker uses, except for `reserved` bytes for workers that start. It is
    /// negative if the workers use too much. Returns `None` if nothing limits the memory.
    pub(super) fn free(&self, reserved: u64) -> Option<i128> {
        Some(self.total? - self.overhead - self.weights() - i128::from(reserved))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::nvml::{GpuProcess, Memory, Power};

    const OWN: i32 = 7;

    fn usage(own: u64, free: u64) -> Usage {
        Usage {
            memory: Memory { used: 100 - free, free, total: 100 },
            utilisation_percent: None,
            power: Power::default(),
            processes: vec![
                GpuProcess { pid: 7, bytes: Some(own) },
                GpuProcess { pid: 8, bytes: Some(100 - free - own) },
            ],
        }
    }

    fn weights(sizes: &[u64]) -> Vec<ModelWeights> {
        sizes.iter().enumerate().map(|(id, &bytes)| ModelWeights { id, bytes }).collect()
    }

    /// Returns a budget after a reading in which the own process uses 40 bytes, 30 of them weights.
    fn read(limit: Option<u64>) -> (WeightsBudget, Instant) {
        let begin = Instant::now();
        let mut budget = WeightsBudget::new(limit, begin);
        budget.update(&weights(&[10, 20]), begin + Duration::from_secs(1));
        let at = begin + Duration::from_secs(2);
        budget.read(&usage(40, 50), at, &BTreeSet::from([OWN]));
        (budget, at)
    }

    #[test]
    fn what_is_free_is_left_or_what_the_limit_leaves() {
        assert_eq!(read(None).0.free(0), Some(50));
        assert_eq!(read(None).0.free(5), Some(45));
        assert_eq!(read(Some(60)).0.free(0), Some(20));
        assert_eq!(read(Some(1_000)).0.free(0), Some(50), "other programs use the rest");
        assert_eq!(read(Some(30)).0.free(0), Some(-10));
        assert_eq!(WeightsBudget::new(None, Instant::now()).free(0), None);
    }

    #[test]
    fn sleep_counts_at_once_and_an_older_reading_does_not() {
        let (mut budget, at) = read(None);
        budget.update(&weights(&[0, 20]), at + Duration::from_secs(1));
        assert_eq!(budget.free(0), Some(60));
        budget.read(&usage(40, 50), at, &BTreeSet::from([OWN]));
        assert_eq!(budget.free(0), Some(60));
        budget.read(&usage(30, 60), at + Duration::from_secs(2), &BTreeSet::from([OWN]));
        assert_eq!(budget.free(0), Some(60));
    }

    #[test]
    fn another_size_of_a_worker_does_not_make_its_reading_outdated() {
        let (mut budget, at) = read(None);
        let later = at + Duration::from_secs(1);
        budget.update(&weights(&[15, 20]), later + Duration::from_secs(1));
        budget.read(&usage(45, 45), later, &BTreeSet::from([OWN]));
        assert_eq!(budget.free(0), Some(45));
    }

    #[test]
    fn the_weights_of_a_new_model_are_not_counted_twice() {
        let (mut budget, at) = read(None);
        // The reading already contains the model that has just loaded.
        budget.read(&usage(48, 42), at + Duration::from_secs(1), &BTreeSet::from([OWN]));
        assert_eq!(budget.free(0), Some(42));
        budget.update(&weights(&[10, 20, 8]), at + Duration::from_secs(2));
        assert_eq!(budget.free(0), Some(42));
    }

    #[test]
    fn workers_of_one_emulated_process_share_a_context() {
        let memory = ProcessMemory { context: 100, weights: 50, activations: 7 };
        let worker = |pid, can_sleep| EmulatedWorker { pid, memory, can_sleep };
        let mut budget = WeightsBudget::new(Some(1_000), Instant::now());
        budget.update(&weights(&[50, 0]), Instant::now());
        budget.emulate(&[worker(1, true), worker(1, true), worker(2, false)]);
        assert_eq!(budget.free(0), Some(1_000 - 50 - 2 * 100 - 3 * 7 - 50));
    }
}
