//! The budgets that clients share: places for requests in flight, and bytes of memory.
//!
//! A connection may take no more than it leaves to others, so it gets at most half of a budget. The
//! last [`LAST_PART`] of a budget is only for connections that use little. The last half of that
//! part is only for peers that use little.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use shadowslice_datapath::host_counters::HostCounters;
use shadowslice_datapath::peer::Peer;
use tokio::time::Instant;

/// The part of a budget, as a divisor, that connections with much leave to others.
const LAST_PART: u64 = 8;

/// The factor by which all connections of a peer may exceed what is left.
const PEER_TIMES: u64 = 2 * LAST_PART - 1;

/// The part of a budget, as a divisor, that counts as little.
const LITTLE: u64 = 1024;

/// The amount that counts as little in any case, by [`Budget`].
const LITTLE_AT_LEAST: [u64; 3] = [1, 64 << 10, 64 << 10];

/// The part of an IPv6 address that identifies a network. A host may choose all other bits itself.
const NETWORK: u128 = !0 << 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Budget {
    /// The places for inferences in flight.
    Requests,
    /// The bytes of requests and answers.
    Memory,
    /// The bytes of health checks, which are answered even if all other memory is taken.
    Health,
}

/// Amounts by [`Budget`].
pub(super) type Amounts = [AtomicU64; 3];

/// The user or host whose connections count together.
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
pub(crate) struct Budgets {
    sizes: [u64; 3],
    used: Amounts,
    pub(super) peers: Mutex<HashMap<Owner, Weak<Amounts>>>,
    counters: HostCounters,
    pub(super) started_at: Instant,
}

impl Budgets {
    /// Creates budgets of these sizes. `memory` and `health` are in bytes.
    pub(crate) fn new(requests: u64, memory: u64, health: u64) -> Self {
        Self {
            sizes: [requests, memory, health],
            used: Amounts::default(),
            peers: Mutex::default(),
            counters: HostCounters::default(),
            started_at: Instant::now(),
        }
    }

    pub(crate) fn size(&self, budget: Budget) -> u64 {
        self.sizes[budget as usize]
    }

    pub(crate) fn used(&self, budget: Budget) -> u64 {
        self.used[budget as usize].load(Relaxed)
    }

    pub(crate) fn counters(&self) -> &HostCounters {
        &self.counters
    }

    /// Returns the amounts that all connections of an owner use together.
    pub(super) fn used_by(&self, owner: Owner) -> Arc<Amounts> {
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

    /// Takes an amount for a connection, which uses `own`, of a peer, which uses `peer`. Returns
    /// false if the amount is not available to them. Connections that take at the same moment may
    /// together exceed their parts a little, but never the budget.
    pub(super) fn take(&self, budget: Budget, amount: u64, own: &Amounts, peer: &Amounts) -> bool {
        let budget = budget as usize;
        let (own, peer) = (&own[budget], &peer[budget]);
        let own_then = own.load(Relaxed).saturating_add(amount);
        let peer_then = peer.load(Relaxed).saturating_add(amount);
        let size = self.sizes[budget];
        let has_little = own_then <= (size / LITTLE).max(LITTLE_AT_LEAST[budget]);
        let taken = self.used[budget].fetch_update(Relaxed, Relaxed, |used| {
            let free = size.saturating_sub(used);
            let fair = own_then <= free && peer_then <= free.saturating_mul(PEER_TIMES);
            let leaves = has_little || free.saturating_sub(amount) >= size / LAST_PART;
            (fair && leaves).then_some(used + amount)
        });
        if taken.is_ok() {
            own.fetch_add(amount, Relaxed);
            peer.fetch_add(amount, Relaxed);
        }
        taken.is_ok()
    }

    pub(super) fn give_back(&self, budget: Budget, amount: u64, own: &Amounts, peer: &Amounts) {
        for amounts in [own, peer, &self.used] {
            amounts[budget as usize].fetch_sub(amount, Relaxed);
        }
    }
}
