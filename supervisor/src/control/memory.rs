//! Memory of a GPU: whether there is some for another worker, and for one that only stands ready.
//!
//! A worker that stands ready may take no memory that a hand-over will need: after it, the largest shadow of its
//! GPU must still fit. If one does not fit all the same, standing workers are called in.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::units::Moment;
use tokio::sync::watch;

use super::controller::Controller;
use super::launch::LaunchError;
use crate::config::{Gpu, HandoverMode, Model};
use crate::partition::{GrantError, Room, gib};

/// How long it takes until NVML's readings have what a worker took.
const READINGS_LAG: Duration = Duration::from_secs(2);

/// What the models of one GPU need of its memory, and what stands ready there.
#[derive(Debug)]
pub struct MemoryLedger {
    /// The most that standing workers may take together, in bytes; `None`: half of what the GPU has.
    limit: Option<u64>,
    book: Mutex<Book>,
    called: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Book {
    rows: BTreeMap<String, Row>,
    /// Until then a worker took memory, or gave it back, so recently that what is free is not known.
    quiet_until: Moment,
}

/// One model. Memory is in bytes.
#[derive(Debug, Default)]
struct Row {
    /// Its controllers: two while one replaces the other.
    controllers: usize,
    /// 1 is the highest.
    priority: u32,
    /// What its profile says that a worker takes.
    told: Option<u64>,
    /// What a worker of it was seen to have.
    seen: Option<u64>,
    /// The process that serves.
    serving: Option<i32>,
    /// Whether it may have a shadow.
    has_shadows: bool,
    /// What its standing worker has, or will take.
    standing: u64,
    /// Whether its standing worker must go.
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
    /// What nobody has or is promised, and all of it.
    Real { free: u64, total: u64 },
}

/// Why no worker may stand ready.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoRoom {
    #[error("it is not known what memory it needs; give the model a profile with `memory`")]
    NeedUnknown,
    #[error("the GPU's driver does not say what memory is free")]
    FreeUnknown,
    #[error("another worker has just taken memory, or given it back; asked again in a moment")]
    Lag,
    #[error(
        "it needs {}, and standing workers may have {} together, of which {} are taken; raise `controller.standby_memory`",
        gib(*needed), gib(*limit), gib(*taken)
    )]
    Limit { needed: u64, limit: u64, taken: u64 },
    #[error(
        "it needs {}, and {} are kept for a hand-over of the largest model, of {} that are free",
        gib(*needed), gib(*kept), gib(*free)
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

    /// A model comes: its first controller, or the one that replaces it. What was seen of one of that name stays
    /// known.
    pub(super) fn enter(&self, model: &Model) {
        self.tell(model);
        if let Some(row) = self.book.lock().rows.get_mut(&model.name) {
            row.controllers += 1;
        }
    }

    /// This is how the model is configured now.
    pub(super) fn tell(&self, model: &Model) {
        let memory = model.profile.as_ref().map(|profile| profile.memory);
        let sum =
            memory.map(|part| part.context.saturating_add(part.weights).saturating_add(part.activations));
        let mut book = self.book.lock();
        let row = book.rows.entry(model.name.clone()).or_default();
        row.told = sum.filter(|bytes| *bytes > 0);
        row.priority = model.priority;
        row.has_shadows = model.handover == HandoverMode::Shadow;
    }

    /// A controller has ended. With a model's last one goes what would be kept for its shadows.
    fn leave(&self, model: &str) {
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

    /// Takes note of what the processes that serve have.
    fn see(&self, bytes_of: impl Fn(i32) -> Option<u64>) {
        for row in self.book.lock().rows.values_mut() {
            row.seen = row.serving.and_then(&bytes_of).or(row.seen);
        }
    }

    fn serves(&self, model: &str, pid: Option<i32>) {
        if let Some(row) = self.book.lock().rows.get_mut(model) {
            row.serving = pid;
        }
    }

    /// What a worker of this model takes: what the one that serves has, else what one had before, else what the
    /// profile says.
    pub(super) fn need(&self, model: &str) -> Option<u64> {
        self.book.lock().rows.get(model).and_then(Row::need)
    }

    /// A worker is warm, and has its memory.
    fn warmed(&self, now: Moment) {
        self.book.lock().quiet_until = now + READINGS_LAG;
    }

    /// Whether a worker of this model may stand ready; `there`: it has its memory already.
    fn may_stand(&self, model: &str, memory: Memory, there: bool, now: Moment) -> Result<(), NoRoom> {
        let book = self.book.lock();
        let need = book.rows.get(model).and_then(Row::need);
        let (needed, limit) = match (memory, need) {
            (Memory::Emulated, need) => (need.unwrap_or(0), self.limit),
            (_, None) => return Err(NoRoom::NeedUnknown),
            (Memory::Unknown, _) => return Err(NoRoom::FreeUnknown),
            (Memory::Real { total, .. }, Some(need)) => (need, Some(self.limit.unwrap_or(total / 2))),
        };
        let others = book.rows.iter().filter(|(name, _)| *name != model);
        let taken = others.map(|(_, row)| row.standing).sum::<u64>();
        if let Some(limit) = limit.filter(|limit| taken.saturating_add(needed) > *limit) {
            return Err(NoRoom::Limit { needed, limit, taken });
        }
        let Memory::Real { free, .. } = memory else { return Ok(()) };
        // What is there already would have to be started again, and is called in if it turns out to be in the way.
        if now < book.quiet_until && !there {
            return Err(NoRoom::Lag);
        }
        let shadows = book.rows.values().filter(|row| row.has_shadows);
        let kept = shadows.filter_map(Row::need).max().unwrap_or(0);
        let needed = if there { 0 } else { needed };
        if needed.saturating_add(kept) > free { Err(NoRoom::Kept { needed, kept, free }) } else { Ok(()) }
    }

    /// Whether the model has a standing worker, which needs as much as any.
    fn stands(&self, model: &str, stands: bool, now: Moment) {
        let mut book = self.book.lock();
        let Some(row) = book.rows.get_mut(model) else { return };
        row.standing = if stands { row.need().unwrap_or(0) } else { 0 };
        if row.called_in && !stands {
            row.called_in = false;
            book.quiet_until = now + READINGS_LAG;
        }
    }

    /// Has standing workers go until `bytes` more will be free, this model's first and then the largest. False if
    /// there is none.
    fn call_in(&self, model: &str, bytes: u64) -> bool {
        let mut book = self.book.lock();
        let mut rows: Vec<_> = book.rows.iter_mut().filter(|(_, row)| row.standing > 0).collect();
        rows.sort_by_key(|(name, row)| (*name != model, Reverse(row.standing)));
        let found = !rows.is_empty();
        let called = call(rows.into_iter().map(|(_, row)| row), bytes);
        drop(book);
        if called {
            self.called.send_replace(());
        }
        found
    }

    /// Has standing workers of lower priorities go, the lowest first, where that makes room for this model's. Those that are called in already
    /// count, so that none goes for nothing.
    fn call_in_lower(&self, model: &str, no_room: &NoRoom) {
        let bytes = no_room.excess();
        let mut book = self.book.lock();
        let Some(own) = book.rows.get(model).map(|row| row.priority) else { return };
        let mut rows: Vec<_> =
            book.rows.values_mut().filter(|row| row.standing > 0 && row.priority > own).collect();
        let enough = rows.iter().map(|row| row.standing).sum::<u64>() >= bytes;
        rows.sort_by_key(|row| (!row.called_in, Reverse((row.priority, row.standing))));
        let called = enough && call(rows.into_iter(), bytes);
        drop(book);
        if called {
            self.called.send_replace(());
        }
    }

    fn is_called_in(&self, model: &str) -> bool {
        self.book.lock().rows.get(model).is_some_and(|row| row.called_in)
    }
}

