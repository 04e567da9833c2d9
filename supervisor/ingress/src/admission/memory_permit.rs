//! The memory of a request and then of its answer, counted against `limits.memory`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::admission::budgets::{Client, Pool, Taken};
use crate::admission::deliveries::Deliveries;
use crate::admission::request_error::RequestError;
use shadowslice_datapath::host_counters::HostLimit;
use shadowslice_datapath::pipeline::{Pieces, RequestFailure};

/// In bytes, what every request takes, and all that a small one does: its head, its tasks, and
/// [`SMALL`] more.
const BASE: u64 = 32 << 10;
const SMALL: u64 = 16 << 10;

/// The part of [`BASE`] that is for the request's head, in bytes.
const HEAD: u64 = 8 << 10;

/// In bytes: for more it is tried whether the system has them, so that a request fails where a
/// library's allocation would end the process.
const TRIED: u64 = 1 << 20;

tokio::task_local! {
    /// Of the gRPC call that a task serves, for decoders, which cannot be told otherwise.
    pub(crate) static RESERVED: Arc<Reserved>;
}

#[derive(Debug)]
pub(crate) struct Reserved {
    taken: Taken,
    used: AtomicU64,
    /// The bytes that it takes at least: [`BASE`], and more for a long head.
    base: u64,
    /// The deliveries of the answers that are written next.
    deliveries: Mutex<Deliveries>,
}

impl Reserved {
    pub(crate) fn new(client: &Arc<Client>, pool: Pool) -> Result<Arc<Self>, RequestError> {
        Self::with_head(client, pool, 0)
    }

    /// Takes memory for a request whose head has `head` bytes.
    pub(crate) fn with_head(
        client: &Arc<Client>,
        pool: Pool,
        head: usize,
    ) -> Result<Arc<Self>, RequestError> {
        let base = BASE + (head as u64).saturating_sub(HEAD);
        let taken = client.take(pool, base).ok_or_else(|| spent(client, pool))?;
        client.begun();
        Ok(Arc::new(Self { taken, used: AtomicU64::new(0), base, deliveries: Mutex::default() }))
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        self.taken.client()
    }

    /// Adds answers that leave with the next bytes.
    pub(crate) fn carry(&self, deliveries: Deliveries) {
        self.deliveries.lock().add(deliveries);
    }

    /// Takes the answers that leave with the next bytes.
    pub(crate) fn deliveries(&self) -> Deliveries {
        std::mem::take(&mut self.deliveries.lock())
    }

    /// Before the bytes are there.
    pub(crate) fn grow(&self, bytes: usize) -> Result<(), RequestError> {
        self.set(self.used.load(Relaxed).saturating_add(bytes as u64))?;
        if bytes as u64 >= TRIED { room(bytes).map(drop) } else { Ok(()) }
    }

    pub(crate) fn shrink(&self, bytes: usize) {
        // To give back cannot fail.
        let _ = self.set(self.used.load(Relaxed).saturating_sub(bytes as u64));
    }

    pub(crate) fn shrink_to(&self, bytes: usize) {
        self.shrink(usize::try_from(self.used.load(Relaxed)).unwrap_or(usize::MAX).saturating_sub(bytes));
    }

    /// It has nothing until it is given bytes again, so that its connection may count as idle.
    pub(crate) fn rest(&self) {
        self.taken.set(0);
        self.used.store(0, Relaxed);
    }

    /// From now on it has so many bytes, whatever it had before.
    pub(crate) fn replace(&self, bytes: usize) -> Result<(), RequestError> {
        self.set(bytes as u64)
    }

    fn set(&self, used: u64) -> Result<(), RequestError> {
        if !self.taken.set(used.saturating_add(self.base - SMALL).max(self.base)) {
            return Err(spent(self.taken.client(), self.taken.pool()));
        }
        self.used.store(used, Relaxed);
        Ok(())
    }

    /// An empty buffer for so many bytes.
    pub(crate) fn buffer(&self, bytes: usize) -> Result<Vec<u8>, RequestError> {
        self.set(self.used.load(Relaxed).saturating_add(bytes as u64))?;
        room(bytes)
    }

