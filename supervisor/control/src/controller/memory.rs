//! The memory of a GPU, as far as it decides about warm standbys. The rules are in [`super::standbys`].
//! All memory is in bytes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::units::Timestamp;
use tokio::sync::watch;

use super::standbys::{Beneficiary, FreeMemory, NoRoom, OwnerId, Standby, StandbyMemory, yielding};
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
    owners: BTreeMap<OwnerId, Owner>,
    /// The memory of a worker of each model as measured, without the weights that other workers share.
    measured: BTreeMap<String, u64>,
    /// The standbys, the oldest first.
    standbys: Vec<Standby>,
    entered: u64,
    /// The time until which readings of the free memory may be outdated.
    outdated_until: Timestamp,
}

/// A controller of a model.
#[derive(Debug, Default)]
struct Owner {
    model: String,
    /// 1 is the highest.
    priority: u32,
    /// The memory of a worker according to the model's profile.
    profile: Option<u64>,
    serving: Option<Serving>,
    /// True if the model may have shadows.
    has_shadows: bool,
}

/// A worker that serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Serving {
    pub(super) pid: i32,
    /// The weights that the worker loaded onto the GPU. The driver counts them as memory of this
    /// worker, but the next worker shares them.
    pub(super) brought: u64,
}

/// The latest reading of a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// An emulated GPU has no memory of its own.
    Emulated,
    /// The driver does not report the memory.
    Unknown,
    /// The memory that is free and not reserved for a worker, and the GPU's whole memory.
    Real { free: u64, total: u64 },
}

impl MemoryLedger {
    /// Creates the ledger of a GPU without models. `limit` bounds the memory of all standbys together.
    pub fn new(limit: Option<u64>) -> Self {
        Self { limit, book: Mutex::default(), yields_tx: watch::Sender::new(()) }
    }

    fn enter(self: &Arc<Self>, owner: Owner) -> MemoryAccount {
        let mut book = self.book.lock();
        book.entered += 1;
        let id = OwnerId(book.entered);
        book.owners.insert(id, owner);
        MemoryAccount { id, ledger: Arc::clone(self) }
    }
}

impl Owner {
    fn new(model: &ModelConfig, has_shadows: bool) -> Self {
        let memory = model.profile.as_ref().map(|profile| profile.memory);
        let sum =
            memory.map(|part| part.context.saturating_add(part.weights).saturating_add(part.activations));
        let profile = sum.filter(|bytes| *bytes > 0);
        Self { model: model.name.clone(), priority: model.priority, profile, serving: None, has_shadows }
    }
}

impl Book {
    /// Returns the memory of a worker: the measured memory, or the memory according to the profile.
    fn need(&self, owner: &Owner) -> Option<u64> {
        self.measured.get(&owner.model).copied().or(owner.profile)
    }

    fn need_of(&self, id: OwnerId) -> Option<u64> {
        self.need(self.owners.get(&id)?)
    }
}

/// The account of a controller in the ledger of its GPU. When it is dropped, the controller leaves the
/// ledger.
#[derive(Debug)]
pub(super) struct MemoryAccount {
    id: OwnerId,
    ledger: Arc<MemoryLedger>,
}

impl MemoryAccount {
    pub(super) fn open(ledger: &Arc<MemoryLedger>, model: &ModelConfig, has_shadows: bool) -> Self {
        ledger.enter(Owner::new(model, has_shadows))
    }

    /// Applies a new configuration of the model.
    pub(super) fn configure(&self, model: &ModelConfig, has_shadows: bool) {
        self.update(Owner::new(model, has_shadows));
    }

    fn update(&self, changed: Owner) {
        let mut book = self.ledger.book.lock();
        for standby in book.standbys.iter_mut().filter(|standby| standby.owner == self.id) {
            standby.priority = changed.priority;
        }
        if let Some(owner) = book.owners.get_mut(&self.id) {
            *owner = Owner { serving: owner.serving, ..changed };
        }
    }

    /// Returns a channel that reports whenever standbys must yield.
    pub(super) fn yields(&self) -> watch::Receiver<()> {
        self.ledger.yields_tx.subscribe()
    }

    /// Records the measured memory of all workers that serve.
    pub(super) fn measure(&self, bytes_of: impl Fn(i32) -> Option<u64>) {
        let Book { owners, measured, .. } = &mut *self.ledger.book.lock();
        for owner in owners.values() {
            if let Some(Serving { pid, brought }) = owner.serving
                && let Some(bytes) = bytes_of(pid)
            {
                measured.insert(owner.model.clone(), bytes.saturating_sub(brought));
            }
        }
    }