/// Calls in of these until so many bytes will be free. True if one is that was not.
fn call<'r>(rows: impl Iterator<Item = &'r mut Row>, bytes: u64) -> bool {
    let (mut freed, mut called) = (0, false);
    for row in rows {
        if freed >= bytes {
            break;
        }
        called |= !std::mem::replace(&mut row.called_in, true);
        freed += row.standing;
    }
    called
}

impl Controller {
    fn memory(&self) -> Memory {
        let readings = self.context.readings.look();
        let Some(watched) = readings.get(self.model.gpu) else { return Memory::Unknown };
        if matches!(watched.gpu, Gpu::Emulated { .. }) {
            return Memory::Emulated;
        }
        let usage = watched.reading.as_ref().and_then(|reading| reading.usage.as_ref());
        let Some(usage) = usage else { return Memory::Unknown };
        self.ledger.see(|pid| usage.bytes_of(pid));
        let free = self.gpu.tally().unreserved(usage.memory.free);
        Memory::Real { free, total: usage.memory.total }
    }

    /// What another worker will take of its GPU's memory, and what there is of it. `None` where nothing is known,
    /// as on an emulated GPU.
    pub(super) fn room(&self) -> Option<Room> {
        let readings = self.context.readings.look();
        let usage = readings.get(self.model.gpu)?.reading.as_ref()?.usage.as_ref()?;
        self.ledger.see(|pid| usage.bytes_of(pid));
        Some(Room { needed: self.ledger.need(&self.model.name)?, free: usage.memory.free })
    }

