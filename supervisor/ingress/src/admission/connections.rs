//! The open connections, and which of them go when there are too many.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::admission::budgets::Client;

/// Connections beyond the bound. They may ask for health, and take part in all else once another
/// connection has gone.
const RESERVE: usize = 32;

/// How long an idle connection may take to end when another one needs its place.
const GOING: Duration = Duration::from_secs(1);

/// How often it is looked for an idle connection while even the reserve is taken.
const LOOK: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Connections {
    most: usize,
    open: Mutex<Open>,
    count: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Open {
    /// The oldest first.
    clients: BTreeMap<u64, Arc<Client>>,
    next: u64,
    /// Whether there may be connections beyond the bound.
    beyond: bool,
}

impl Connections {
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, open: Mutex::default(), count: watch::Sender::new(0) })
    }

    /// Waits until there is room. At the bound the connection that is idle longest, of the
    /// peer that has most, is told to go.
    pub(crate) async fn enter(self: &Arc<Self>, client: Client) -> Entered {
        let client = Arc::new(client);
        let mut count = self.count.subscribe();
        loop {
            count.mark_unchanged();
            if let Some(number) = self.insert(&client) {
                return Entered { connections: Arc::clone(self), number, client };
            }
            // Either way it is tried again.
            let _ = timeout(LOOK, count.changed()).await;
        }
    }

    fn insert(&self, client: &Arc<Client>) -> Option<u64> {
        let mut open = self.open.lock();
        let beyond = open.clients.len() >= self.most;
        if beyond {
            let going = open.clients.values().filter(|other| other.is_going()).count();
            let idle = open.clients.values().filter_map(|other| Some((other.idleness()?, other)));
            if going <= open.clients.len() - self.most
                && let Some((_, longest)) = idle.min_by_key(|(idleness, _)| *idleness)
            {
                longest.leave();
                longest.tally().count_closed();
            }
            if open.clients.len() >= self.most.saturating_add(RESERVE) {
                return None;
            }
            open.beyond = true;
            client.is_beyond();
        }
        let number = open.next;
        open.next += 1;
        open.clients.insert(number, Arc::clone(client));
        client.tally().count_connection();
        self.count.send_replace(open.clients.len());
        Some(number)
    }

    fn remove(&self, number: u64) {
        let mut open = self.open.lock();
        open.clients.remove(&number);
        if open.beyond && open.clients.len() <= self.most {
            open.beyond = false;
            open.clients.values().for_each(|client| client.has_room());
        }
        self.count.send_replace(open.clients.len());
    }

    /// Returns when none is open.
    pub(crate) async fn ended(&self) {
        // The sender is here, so that there is no error.
        let _ = self.count.subscribe().wait_for(|count| *count == 0).await;
    }
}

/// A connection is open until this is dropped.
#[derive(Debug)]
pub(crate) struct Entered {
    connections: Arc<Connections>,
    number: u64,
    pub(crate) client: Arc<Client>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.connections.remove(self.number);
        self.client.tally().count_disconnection();
    }
}

/// Returns when a connection was told to go, has had its time, and has no request under way.
pub(crate) async fn outstays(client: &Client) {
    client.left().await;
    sleep(GOING).await;
    while client.is_busy() {
        sleep(GOING).await;
    }
}