    pub(super) fn serves(&self, serving: Option<Serving>) {
        if let Some(owner) = self.ledger.book.lock().owners.get_mut(&self.id) {
            owner.serving = serving;
        }
    }

    /// Returns the memory that a worker of the model needs, if it is known.
    pub(super) fn need(&self) -> Option<u64> {
        self.ledger.book.lock().need_of(self.id)
    }

    /// Records that a worker has allocated its memory.
    pub(super) fn warmed(&self, now: Timestamp) {
        self.ledger.book.lock().outdated_until = now + READINGS_LAG;
    }

    /// Checks that the model may have a standby. `is_running` is true if a running worker is to become
    /// the standby.
    pub(super) fn may_stand(&self, memory: Memory, is_running: bool, now: Timestamp) -> Result<(), NoRoom> {
        let book = self.ledger.book.lock();
        let (needed, limit, free) = match (memory, book.need_of(self.id)) {
            (Memory::Emulated, need) => (need.unwrap_or(0), self.ledger.limit, None),
            (_, None) => return Err(NoRoom::NeedUnknown),
            (Memory::Unknown, _) => return Err(NoRoom::FreeUnknown),
            (Memory::Real { free, total }, Some(need)) => {
                (need, self.ledger.limit.or(Some(total / 2)), Some(free))
            }
        };
        let others = book.standbys.iter().filter(|standby| standby.owner != self.id);
        let shadows = book.owners.values().filter(|owner| owner.has_shadows);
        let is_outdated = now < book.outdated_until;
        StandbyMemory {
            needed,
            is_running,
            taken: others.map(|standby| standby.bytes).sum(),
            limit,
            shadow: shadows.filter_map(|owner| book.need(owner)).max().unwrap_or(0),
            free: free.map(|bytes| FreeMemory { bytes, is_outdated }),
        }
        .check()
    }

    /// Records whether the model has a standby.
    pub(super) fn stands(&self, stands: bool, now: Timestamp) {
        let mut book = self.ledger.book.lock();
        let at = book.standbys.iter().position(|standby| standby.owner == self.id);
        let bytes = book.need_of(self.id).unwrap_or(0);
        match (stands, at) {
            (true, Some(at)) => book.standbys[at].bytes = bytes,
            (true, None) => {
                let priority = book.owners.get(&self.id).map_or(0, |owner| owner.priority);
                book.standbys.push(Standby { owner: self.id, priority, bytes, yields: false });
            }
            (false, Some(at)) => {
                if book.standbys.remove(at).yields {
                    book.outdated_until = now + READINGS_LAG;
                }
            }
            (false, None) => {}
        }
    }

    /// Makes standbys yield, so that a worker of this model that is to serve, or a shadow, gets this
    /// memory. Returns true if memory will become free.
    pub(super) fn make_room(&self, bytes: u64) -> bool {
        self.order_yields(bytes, Beneficiary::Worker)
    }

    /// Makes standbys of lower priorities yield, if that makes enough room for a standby of this model.
    pub(super) fn make_room_for_standby(&self, no_room: &NoRoom) {
        let priority = self.ledger.book.lock().owners.get(&self.id).map_or(0, |owner| owner.priority);
        self.order_yields(no_room.excess(), Beneficiary::Standby { priority });
    }

    fn order_yields(&self, bytes: u64, beneficiary: Beneficiary) -> bool {
        let mut book = self.ledger.book.lock();
        let chosen = yielding(&book.standbys, bytes, beneficiary);
        let is_new = |standby: &&mut Standby| chosen.contains(&standby.owner) && !standby.yields;
        let mut is_changed = false;
        for standby in book.standbys.iter_mut().filter(is_new) {
            (standby.yields, is_changed) = (true, true);
        }
        drop(book);
        if is_changed {
            self.ledger.yields_tx.send_replace(());
        }
        !chosen.is_empty()
    }

    /// Returns true if the model's standby must exit, because its memory is needed.
    pub(super) fn must_yield(&self) -> bool {
        self.ledger.book.lock().standbys.iter().any(|standby| standby.owner == self.id && standby.yields)
    }
}

impl Drop for MemoryAccount {
    fn drop(&mut self) {
        let mut book = self.ledger.book.lock();
        book.standbys.retain(|standby| standby.owner != self.id);
        let Some(Owner { model, .. }) = book.owners.remove(&self.id) else { return };
        if !book.owners.values().any(|other| other.model == model) {
            book.measured.remove(&model);
        }
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