    /// Whether memory allows a worker that stands ready; `there`: it is one that runs already.
    pub(super) fn room_to_stand(&self, there: bool) -> Result<(), NoRoom> {
        self.ledger.may_stand(&self.model.name, self.memory(), there, self.now())
    }

    /// There is no room for a standing worker: those of lower priorities make some, if they can.
    pub(super) fn outrank(&self, no_room: &NoRoom) {
        self.ledger.call_in_lower(&self.model.name, no_room);
    }

    /// The last thing that a controller does.
    pub(super) fn leave_ledger(&self) {
        if self.standby.worker().is_some() {
            self.note_standing(false);
        }
        self.ledger.leave(&self.model.name);
    }

    pub(super) fn note_standing(&self, stands: bool) {
        self.ledger.stands(&self.model.name, stands, self.now());
    }

    pub(super) fn note_serving(&self, pid: Option<i32>) {
        self.ledger.serves(&self.model.name, pid);
    }

    pub(super) fn note_warm(&self) {
        self.ledger.warmed(self.now());
    }

    /// Somebody needs memory: lets the standing worker go if it is meant.
    pub(super) fn on_call(&mut self) {
        if self.stopping.is_none() && self.ledger.is_called_in(&self.model.name) {
            self.rest_standby();
        }
    }

