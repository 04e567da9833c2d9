//! The memory of a request and then of its answer, which counts against `limits.memory`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use parking_lot::Mutex;
use shadowslice_datapath::host_counters::HostLimit;
use shadowslice_datapath::pipeline::{Pieces, RequestFailure};

use super::budgets::Budget;
use super::client::{BudgetShare, Client};
use super::deliveries::Deliveries;
use super::min_rate::{MIN_CONNECTION_RATE, MIN_STREAM_RATE};
use super::request_error::RequestError;

/// The bytes that each request takes: its head, its tasks, and [`SMALL`] bytes of content. A small
/// request takes no more.
const BASE: u64 = 32 << 10;
const SMALL: u64 = 16 << 10;

/// The part of [`BASE`] that is for the request's head, in bytes.
const HEAD: u64 = 8 << 10;

/// The size in bytes from which an allocation is tried first. The request then fails if the system
/// has too little memory, whereas a library's allocation would end the process.
const TRIED: u64 = 1 << 20;

tokio::task_local! {
    /// The permit of the gRPC call that a task serves. Decoders cannot get it in another way.
    pub(crate) static CALL_PERMIT: Arc<MemoryPermit>;
}

#[derive(Debug)]
pub(crate) struct MemoryPermit {
    share: BudgetShare,
    used: AtomicU64,
    /// The bytes that the permit takes at least: [`BASE`], and more for a long head.
    base: u64,
    /// The deliveries of the answers that are written next.
    deliveries: Mutex<Deliveries>,
}

impl MemoryPermit {
    /// Takes memory for a request whose head has `head` bytes.
    pub(crate) fn new(client: &Arc<Client>, budget: Budget, head: usize) -> Result<Arc<Self>, RequestError> {
        let base = BASE + (head as u64).saturating_sub(HEAD);
        let share = client.take(budget, base).ok_or_else(|| exhausted(client, budget))?;
        client.begin_call();
        Ok(Arc::new(Self { share, used: AtomicU64::new(0), base, deliveries: Mutex::default() }))
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        self.share.client()
    }

    /// Returns the minimum rate of one body, in bytes per second. The streams of a connection share
    /// the connection's rate.
    pub(crate) fn min_rate(&self) -> f64 {
        (MIN_CONNECTION_RATE / self.client().calls() as f64).max(MIN_STREAM_RATE)
    }

    /// Adds answers that leave with the next bytes.
    pub(crate) fn add_deliveries(&self, deliveries: Deliveries) {
        self.deliveries.lock().add(deliveries);
    }

    /// Takes the answers that leave with the next bytes.
    pub(crate) fn take_deliveries(&self) -> Deliveries {
        std::mem::take(&mut self.deliveries.lock())
    }

    /// Takes more memory. Call this before the bytes are allocated.
    pub(crate) fn grow(&self, bytes: usize) -> Result<(), RequestError> {
        self.set(self.used.load(Relaxed).saturating_add(bytes as u64))?;
        if bytes as u64 >= TRIED { try_allocate(bytes).map(drop) } else { Ok(()) }
    }

    pub(crate) fn shrink_to(&self, bytes: usize) {
        // Giving back memory cannot fail.
        let _ = self.set(self.used.load(Relaxed).min(bytes as u64));
    }

    /// Gives back all memory, so that the connection can count as idle, until the permit grows
    /// again.
    pub(crate) fn release(&self) {
        self.share.set(0);
        self.used.store(0, Relaxed);
    }

    /// Changes the size to `bytes`, independently of the size before.
    pub(crate) fn replace(&self, bytes: usize) -> Result<(), RequestError> {
        self.set(bytes as u64)
    }

    fn set(&self, used: u64) -> Result<(), RequestError> {
        if !self.share.set(used.saturating_add(self.base - SMALL).max(self.base)) {
            return Err(exhausted(self.client(), self.share.budget()));
        }
        self.used.store(used, Relaxed);
        Ok(())
    }

    /// Takes memory for a new buffer of this capacity.
    pub(crate) fn buffer(&self, bytes: usize) -> Result<Vec<u8>, RequestError> {
        self.set(self.used.load(Relaxed).saturating_add(bytes as u64))?;
        try_allocate(bytes)
    }

