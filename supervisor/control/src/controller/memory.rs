//! Memory of a GPU: whether there is some for another worker, and for one that only stands ready.
//! Beside one that stands ready, the largest shadow of its GPU must still fit, for a hand-over; if
//! one does not fit all the same, standing workers are called in.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::units::Timestamp;
use tokio::sync::watch;

use crate::backend::gib;
use shadowslice_config::ModelConfig;

/// How long it takes until NVML's readings show what a worker took.
const READINGS_LAG: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct MemoryLedger {
    /// The most that standing workers may take together, in bytes; `None`: half of the GPU's.
    limit: Option<u64>,
    book: Mutex<Book>,
    called: watch::Sender<()>,
}

/// One of a model's controllers, of which there are two while one replaces the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryId(u64);

#[derive(Debug, Default)]
struct Book {
    rows: BTreeMap<String, Row>,
    entered: u64,
    /// Until then free memory is not known, as a worker took or gave back some too recently.
    quiet_until: Timestamp,
}

/// One model. Memory is in bytes.
#[derive(Debug, Default)]
struct Row {
    controllers: usize,
    /// 1 is the highest.
    priority: u32,
    /// What its profile says that a worker takes.
    told: Option<u64>,
    /// What a worker of it was seen to have, without the weights that others find.
    seen: Option<u64>,
    serving: Option<Serving>,
    /// Whether it may have a shadow.
    has_shadows: bool,
    spares: BTreeMap<EntryId, Spare>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Serving {
    pub(super) pid: i32,
    /// The bytes of weights that it brought to the GPU. The driver counts them as its own, and the
    /// next worker needs none.
    pub(super) brought: u64,
}

#[derive(Debug, Default)]
struct Spare {
    /// What it has, or will take.
    bytes: u64,
    called_in: bool,
}

impl Row {
    fn need(&self) -> Option<u64> {
        self.seen.or(self.told)
    }
}

/// A GPU's memory as a moment ago, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// An emulated GPU has none of its own.
    Emulated,
    /// The driver does not say.
    Unknown,
    /// What is free and not promised to a worker, and all of it.
    Real { free: u64, total: u64 },
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoRoom {
    #[error(
        "the GPU memory that a worker of this model needs is unknown; give the model a profile with `memory`"
    )]
    NeedUnknown,
    #[error(
        "the NVIDIA driver does not report the GPU's free memory; the supervisor tries again shortly; if this persists, check `nvidia-smi`"
    )]
    FreeUnknown,
    #[error("another worker has just allocated or freed GPU memory; the supervisor tries again shortly")]
    Lag,
    #[error(
        "the warm standby needs {}, but warm standbys may use {} in total and already use {}; raise `controller.standby_memory`",
        gib(*needed), gib(*limit), gib(*taken)
    )]
    Limit { needed: u64, limit: u64, taken: u64 },
    #[error(
        "the warm standby needs {}, but {} are free, and {} must stay free for a hand-over of the largest model; move a model to another GPU, or set `standby: off`",
        gib(*needed), gib(*free), gib(*kept)
    )]
    Kept { needed: u64, kept: u64, free: u64 },
}

impl NoRoom {
    /// The bytes of standing workers that would have to go.
    fn excess(&self) -> u64 {
        match *self {
            Self::NeedUnknown | Self::FreeUnknown | Self::Lag => 0,
            Self::Limit { needed, limit, taken } => taken.saturating_add(needed).saturating_sub(limit),
            Self::Kept { needed, kept, free } => needed.saturating_add(kept).saturating_sub(free),
        }
    }
}

impl MemoryLedger {
    /// Of a GPU's models, none so far; `limit` in bytes is for all their standing workers.
    pub fn new(limit: Option<u64>) -> Self {
        Self { limit, book: Mutex::default(), called: watch::Sender::new(()) }
    }

    /// What was seen of a model of that name stays known.
    pub(super) fn enter(&self, model: &ModelConfig, has_shadows: bool) -> EntryId {
        self.tell(model, has_shadows);
        let mut book = self.book.lock();
        if let Some(row) = book.rows.get_mut(&model.name) {
            row.controllers += 1;
        }
        book.entered += 1;
        EntryId(book.entered)
    }

    pub(super) fn tell(&self, model: &ModelConfig, has_shadows: bool) {
        let memory = model.profile.as_ref().map(|profile| profile.memory);
        let sum =
            memory.map(|part| part.context.saturating_add(part.weights).saturating_add(part.activations));
        let mut book = self.book.lock();
        let row = book.rows.entry(model.name.clone()).or_default();
        row.told = sum.filter(|bytes| *bytes > 0);
        row.priority = model.priority;
        row.has_shadows = has_shadows;
    }

    /// A controller has ended. With a model's last one goes what would be kept for its shadows.
    pub(super) fn leave(&self, model: &str) {
        let mut book = self.book.lock();
        if let Some(row) = book.rows.get_mut(model) {
            row.controllers = row.controllers.saturating_sub(1);
        }
        book.rows.retain(|name, row| name != model || row.controllers > 0);
    }

    /// Changes whenever standing workers are called in.
    pub fn calls(&self) -> watch::Receiver<()> {
        self.called.subscribe()
    }

    pub(super) fn see(&self, bytes_of: impl Fn(i32) -> Option<u64>) {
        for row in self.book.lock().rows.values_mut() {
            let bytes = |serving: Serving| Some(bytes_of(serving.pid)?.saturating_sub(serving.brought));
            row.seen = row.serving.and_then(bytes).or(row.seen);
        }
    }