    /// All bytes in one piece; they are copied if they were in several.
    pub(crate) fn joined(&self, pieces: Pieces) -> Result<Bytes, RequestError> {
        let pieces = match pieces.into_one() {
            Ok(bytes) => return Ok(bytes),
            Err(pieces) => pieces,
        };
        let mut whole = self.buffer(pieces.len())?;
        pieces.iter().for_each(|piece| whole.extend_from_slice(piece));
        self.shrink(pieces.len());
        Ok(whole.into())
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.client().ended();
    }
}

fn spent(client: &Client, pool: Pool) -> RequestError {
    client.tally().count_refusal(HostLimit::Memory);
    let size = client.size(pool);
    RequestFailure::Exhausted(format!(
        "the memory for requests and answers is used up ({size} bytes, at most half for one connection); try again later, send less at a time, or raise limits.memory"
    ))
    .into()
}

/// An empty buffer, if the system has that much.
pub(crate) fn room(bytes: usize) -> Result<Vec<u8>, RequestError> {
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(bytes).map_err(|_| RequestFailure::no_memory(bytes))?;
    Ok(buffer)
}

#[cfg(test)]
pub(crate) fn enough() -> Arc<Reserved> {
    use crate::admission::budgets::{Owner, Pools};
    let pools = Arc::new(Pools::new(1, 1 << 40, 0));
    Reserved::new(&Arc::new(pools.client(Owner::User(0))), Pool::Memory).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::budgets::{Owner, Pools};

    #[test]
    fn small_requests_take_the_same_and_large_ones_what_they_use() {
        let client = Arc::new(Arc::new(Pools::new(1, 1 << 20, 0)).client(Owner::User(0)));
        let reserved = Reserved::new(&client, Pool::Memory).unwrap();
        reserved.grow(10_000).unwrap();
        assert_eq!(client.has(Pool::Memory), BASE);
        reserved.grow(90_000).unwrap();
        assert_eq!(client.has(Pool::Memory), 100_000 + BASE - SMALL);
        let Err(RequestError::Failed(RequestFailure::Exhausted(why))) = reserved.grow(1 << 20) else {
            panic!()
        };
        assert!(why.contains("limits.memory"), "{why}");
        reserved.shrink(95_000);
        reserved.replace(7).unwrap();
        assert_eq!(client.has(Pool::Memory), BASE);
        drop(reserved);
        assert_eq!(client.has(Pool::Memory), 0);
    }

    #[test]
    fn a_long_head_takes_memory_of_its_own() {
        let client = Arc::new(Arc::new(Pools::new(1, 1 << 20, 0)).client(Owner::User(0)));
        let head = 60 << 10;
        let reserved = Reserved::with_head(&client, Pool::Memory, head).unwrap();
        let with_head = BASE + head as u64 - HEAD;
        assert_eq!(client.has(Pool::Memory), with_head);
        reserved.grow(100_000).unwrap();
        assert_eq!(client.has(Pool::Memory), with_head - SMALL + 100_000);
        reserved.replace(0).unwrap();
        assert_eq!(client.has(Pool::Memory), with_head);
    }

    #[test]
    fn memory_that_the_system_does_not_have_fails_the_request_alone() {
        let why = enough().grow(1 << 39);
        assert!(
            matches!(room(usize::MAX / 2), Err(RequestError::Failed(RequestFailure::Exhausted(_)))),
            "{why:?}"
        );
    }

    #[test]
    fn pieces_are_joined_and_one_piece_is_not_copied() {
        let reserved = enough();
        let mut pieces = Pieces::from(vec![1, 2]);
        let at = pieces.iter().next().unwrap().as_ptr();
        assert_eq!(reserved.joined(pieces.clone()).unwrap().as_ptr(), at);
        pieces.push(vec![3].into());
        assert_eq!(reserved.joined(pieces).unwrap(), [1, 2, 3][..]);
    }
}
