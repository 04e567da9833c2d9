//! The open connections, and the choice of those that leave when there are too many.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::client::Client;

/// The number of surplus connections, which exceed `limits.connections`. They may ask for health.
/// They may ask for everything else as soon as other connections have ended.
const SURPLUS: usize = 32;

/// The time that an idle connection has to end when another one needs its place.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// The interval between attempts to find an idle connection while even the surplus is used up.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Connections {
    limit: usize,
    open: Mutex<OpenConnections>,
    count_tx: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct OpenConnections {
    /// The clients, the oldest first.
    clients: BTreeMap<u64, Arc<Client>>,
    next: u64,
    /// True if there may be surplus connections.
    may_have_surplus: bool,
}

impl Connections {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, open: Mutex::default(), count_tx: watch::Sender::new(0) })
    }

    /// Waits until there is room for a connection. At the limit, one idle connection must leave: of
    /// the peers with the most connections, the one that has been idle longest.
    pub(crate) async fn open(self: &Arc<Self>, client: Client) -> ConnectionSlot {
        let client = Arc::new(client);
        let mut count_rx = self.count_tx.subscribe();
        loop {
            count_rx.mark_unchanged();
            if let Some(number) = self.insert(&client) {
                return ConnectionSlot { connections: Arc::clone(self), number, client };
            }
            // The loop tries again after a change and after the timeout.
            let _ = timeout(RETRY_INTERVAL, count_rx.changed()).await;
        }
    }

    fn insert(&self, client: &Arc<Client>) -> Option<u64> {
        let mut open = self.open.lock();
        if open.clients.len() >= self.limit {
            let leaving = open.clients.values().filter(|other| other.is_about_to_end()).count();
            let idle = open.clients.values().filter_map(|other| Some((other.idleness()?, other)));
            if leaving <= open.clients.len() - self.limit
                && let Some((_, longest)) = idle.min_by_key(|(idleness, _)| *idleness)
            {
                longest.leave();
                longest.counters().count_closed();
            }
            if open.clients.len() >= self.limit.saturating_add(SURPLUS) {
                return None;
            }
            open.may_have_surplus = true;
            client.mark_surplus();
        }
        let number = open.next;
        open.next += 1;
        open.clients.insert(number, Arc::clone(client));
        client.counters().count_connection();
        self.count_tx.send_replace(open.clients.len());
        Some(number)
    }

    fn remove(&self, number: u64) {
        let mut open = self.open.lock();
        open.clients.remove(&number);
        if open.may_have_surplus && open.clients.len() <= self.limit {
            open.may_have_surplus = false;
            open.clients.values().for_each(|client| client.give_place());
        }
        self.count_tx.send_replace(open.clients.len());
    }

    /// Waits until no connection is open.
    pub(crate) async fn ended(&self) {
        // The wait cannot fail, because `self` has the sender.
        let _ = self.count_tx.subscribe().wait_for(|count| *count == 0).await;
    }
}

/// The place of a connection. The connection counts as open until its place is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    connections: Arc<Connections>,
    number: u64,
    pub(crate) client: Arc<Client>,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.connections.remove(self.number);
        self.client.counters().count_disconnection();
    }
}

/// Waits until a connection had to leave, did not leave in time, and has no request in flight.
pub(crate) async fn overstays(client: &Client) {
    client.must_leave().await;
    sleep(LEAVE_TIMEOUT).await;
    while client.is_busy() {
        sleep(LEAVE_TIMEOUT).await;
    }
}
