//! A client's connection: what it uses of the budgets, and whether it must make room for others.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use shadowslice_datapath::host_counters::{HostCounters, HostLimit};
use shadowslice_datapath::pipeline::RequestFailure;
use tokio::sync::watch;
use tokio::time::timeout;

use super::budgets::{Amounts, Budget, Budgets, Owner};
use super::request_error::RequestError;
use super::stop::Stop;

/// The time that a surplus connection waits for another connection to end.
const PLACE_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection, as the other connections see it.
#[derive(Debug)]
pub(crate) struct Client {
    pub(super) budgets: Arc<Budgets>,
    own: Amounts,
    peer: Arc<Amounts>,
    calls: AtomicU64,
    /// The time at which the last request ended, in ms since `Budgets::started_at`.
    last_call: AtomicU64,
    state: watch::Sender<ConnectionState>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionState {
    /// The connection has one of the places of `limits.connections`.
    Regular,
    /// The connection has no place, and may only ask for health.
    Surplus,
    /// The connection makes room for another one. Its requests in flight are answered.
    Leaving,
}

impl Client {
    pub(crate) fn new(budgets: &Arc<Budgets>, owner: Owner) -> Self {
        let client = Self {
            budgets: Arc::clone(budgets),
            own: Amounts::default(),
            peer: budgets.used_by(owner),
            calls: AtomicU64::new(0),
            last_call: AtomicU64::new(0),
            state: watch::Sender::new(ConnectionState::Regular),
        };
        client.touch();
        client
    }

    pub(crate) fn counters(&self) -> &HostCounters {
        self.budgets.counters()
    }

    pub(super) fn used(&self, budget: Budget) -> u64 {
        self.own[budget as usize].load(Relaxed)
    }

    pub(crate) fn take(self: &Arc<Self>, budget: Budget, amount: u64) -> Option<BudgetShare> {
        self.add(budget, amount).then(|| BudgetShare {
            client: Arc::clone(self),
            budget,
            amount: AtomicU64::new(amount),
        })
    }

    /// Takes a place among the requests in flight.
    pub(crate) fn admit(self: &Arc<Self>) -> Result<BudgetShare, RequestError> {
        self.take(Budget::Requests, 1).ok_or_else(|| {
            self.counters().count_refusal(HostLimit::InFlight);
            let why =
                "too many requests in flight; try again later, use more connections, or raise limits.in_flight";
            RequestFailure::Unavailable(why.to_owned()).into()
        })
    }

    fn add(&self, budget: Budget, amount: u64) -> bool {
        self.budgets.take(budget, amount, &self.own, &self.peer)
    }

    pub(super) fn begin_call(&self) {
        self.calls.fetch_add(1, Relaxed);
    }

    pub(super) fn end_call(&self) {
        self.calls.fetch_sub(1, Relaxed);
        self.touch();
    }

    /// Records that the connection was used just now.
    pub(crate) fn touch(&self) {
        let now = u64::try_from(self.budgets.started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_call.store(now, Relaxed);
    }

    /// Returns the number of requests that are being read, or whose answers are being written.
    pub(super) fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    pub(super) fn is_busy(&self) -> bool {
        self.used(Budget::Memory) > 0
    }

    /// Returns a key by which idle connections are sorted when connections must make room. The
    /// smallest key leaves first. Returns `None` if the connection cannot leave, or is leaving.
    pub(super) fn idleness(&self) -> Option<(bool, Reverse<usize>, u64)> {
        let is_idle = !self.is_busy() && *self.state.borrow() != ConnectionState::Leaving;
        let connections_of_peer = Reverse(Arc::strong_count(&self.peer));
        is_idle.then(|| (self.used(Budget::Health) > 0, connections_of_peer, self.last_call.load(Relaxed)))
    }

    /// Returns whether the connection is leaving and has no request left.
    pub(super) fn is_about_to_end(&self) -> bool {
        !self.is_busy() && *self.state.borrow() == ConnectionState::Leaving
    }

    pub(super) fn mark_surplus(&self) {
        self.state.send_replace(ConnectionState::Surplus);
    }

    /// Gives the connection a regular place if it is a surplus connection.
    pub(super) fn give_place(&self) {
        self.state.send_if_modified(|state| {
            let was_surplus = *state == ConnectionState::Surplus;
            if was_surplus {
                *state = ConnectionState::Regular;
            }
            was_surplus
        });
    }

    /// Waits until the connection has a regular place. Fails if no other connection ends in time.
    pub(crate) async fn wait_for_place(&self) -> Result<(), RequestError> {
        if *self.state.borrow() != ConnectionState::Surplus {
            return Ok(());
        }
        let mut state_rx = self.state.subscribe();
        match timeout(PLACE_TIMEOUT, state_rx.wait_for(|state| *state != ConnectionState::Surplus)).await {
            Ok(_) => Ok(()),
            Err(_) => {
                self.counters().count_refusal(HostLimit::Connections);
                let why =
                    "too many connections, all of them in use; try again later, or raise limits.connections";
                Err(RequestFailure::Unavailable(why.to_owned()).into())
            }
        }
    }

    /// Makes the connection leave.
    pub(super) fn leave(&self) {
        self.state.send_replace(ConnectionState::Leaving);
    }

    /// Waits until the connection must make room for others.
    pub(crate) async fn must_leave(&self) {
        // The wait cannot fail, because `self` has the sender.
        let _ = self.state.subscribe().wait_for(|state| *state == ConnectionState::Leaving).await;
    }

    /// Waits until serving ends, or the connection must make room for others.
    pub(crate) async fn must_end(&self, stop: Stop) {
        tokio::select! {
            () = stop.begun() => {}
            () = self.must_leave() => {}
        }
    }
}

/// An amount of a budget that a connection has taken. The amount is given back on drop.
#[derive(Debug)]
pub(crate) struct BudgetShare {
    client: Arc<Client>,
    budget: Budget,
    amount: AtomicU64,
}

impl BudgetShare {
    pub(super) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    pub(super) fn budget(&self) -> Budget {
        self.budget
    }

    /// Changes the amount. Returns false, and changes nothing, if the amount is not available.
    /// Several tasks must not call this at the same time.
    pub(super) fn set(&self, amount: u64) -> bool {
        let before = self.amount.load(Relaxed);
        if amount > before && !self.client.add(self.budget, amount - before) {
            return false;
        }
        if amount < before {
            self.give_back(before - amount);
        }
        self.amount.store(amount, Relaxed);
        true
    }

    fn give_back(&self, amount: u64) {
        let Client { budgets, own, peer, .. } = &*self.client;
        budgets.give_back(self.budget, amount, own, peer);
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.give_back(self.amount.load(Relaxed));
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
