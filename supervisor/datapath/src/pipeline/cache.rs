//! The cache of a model's answers. A request with the same inputs as an earlier one gets the same answer
//! without a worker. The operator enables the cache for models whose answers depend only on their inputs.

use std::sync::Arc;
use std::time::Duration;

use lru::LruCache;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use shadowslice_shared::units::Timestamp;

use super::figures::{CountedRefusal, RequestTimes, Total};
use super::requests::{
    Answers, Delivery, RequestArrival, RequestFailure, RequestInput, RequestOutput, UnwrittenAnswer,
};
use super::state::PipelineState;
use super::{Pipeline, trace_event};

/// The memory of an entry besides the data of its outputs, in bytes. It is a generous estimate.
const ENTRY_BYTES: u64 = 512;

/// The SHA-256 hash of a request's inputs. Clients cannot construct two requests with the same hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct InputHash([u8; 32]);

/// The answers to the most recent requests.
#[derive(Debug)]
pub(crate) struct ResponseCache {
    /// The maximum size of all entries, in bytes.
    limit: u64,
    state: Mutex<CacheState>,
}

#[derive(Debug)]
struct CacheState {
    answers: LruCache<InputHash, Vec<RequestOutput>>,
    bytes: u64,
    counts: CacheCounts,
}

/// The requests that the cache answered, and those that it did not, with the time of the searches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheCounts {
    pub hits: Total,
    pub misses: Total,
}

impl ResponseCache {
    pub(crate) fn new(limit: u64) -> Self {
        let answers = LruCache::unbounded();
        Self { limit, state: Mutex::new(CacheState { answers, bytes: 0, counts: CacheCounts::default() }) }
    }

    pub(crate) fn counts(&self) -> CacheCounts {
        self.state.lock().counts
    }

    fn find(&self, inputs: &InputHash) -> Option<Vec<RequestOutput>> {
        self.state.lock().answers.get(inputs).cloned()
    }

    /// Counts a search that took this long.
    fn count(&self, is_hit: bool, took: Duration) {
        let CacheCounts { hits, misses } = &mut self.state.lock().counts;
        if is_hit { hits.add(took) } else { misses.add(took) }
    }

    /// Stores an answer, and removes the answers that were used least recently.
    fn store(&self, inputs: InputHash, outputs: Vec<RequestOutput>) {
        let added = size(&outputs);
        if added > self.limit {
            return;
        }
        let mut state = self.state.lock();
        let replaced = state.answers.put(inputs, outputs);
        state.bytes = state.bytes + added - replaced.as_deref().map_or(0, size);
        while state.bytes > self.limit {
            let Some((_, removed)) = state.answers.pop_lru() else { return };
            state.bytes -= size(&removed);
        }
    }
}

fn size(outputs: &[RequestOutput]) -> u64 {
    outputs.iter().map(|output| output.data.len() as u64).sum::<u64>() + ENTRY_BYTES
}

/// Hashes the shapes and the data of inputs, each with its length.
fn hash(inputs: &[RequestInput]) -> InputHash {
    let mut hasher = Sha256::new();
    for input in inputs {
        hasher.update(input.shape.len().to_le_bytes());
        input.shape.iter().for_each(|axis| hasher.update(axis.to_le_bytes()));
        hasher.update(input.data.len().to_le_bytes());
        input.data.iter().for_each(|piece| hasher.update(piece));
    }
    InputHash(hasher.finalize().into())
}

/// The result of a search in a model's cache.
#[derive(Debug)]
pub(crate) enum CacheLookup {
    /// The model has no cache.
    Off,
    /// The cache has no answer to these inputs. The worker's answer must be
    /// [stored](Pipeline::store_answer).
    Missed(InputHash),
    /// The cache has the answer. It is refused if the model is not ready.
    Found(Result<Answers, RequestFailure>),
}

impl Pipeline {
    /// Looks for the answer to a request in the model's cache.
    pub(crate) fn look_up(
        self: &Arc<Self>,
        inputs: &[RequestInput],
        arrival: &RequestArrival,
    ) -> CacheLookup {
        let Some(cache) = self.cache.as_ref().filter(|_| !self.streams()) else { return CacheLookup::Off };
        let began = self.clock.now();
        let inputs_hash = hash(inputs);
        let found = cache.find(&inputs_hash);
        cache.count(found.is_some(), self.clock.now().since(began));
        match found {
            Some(outputs) => CacheLookup::Found(self.answer_without_worker(outputs, inputs, arrival, began)),
            None => CacheLookup::Missed(inputs_hash),
        }
    }