    pub(super) fn serves(&self, model: &str, serving: Option<Serving>) {
        if let Some(row) = self.book.lock().rows.get_mut(model) {
            row.serving = serving;
        }
    }

    /// That of the serving worker, else of an earlier one, else what the profile says.
    pub(super) fn need(&self, model: &str) -> Option<u64> {
        self.book.lock().rows.get(model).and_then(Row::need)
    }

    pub(super) fn warmed(&self, now: Timestamp) {
        self.book.lock().quiet_until = now + READINGS_LAG;
    }

    /// Whether a worker of this model may stand ready; `there`: it has its memory already.
    pub(super) fn may_stand(
        &self,
        (model, entry): (&str, EntryId),
        memory: Memory,
        there: bool,
        now: Timestamp,
    ) -> Result<(), NoRoom> {
        let book = self.book.lock();
        let need = book.rows.get(model).and_then(Row::need);
        let (needed, limit) = match (memory, need) {
            (Memory::Emulated, need) => (need.unwrap_or(0), self.limit),
            (_, None) => return Err(NoRoom::NeedUnknown),
            (Memory::Unknown, _) => return Err(NoRoom::FreeUnknown),
            (Memory::Real { total, .. }, Some(need)) => (need, Some(self.limit.unwrap_or(total / 2))),
        };
        // The controller's own spare is replaced; that of the model's other controller still
        // counts.
        let spares = book.rows.values().flat_map(|row| &row.spares);
        let taken = spares.filter(|(other, _)| **other != entry).map(|(_, spare)| spare.bytes).sum::<u64>();
        if let Some(limit) = limit.filter(|limit| taken.saturating_add(needed) > *limit) {
            return Err(NoRoom::Limit { needed, limit, taken });
        }
        let Memory::Real { free, .. } = memory else { return Ok(()) };
        // A worker that is there already stays: a new start costs more, and it can be called in
        // later.
        if now < book.quiet_until && !there {
            return Err(NoRoom::Lag);
        }
        let shadows = book.rows.values().filter(|row| row.has_shadows);
        let kept = shadows.filter_map(Row::need).max().unwrap_or(0);
        let needed = if there { 0 } else { needed };
        if needed.saturating_add(kept) > free { Err(NoRoom::Kept { needed, kept, free }) } else { Ok(()) }
    }

    /// Whether this controller of the model has a standing worker, which needs as much as any.
    pub(super) fn stands(&self, (model, entry): (&str, EntryId), stands: bool, now: Timestamp) {
        let mut book = self.book.lock();
        let Some(row) = book.rows.get_mut(model) else { return };
        if stands {
            let bytes = row.need().unwrap_or(0);
            row.spares.entry(entry).or_default().bytes = bytes;
        } else if row.spares.remove(&entry).is_some_and(|spare| spare.called_in) {
            book.quiet_until = now + READINGS_LAG;
        }
    }

    /// Calls in standing workers until `bytes` more will be free, this model's first and then the
    /// largest. False if there is no standing worker.
    pub(super) fn call_in(&self, model: &str, bytes: u64) -> bool {
        let mut book = self.book.lock();
        let spares = book.rows.iter_mut().flat_map(|(name, row)| {
            let other = name != model;
            row.spares.values_mut().map(move |spare| (other, spare))
        });
        let mut spares: Vec<_> = spares.filter(|(_, spare)| spare.bytes > 0).collect();
        spares.sort_by_key(|(other, spare)| (*other, Reverse(spare.bytes)));
        let found = !spares.is_empty();
        let called = call(spares.into_iter().map(|(_, spare)| spare), bytes);
        drop(book);
        if called {
            self.called.send_replace(());
        }
        found
    }

    /// Calls in standing workers of lower priorities, the lowest first, if that makes enough room
    /// for this model's. Those that are called in already count, so that none goes for nothing.
    pub(super) fn call_in_lower(&self, model: &str, no_room: &NoRoom) {
        let bytes = no_room.excess();
        let mut book = self.book.lock();
        let Some(own) = book.rows.get(model).map(|row| row.priority) else { return };
        let lower = book.rows.values_mut().filter(|row| row.priority > own).flat_map(|row| {
            let priority = row.priority;
            row.spares.values_mut().map(move |spare| (priority, spare))
        });
        let mut spares: Vec<_> = lower.filter(|(_, spare)| spare.bytes > 0).collect();
        let enough = spares.iter().map(|(_, spare)| spare.bytes).sum::<u64>() >= bytes;
        spares.sort_by_key(|(priority, spare)| (!spare.called_in, Reverse((*priority, spare.bytes))));
        let called = enough && call(spares.into_iter().map(|(_, spare)| spare), bytes);
        drop(book);
        if called {
            self.called.send_replace(());
        }
    }

    pub(super) fn is_called_in(&self, (model, entry): (&str, EntryId)) -> bool {
        let book = self.book.lock();
        book.rows.get(model).and_then(|row| row.spares.get(&entry)).is_some_and(|spare| spare.called_in)
    }
}

/// Calls in these spares, in order, until `bytes` will be free. True if a new one was called in.
fn call<'s>(spares: impl Iterator<Item = &'s mut Spare>, bytes: u64) -> bool {
    let (mut freed, mut called) = (0, false);
    for spare in spares {
        if freed >= bytes {
            break;
        }
        called |= !std::mem::replace(&mut spare.called_in, true);
        freed += spare.bytes;
    }
    called
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