    /// A worker found no memory: calls in what stands ready. True if some will be free before long.
    pub(super) fn make_room(&self, error: &LaunchError) -> bool {
        let LaunchError::Grant(GrantError::NoMemory { needed, free }) = error else { return false };
        self.ledger.call_in(&self.model.name, needed.saturating_sub(*free))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn row(need: Option<u64>, has_shadows: bool) -> Row {
        Row { told: need.map(|gib| gib * GIB), has_shadows, ..Row::default() }
    }

    /// Models of 2, 3 and 9 GiB, the last of which has no shadows, and one of which nothing is known.
    fn ledger(limit: Option<u64>) -> MemoryLedger {
        let rows = [
            ("a", row(Some(2), true)),
            ("b", row(Some(3), true)),
            ("c", row(Some(9), false)),
            ("d", row(None, true)),
        ];
        let rows = rows.into_iter().map(|(name, row)| (name.to_owned(), row)).collect();
        let book = Mutex::new(Book { rows, ..Book::default() });
        MemoryLedger { limit: limit.map(|gib| gib * GIB), book, called: watch::Sender::new(()) }
    }

    fn real(free: u64, total: u64) -> Memory {
        Memory::Real { free: free * GIB, total: total * GIB }
    }

    fn at(seconds: u64) -> Moment {
        Moment::after_origin(Duration::from_secs(seconds))
    }

    #[test]
    fn after_a_standing_worker_the_largest_shadow_still_fits() {
        let ledger = ledger(None);
        assert_eq!(ledger.may_stand("a", real(5, 20), false, at(0)), Ok(()));
        let kept = NoRoom::Kept { needed: 2 * GIB, kept: 3 * GIB, free: 4 * GIB };
        assert_eq!(ledger.may_stand("a", real(4, 20), false, at(0)), Err(kept));
        assert_eq!(ledger.may_stand("a", real(3, 20), true, at(0)), Ok(()), "it has its memory already");
        ledger.serves("b", Some(7));
        ledger.see(|pid| (pid == 7).then_some(6 * GIB));
        let seen = NoRoom::Kept { needed: 2 * GIB, kept: 6 * GIB, free: 7 * GIB };
        assert_eq!(ledger.may_stand("a", real(7, 20), false, at(0)), Err(seen));
        ledger.serves("b", None);
        ledger.see(|_| None);
        assert_eq!(ledger.need("b"), Some(6 * GIB), "what was seen is remembered");
    }

    #[test]
    fn standing_workers_have_a_bound_together() {
        let half = ledger(None);
        half.stands("b", true, at(0));
        let limit = NoRoom::Limit { needed: 2 * GIB, limit: 4 * GIB, taken: 3 * GIB };
        assert_eq!(half.may_stand("a", real(8, 8), false, at(0)), Err(limit));
        assert_eq!(half.may_stand("b", real(8, 8), false, at(0)), Ok(()), "its own is replaced");
        half.stands("b", false, at(0));
        assert_eq!(half.may_stand("a", real(8, 8), false, at(0)), Ok(()));
        let set = ledger(Some(4));
        set.stands("b", true, at(0));
        assert!(set.may_stand("a", real(80, 80), false, at(0)).is_err());
        assert!(set.may_stand("a", Memory::Emulated, false, at(0)).is_err());
    }

    #[test]
    fn what_is_not_known_is_not_risked_on_a_real_gpu() {
        let ledger = ledger(None);
        assert_eq!(ledger.may_stand("d", real(80, 80), false, at(0)), Err(NoRoom::NeedUnknown));
        assert_eq!(ledger.may_stand("a", Memory::Unknown, false, at(0)), Err(NoRoom::FreeUnknown));
        assert_eq!(ledger.may_stand("d", Memory::Emulated, false, at(0)), Ok(()));
        ledger.warmed(at(10));
        assert_eq!(
            ledger.may_stand("a", real(80, 80), true, at(11)),
            Ok(()),
            "it would only have to be started again"
        );
        assert_eq!(ledger.may_stand("a", real(80, 80), false, at(11)), Err(NoRoom::Lag));
        assert_eq!(ledger.may_stand("a", real(80, 80), false, at(12)), Ok(()));
    }

    #[test]
    fn a_model_is_kept_room_for_until_its_last_controller_ends() {
        let ledger = ledger(None);
        let room = || ledger.may_stand("a", real(5, 20), false, at(0));
        ledger.book.lock().rows.get_mut("b").unwrap().controllers = 2;
        ledger.leave("b");
        assert_eq!(ledger.need("b"), Some(3 * GIB));
        assert_eq!(room(), Ok(()), "2 for it, and 3 for the largest shadow");
        ledger.leave("b");
        ledger.leave("b");
        assert_eq!(ledger.need("b"), None);
        assert_eq!(
            ledger.may_stand("a", real(4, 20), false, at(0)),
            Ok(()),
            "its own shadow is the largest now"
        );
    }

    #[test]
    fn standing_workers_are_called_in_until_there_is_enough() {
        let ledger = ledger(None);
        assert!(!ledger.call_in("a", GIB), "nobody stands ready");
        let mut calls = ledger.calls();
        ["a", "b", "c"].into_iter().for_each(|model| ledger.stands(model, true, at(0)));
        let called = || ["a", "b", "c"].map(|model| ledger.is_called_in(model));
        assert!(ledger.call_in("a", 2 * GIB) && calls.has_changed().unwrap());
        assert_eq!(called(), [true, false, false], "its own goes first");
        assert!(ledger.call_in("a", 3 * GIB));
        assert_eq!(called(), [true, false, true], "and then the largest");
        calls.mark_unchanged();
        ledger.stands("c", false, at(0));
        ledger.stands("c", true, at(0));
        assert_eq!(called(), [true, false, false], "the next one was not meant");
    }

    #[test]
    fn higher_priorities_stand_ready_first() {
        let ledger = ledger(Some(5));
        let priorities = [("a", 2), ("b", 3), ("c", 1), ("d", 1)];
        for (model, priority) in priorities {
            ledger.book.lock().rows.get_mut(model).unwrap().priority = priority;
        }
        ["a", "b"].into_iter().for_each(|model| ledger.stands(model, true, at(0)));
        let asks = |model: &str| {
            let no_room = ledger.may_stand(model, Memory::Emulated, false, at(0)).unwrap_err();
            ledger.call_in_lower(model, &no_room);
            ["a", "b"].map(|model| ledger.is_called_in(model))
        };
        assert_eq!(asks("c"), [false; 2], "9 GiB are more than the limit");
        ledger.book.lock().rows.get_mut("d").unwrap().told = Some(2 * GIB);
        let mut calls = ledger.calls();
        assert_eq!(asks("d"), [false, true], "the lowest goes");
        assert!(calls.has_changed().unwrap());
        calls.mark_unchanged();
        assert_eq!(asks("d"), [false, true], "its memory is awaited");
        assert!(!calls.has_changed().unwrap());
        ledger.stands("b", false, at(0));
        assert_eq!(ledger.may_stand("d", Memory::Emulated, false, at(0)), Ok(()));
        ledger.stands("d", true, at(0));
        assert_eq!(asks("b"), [false; 2], "not for a lower one");
        ledger.book.lock().rows.get_mut("b").unwrap().priority = 2;
        assert_eq!(asks("b"), [false; 2], "nor for one of its own priority, which would do the same");
        assert_eq!(ledger.may_stand("a", real(80, 80), false, at(1)), Err(NoRoom::Lag), "it is not read yet");
    }
}
