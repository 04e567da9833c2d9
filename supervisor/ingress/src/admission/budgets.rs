//! What clients share: places among the requests in flight, and bytes of memory.
//!
//! A connection may take no more than it leaves to others, so that it gets half of a pool at most.
//! The last [`LAST`] is for connections that have little, and of that the last half for peers that
//! have little.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::admission::request_error::RequestError;
use shadowslice_datapath::host_counters::{HostCounters, HostLimit};
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::RequestFailure;

/// The part of a pool, as a divisor, that connections with much leave alone.
const LAST: u64 = 8;

/// All connections of a peer have at most so many times what is left.
const PEER_TIMES: u64 = 2 * LAST - 1;

/// The part of a pool, as a divisor, that is little; by [`Pool`] at least so much.
const LITTLE: u64 = 1024;
const LITTLE_AT_LEAST: [u64; 3] = [1, 64 << 10, 64 << 10];

/// Of an IPv6 address: all that is behind it is one host's to choose.
const NETWORK: u128 = !0 << 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pool {
    /// Inferences in flight.
    Requests,
    /// Bytes of requests and answers.
    Memory,
    /// The same of health checks, so that these are answered when all other memory is taken.
    Health,
}

/// By [`Pool`].
type Amounts = [AtomicU64; 3];

/// Whose connections count together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Owner {
    User(u32),
    Address(IpAddr),
}

impl Owner {
    pub(crate) fn of(peer: &Peer) -> Self {
        match peer {
            Peer::Unix { uid, .. } => Self::User(*uid),
            Peer::Tcp { address, .. } => match address.ip().to_canonical() {
                IpAddr::V6(address) => Self::Address(Ipv6Addr::from(u128::from(address) & NETWORK).into()),
                address => Self::Address(address),
            },
        }
    }
}

#[derive(Debug)]
pub(crate) struct Pools {
    sizes: [u64; 3],
    taken: Amounts,
    peers: Mutex<HashMap<Owner, Weak<Amounts>>>,
    tally: HostCounters,
    began: Instant,
}

impl Pools {
    /// `memory` and `health` are bytes.
    pub(crate) fn new(requests: u64, memory: u64, health: u64) -> Self {
        let sizes = [requests, memory, health];
        Self {
            sizes,
            taken: Amounts::default(),
            peers: Mutex::default(),
            tally: HostCounters::default(),
            began: Instant::now(),
        }
    }

    pub(crate) fn size(&self, pool: Pool) -> u64 {
        self.sizes[pool as usize]
    }

    pub(crate) fn taken(&self, pool: Pool) -> u64 {
        self.taken[pool as usize].load(Relaxed)
    }

    pub(crate) fn tally(&self) -> &HostCounters {
        &self.tally
    }

    pub(crate) fn client(self: &Arc<Self>, owner: Owner) -> Client {
        let client = Client {
            pools: Arc::clone(self),
            own: Amounts::default(),
            peer: self.peer(owner),
            calls: AtomicU64::new(0),
            last: AtomicU64::new(0),
            standing: watch::Sender::new(Standing::Regular),
        };
        client.touch();
        client
    }

    fn peer(&self, owner: Owner) -> Arc<Amounts> {
        let mut peers = self.peers.lock();
        if let Some(known) = peers.get(&owner).and_then(Weak::upgrade) {
            return known;
        }
        if peers.len() == peers.capacity() {
            peers.retain(|_, amounts| amounts.strong_count() > 0);
        }
        let new = Arc::new(Amounts::default());
        peers.insert(owner, Arc::downgrade(&new));
        new
    }
}

/// A connection, as the others see it.
#[derive(Debug)]
pub(crate) struct Client {
    pools: Arc<Pools>,
    own: Amounts,
    peer: Arc<Amounts>,
    calls: AtomicU64,
    /// When its last request ended, in ms from `Pools::began`.
    last: AtomicU64,
    standing: watch::Sender<Standing>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It has one of `limits.connections`.
    Regular,
    /// It has none, and may ask for health only.
    Beyond,
    /// It makes room for another one: what it asked is answered.
    Leaving,
}

impl Client {
    pub(crate) fn size(&self, pool: Pool) -> u64 {
        self.pools.size(pool)
    }

    pub(crate) fn tally(&self) -> &HostCounters {
        &self.pools.tally
    }

    pub(crate) fn has(&self, pool: Pool) -> u64 {
        self.own[pool as usize].load(Relaxed)
    }

    pub(crate) fn take(self: &Arc<Self>, pool: Pool, amount: u64) -> Option<Taken> {
        self.add(pool, amount).then(|| Taken {
            client: Arc::clone(self),
            pool,
            amount: AtomicU64::new(amount),
        })
    }

