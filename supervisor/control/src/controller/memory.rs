//! The memory of a GPU, as far as it decides about warm standbys. The rules are in [`super::standbys`].
//! All memory is in bytes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::units::Timestamp;
use tokio::sync::watch;

use super::standbys::{Beneficiary, FreeMemory, Neighbours, NoRoom, Standby, yielding};
use shadowslice_config::ModelConfig;

/// The maximum time until NVML's readings show the memory that a worker has allocated or freed.
const READINGS_LAG: Duration = Duration::from_secs(2);

/// The models and standbys of a GPU, with their memory.
#[derive(Debug)]
pub struct MemoryLedger {
    /// The limit on the memory of all standbys together. `None` means half of the GPU's memory.
    limit: Option<u64>,
    book: Mutex<Book>,
    yields_tx: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Book {
    /// The controllers by the numbers of their accounts.
    owners: BTreeMap<u64, MemoryOwner>,
    /// The last number of an account or of a standby.
    last: u64,
    /// The time until which readings of the free memory may be outdated.
    outdated_until: Timestamp,
}

/// A controller of a model.
#[derive(Debug, Default)]
pub(super) struct MemoryOwner {
    model: String,
    /// 1 is the highest.
    priority: u32,
    /// The memory of a worker according to the model's profile.
    profile: Option<u64>,
    /// The memory of a worker as measured, without the weights that other workers share.
    measured: Option<u64>,
    serving: Option<ServingWorker>,
    /// True if the model may have shadows.
    has_shadows: bool,
    standby: Option<Standby>,
}

/// A worker that serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ServingWorker {
    Process {
        pid: i32,
        /// The weights that the worker loaded onto the GPU. The driver counts them as memory of this
        /// worker, but the next worker shares them.
        brought: u64,
    },
    /// A worker in a shared process, with the memory that another worker there would need.
    Member { bytes: u64 },
}

impl MemoryLedger {
    /// Creates the ledger of a GPU without models. `limit` bounds the memory of all standbys together.
    pub fn new(limit: Option<u64>) -> Self {
        Self { limit, book: Mutex::default(), yields_tx: watch::Sender::new(()) }
    }
}

impl MemoryOwner {
    pub(super) fn new(model: &ModelConfig, has_shadows: bool) -> Self {
        let sum = model.copy_memory().map(|memory| memory.total());
        let profile = sum.filter(|bytes| *bytes > 0);
        Self { model: model.name.clone(), priority: model.priority, profile, has_shadows, ..Self::default() }
    }

    fn need(&self) -> Option<u64> {
        self.measured.or(self.profile)
    }
}

/// The account of a controller in the ledger of its GPU. When it is dropped, the controller leaves the
/// ledger.
#[derive(Debug)]
pub(super) struct MemoryAccount {
    id: u64,
    ledger: Arc<MemoryLedger>,
}

impl MemoryAccount {
    /// Opens an account. Measurements of another controller of the same model stay known.
    pub(super) fn open(ledger: &Arc<MemoryLedger>, mut owner: MemoryOwner) -> Self {
        let mut book = ledger.book.lock();
        book.last += 1;
        let id = book.last;
        let mut others = book.owners.values().rev();
        owner.measured = others.find(|other| other.model == owner.model).and_then(|other| other.measured);
        book.owners.insert(id, owner);
        Self { id, ledger: Arc::clone(ledger) }
    }

    /// Applies a new configuration of the model.
    pub(super) fn update(&self, changed: MemoryOwner) {
        if let Some(owner) = self.ledger.book.lock().owners.get_mut(&self.id) {
            let standby = owner.standby.map(|standby| Standby { priority: changed.priority, ..standby });
            *owner = MemoryOwner { measured: owner.measured, serving: owner.serving, standby, ..changed };
        }
    }

    /// Returns a channel that reports whenever standbys must yield.
    pub(super) fn yields(&self) -> watch::Receiver<()> {
        self.ledger.yields_tx.subscribe()
    }

    /// Records the measured memory of all workers that serve.
    pub(super) fn measure(&self, bytes_of: impl Fn(i32) -> Option<u64>) {
        for owner in self.ledger.book.lock().owners.values_mut() {
            let bytes = |serving| match serving {
                ServingWorker::Process { pid, brought } => Some(bytes_of(pid)?.saturating_sub(brought)),
                ServingWorker::Member { bytes } => Some(bytes),
            };
            owner.measured = owner.serving.and_then(bytes).or(owner.measured);
        }
    }

    pub(super) fn serves(&self, serving: Option<ServingWorker>) {
        if let Some(owner) = self.ledger.book.lock().owners.get_mut(&self.id) {
            owner.serving = serving;
        }
    }

    /// Returns the memory that a worker of the model needs, if it is known.
    pub(super) fn need(&self) -> Option<u64> {
        self.ledger.book.lock().owners.get(&self.id)?.need()
    }

    /// Records that a worker has allocated its memory.
    pub(super) fn warmed(&self, now: Timestamp) {
        self.ledger.book.lock().outdated_until = now + READINGS_LAG;
    }

    /// Checks that the model may have a standby. `is_running` is true if a running worker is to become
    /// the standby.
    pub(super) fn may_stand(
        &self,
        found: FreeMemory,
        is_running: bool,
        now: Timestamp,
    ) -> Result<(), NoRoom> {
        let need = self.need();
        let book = self.ledger.book.lock();
        let others = book.owners.iter().filter(|(id, _)| **id != self.id);
        let shadows = book.owners.values().filter(|owner| owner.has_shadows);
        let neighbours = Neighbours {
            have_changed: now < book.outdated_until,
            standbys: others.filter_map(|(_, other)| Some(other.standby?.bytes)).sum(),
            limit: self.ledger.limit,
            shadow: shadows.filter_map(MemoryOwner::need).max().unwrap_or(0),
        };
        neighbours.leave_room(need, found, is_running)
    }

    /// Records whether the model has a standby.
    pub(super) fn stands(&self, stands: bool, now: Timestamp) {
        let Book { owners, last, outdated_until } = &mut *self.ledger.book.lock();
        let Some(owner) = owners.get_mut(&self.id) else { return };
        let (before, bytes) = (owner.standby.take(), owner.need().unwrap_or(0));
        if stands {
            *last += 1;
            let new = Standby { priority: owner.priority, started: *last, bytes, yields: false };
            owner.standby = Some(Standby { bytes, ..before.unwrap_or(new) });
        } else if before.is_some_and(|standby| standby.yields) {
            *outdated_until = now + READINGS_LAG;
        }
    }

    /// Makes standbys yield, so that a worker gets this memory. Returns true if memory will become free.
    pub(super) fn make_room(&self, bytes: u64, beneficiary: Beneficiary) -> bool {
        let mut book = self.ledger.book.lock();
        let standbys = book.owners.values_mut().filter_map(|owner| owner.standby.as_mut());
        let chosen = yielding(standbys, bytes, beneficiary);
        let (is_some, mut is_new) = (!chosen.is_empty(), false);
        for standby in chosen {
            is_new |= !std::mem::replace(&mut standby.yields, true);
        }
        drop(book);
        if is_new {
            self.ledger.yields_tx.send_replace(());
        }
        is_some
    }

    /// Returns true if the model's standby must exit, because its memory is needed.
    pub(super) fn must_yield(&self) -> bool {
        let book = self.ledger.book.lock();
        book.owners.get(&self.id).and_then(|owner| owner.standby).is_some_and(|standby| standby.yields)
    }
}

impl Drop for MemoryAccount {
    fn drop(&mut self) {
        self.ledger.book.lock().owners.remove(&self.id);
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