    /// Joins the pieces. Copies the bytes if there is more than one piece.
    pub(crate) fn join(&self, pieces: Pieces) -> Result<Bytes, RequestError> {
        let pieces = match pieces.into_one() {
            Ok(bytes) => return Ok(bytes),
            Err(pieces) => pieces,
        };
        let before = self.used.load(Relaxed);
        let mut whole = self.buffer(pieces.len())?;
        pieces.iter().for_each(|piece| whole.extend_from_slice(piece));
        self.set(before)?;
        Ok(whole.into())
    }
}

impl Drop for MemoryPermit {
    fn drop(&mut self) {
        self.client().end_call();
    }
}

fn exhausted(client: &Client, budget: Budget) -> RequestError {
    client.counters().count_refusal(HostLimit::Memory);
    let size = client.budgets.size(budget);
    RequestFailure::Exhausted(format!(
        "the memory for requests and answers is used up ({size} bytes, at most half for one connection); try again later, send less at a time, or raise limits.memory"
    ))
    .into()
}

/// Allocates an empty buffer. Fails if the system has too little memory.
pub(crate) fn try_allocate(bytes: usize) -> Result<Vec<u8>, RequestError> {
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(bytes).map_err(|_| RequestFailure::no_memory(bytes))?;
    Ok(buffer)
}

/// Returns a permit that never runs out.
#[cfg(test)]
pub(crate) fn unlimited() -> Arc<MemoryPermit> {
    use super::budgets::{Budgets, Owner};
    let budgets = Arc::new(Budgets::new(1, 1 << 40, 0));
    MemoryPermit::new(&Arc::new(Client::new(&budgets, Owner::User(0))), Budget::Memory, 0).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::budgets::{Budgets, Owner};

    fn client() -> Arc<Client> {
        Arc::new(Client::new(&Arc::new(Budgets::new(1, 1 << 20, 0)), Owner::User(0)))
    }

    #[test]
    fn small_requests_take_the_same_and_large_ones_what_they_use() {
        let client = client();
        let permit = MemoryPermit::new(&client, Budget::Memory, 0).unwrap();
        permit.grow(10_000).unwrap();
        assert_eq!(client.used(Budget::Memory), BASE);
        permit.grow(90_000).unwrap();
        assert_eq!(client.used(Budget::Memory), 100_000 + BASE - SMALL);
        let Err(RequestError::Failed(RequestFailure::Exhausted(why))) = permit.grow(1 << 20) else {
            panic!()
        };
        assert!(why.contains("limits.memory"), "{why}");
        permit.shrink_to(5000);
        permit.replace(7).unwrap();
        assert_eq!(client.used(Budget::Memory), BASE);
        drop(permit);
        assert_eq!(client.used(Budget::Memory), 0);
    }

    #[test]
    fn a_long_head_takes_memory_of_its_own() {
        let client = client();
        let head = 60 << 10;
        let permit = MemoryPermit::new(&client, Budget::Memory, head).unwrap();
        let with_head = BASE + head as u64 - HEAD;
        assert_eq!(client.used(Budget::Memory), with_head);
        permit.grow(100_000).unwrap();
        assert_eq!(client.used(Budget::Memory), with_head - SMALL + 100_000);
        permit.replace(0).unwrap();
        assert_eq!(client.used(Budget::Memory), with_head);
    }

    #[test]
    fn memory_that_the_system_does_not_have_fails_the_request_alone() {
        let why = unlimited().grow(1 << 39);
        assert!(
            matches!(try_allocate(usize::MAX / 2), Err(RequestError::Failed(RequestFailure::Exhausted(_)))),
            "{why:?}"
        );
    }

    #[test]
    fn pieces_are_joined_and_one_piece_is_not_copied() {
        let permit = unlimited();
        let mut pieces = Pieces::from(vec![1, 2]);
        let at = pieces.iter().next().unwrap().as_ptr();
        assert_eq!(permit.join(pieces.clone()).unwrap().as_ptr(), at);
        pieces.push(vec![3].into());
        assert_eq!(permit.join(pieces).unwrap(), [1, 2, 3][..]);
    }
}