    /// A place among the requests in flight.
    pub(crate) fn admit(self: &Arc<Self>) -> Result<Taken, RequestError> {
        self.take(Pool::Requests, 1).ok_or_else(|| {
            self.tally().count_refusal(HostLimit::InFlight);
            let why =
                "too many requests in flight; try again later, use more connections, or raise limits.in_flight";
            RequestFailure::Unavailable(why.to_owned()).into()
        })
    }

    /// Connections that take at the same moment may together take little more than their parts,
    /// but never more than there is.
    fn add(&self, pool: Pool, amount: u64) -> bool {
        let pool = pool as usize;
        let (own, peer) = (&self.own[pool], &self.peer[pool]);
        let own_then = own.load(Relaxed).saturating_add(amount);
        let peer_then = peer.load(Relaxed).saturating_add(amount);
        let size = self.pools.sizes[pool];
        let has_little = own_then <= (size / LITTLE).max(LITTLE_AT_LEAST[pool]);
        let taken = self.pools.taken[pool].fetch_update(Relaxed, Relaxed, |taken| {
            let free = size.saturating_sub(taken);
            let fair = own_then <= free && peer_then <= free.saturating_mul(PEER_TIMES);
            let leaves = has_little || free.saturating_sub(amount) >= size / LAST;
            (fair && leaves).then_some(taken + amount)
        });
        if taken.is_ok() {
            own.fetch_add(amount, Relaxed);
            peer.fetch_add(amount, Relaxed);
        }
        taken.is_ok()
    }

    fn give_back(&self, pool: Pool, amount: u64) {
        for amounts in [&self.own, &self.peer, &self.pools.taken] {
            amounts[pool as usize].fetch_sub(amount, Relaxed);
        }
    }

    pub(crate) fn begun(&self) {
        self.calls.fetch_add(1, Relaxed);
    }

    pub(crate) fn ended(&self) {
        self.calls.fetch_sub(1, Relaxed);
        self.touch();
    }

    pub(crate) fn touch(&self) {
        let now = u64::try_from(self.pools.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Relaxed);
    }

    /// Requests that are read, or answers that are written, at this moment.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.has(Pool::Memory) > 0
    }

    /// The smallest goes first where connections must make room. `None` if it cannot go, or is
    /// going.
    pub(crate) fn idleness(&self) -> Option<(bool, Reverse<usize>, u64)> {
        let stays = !self.is_busy() && *self.standing.borrow() != Standing::Leaving;
        let connections_of_peer = Reverse(Arc::strong_count(&self.peer));
        stays.then(|| (self.has(Pool::Health) > 0, connections_of_peer, self.last.load(Relaxed)))
    }

    /// Whether it makes room, with nothing left to do.
    pub(crate) fn is_going(&self) -> bool {
        !self.is_busy() && *self.standing.borrow() == Standing::Leaving
    }

    pub(crate) fn is_beyond(&self) {
        self.standing.send_replace(Standing::Beyond);
    }

    pub(crate) fn has_room(&self) {
        self.standing.send_if_modified(|standing| {
            let was_beyond = *standing == Standing::Beyond;
            if was_beyond {
                *standing = Standing::Regular;
            }
            was_beyond
        });
    }

    /// Waits a little until another connection has made room for this one.
    pub(crate) async fn regular(&self) -> Result<(), RequestError> {
        const WITHIN: Duration = Duration::from_secs(2);
        if *self.standing.borrow() != Standing::Beyond {
            return Ok(());
        }
        let mut standing = self.standing.subscribe();
        match timeout(WITHIN, standing.wait_for(|standing| *standing != Standing::Beyond)).await {
            Ok(_) => Ok(()),
            Err(_) => {
                self.tally().count_refusal(HostLimit::Connections);
                let why =
                    "too many connections, all of them in use; try again later, or raise limits.connections";
                Err(RequestFailure::Unavailable(why.to_owned()).into())
            }
        }
    }

    pub(crate) fn leave(&self) {
        self.standing.send_replace(Standing::Leaving);
    }

    /// Returns when the connection is to make room for others.
    pub(crate) async fn left(&self) {
        // The sender is here, so that there is no error.
        let _ = self.standing.subscribe().wait_for(|standing| *standing == Standing::Leaving).await;
    }
}

/// Given back when dropped.
#[derive(Debug)]
pub(crate) struct Taken {
    client: Arc<Client>,
    pool: Pool,
    amount: AtomicU64,
}

impl Taken {
    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    pub(crate) fn pool(&self) -> Pool {
        self.pool
    }

    /// Takes more or gives back, so that there is so much. Not for several tasks at once.
    pub(crate) fn set(&self, amount: u64) -> bool {
        let before = self.amount.load(Relaxed);
        if amount > before && !self.client.add(self.pool, amount - before) {
            return false;
        }
        if amount < before {
            self.client.give_back(self.pool, before - amount);
        }
        self.amount.store(amount, Relaxed);
        true
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.client.give_back(self.pool, self.amount.load(Relaxed));
    }
}

#[cfg(test)]
#[path = "budgets_tests.rs"]
mod tests;