    pub(crate) fn store_answer(&self, inputs: InputHash, outputs: &[RequestOutput]) {
        if let Some(cache) = &self.cache {
            cache.store(inputs, outputs.to_vec());
        }
    }

    fn answer_without_worker(
        self: &Arc<Self>,
        outputs: Vec<RequestOutput>,
        inputs: &[RequestInput],
        arrival: &RequestArrival,
        received: Timestamp,
    ) -> Result<Answers, RequestFailure> {
        let journal = arrival.journal.as_ref();
        let rows = self.metadata_or_refuse(journal)?.rows(inputs);
        let answered = self.clock.now();
        let arrived = answered - arrival.began.elapsed();
        self.change(|state| state.accept_without_worker(rows, answered)).inspect_err(|_| {
            trace_event::record_refusal(journal, CountedRefusal::NotReady);
        })?;
        let spent = RequestTimes {
            latency: answered.since(arrived),
            receiving: received.since(arrived),
            ..RequestTimes::default()
        };
        let delivery =
            Delivery::new(UnwrittenAnswer { pipeline: Arc::clone(self), arrived, answered, spent });
        Ok(Answers::single(outputs, delivery))
    }
}

impl PipelineState {
    /// Counts a request that the cache answers, or refuses it if the model is not ready.
    fn accept_without_worker(&mut self, rows: u32, now: Timestamp) -> Result<(), RequestFailure> {
        if self.gate.open().is_err() {
            let failure = self.not_ready();
            self.count_refusal(CountedRefusal::NotReady, rows, now);
            return Err(failure);
        }
        self.scheduler.record_arrival(rows);
        self.stats.accepted += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn input(shape: &[i64], data: &[u8]) -> RequestInput {
        RequestInput { shape: shape.to_vec(), data: data.to_vec().into() }
    }

    fn outputs(bytes: usize) -> Vec<RequestOutput> {
        vec![RequestOutput { shape: vec![1], data: Bytes::from(vec![7; bytes]) }]
    }

    #[test]
    fn the_hash_depends_on_shapes_lengths_and_data() {
        let all = [
            vec![input(&[1, 4], &[1, 2, 3, 4])],
            vec![input(&[4, 1], &[1, 2, 3, 4])],
            vec![input(&[1, 4], &[1, 2, 3, 5])],
            vec![input(&[1, 2], &[1, 2]), input(&[1, 2], &[3, 4])],
            vec![input(&[1, 4], &[1, 2, 3]), input(&[1, 2], &[4])],
            vec![],
        ];
        for (one, inputs) in all.iter().enumerate() {
            for (other, others) in all.iter().enumerate() {
                assert_eq!(hash(inputs) == hash(others), one == other);
            }
        }
        let mut pieces = input(&[1, 4], &[1, 2]);
        pieces.data.push(Bytes::from_static(&[3, 4]));
        assert_eq!(hash(&[pieces]), hash(&all[0]), "the pieces do not matter");
    }

    #[test]
    fn the_least_recently_used_answers_make_room_and_the_limit_holds() {
        let cache = ResponseCache::new(3 * (100 + ENTRY_BYTES));
        let keys = [1, 2, 3, 4].map(|byte| hash(&[input(&[1], &[byte])]));
        keys[..3].iter().for_each(|&key| cache.store(key, outputs(100)));
        assert_eq!(cache.find(&keys[0]), Some(outputs(100)));
        cache.store(keys[3], outputs(100));
        assert_eq!(keys.map(|key| cache.find(&key).is_some()), [true, false, true, true]);
        cache.store(keys[0], outputs(50));
        cache.store(keys[1], outputs(10_000));
        assert_eq!(keys.map(|key| cache.find(&key).is_some()), [true, false, true, true], "it is too large");
        let state = cache.state.lock();
        assert_eq!(state.bytes, state.answers.iter().map(|(_, outputs)| size(outputs)).sum::<u64>());
        assert!(state.bytes <= cache.limit);
    }
}
