//! The queue in which models wait to start a worker. If many workers start at once on few cores,
//! their hellos are late, and `timeouts.spawn` would kill workers that only wait for a core.
//!
//! A worker counts from its start to its hello. Restarts of models that have served count only
//! other restarts, so a restart never waits for a model that starts for the first time. A shadow
//! never waits, because its hand-over is already in progress.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::units::Timestamp;
use tokio::sync::Notify;

/// The minimum number of workers that can start at once, independent of the number of cores.
const MIN_STARTS: usize = 2;

/// The time after which a model that does not ask again loses its place. Waiting models ask five
/// times a second, or once a second if they wait for a standby.
const PLACE_TIMEOUT: Duration = Duration::from_secs(3);

/// The reason for a worker's start. Workers start in the order of the variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Start {
    /// The start of a shadow for a hand-over.
    Shadow,
    /// The start of another worker of a model that has served.
    Restart,
    /// The start of a model's first worker.
    First,
    /// The start of a standby of a model that serves.
    Standby,
}

impl Start {
    fn is_urgent(self) -> bool {
        matches!(self, Self::Shadow | Self::Restart)
    }
}

/// A rank in the queue. The lowest rank starts first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    pub start: Start,
    /// The model's priority.
    pub priority: u32,
    /// True if the worker writes the reference answers. Models that already have these start first.
    pub is_reference: bool,
}

#[derive(Debug)]
pub struct StartQueue {
    max_starts: usize,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    /// The number of urgent workers between start and hello.
    urgent: usize,
    /// The number of other workers between start and hello.
    others: usize,
    /// The waiting models, by the numbers of their places.
    waiting: BTreeMap<u64, Waiting>,
    places: u64,
}

#[derive(Debug)]
struct Waiting {
    rank: Rank,
    since: Timestamp,
    asked: Timestamp,
    turn: Arc<Notify>,
}

impl StartQueue {
    /// Returns the queue of this host. One worker per core can start at once.
    pub fn of_host() -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(MIN_STARTS, std::num::NonZero::get);
        Self::new(cores.max(MIN_STARTS))
    }

    fn new(max_starts: usize) -> Arc<Self> {
        Arc::new(Self { max_starts, line: Mutex::default() })
    }

    /// Returns a place for a controller, which starts one worker at a time.
    pub fn enter(self: &Arc<Self>) -> StartPlace {
        let mut line = self.line.lock();
        line.places += 1;
        StartPlace { number: line.places, queue: Arc::clone(self), turn: Arc::default() }
    }

    fn ended(&self, is_urgent: bool) {
        let mut line = self.line.lock();
        match is_urgent {
            true => line.urgent -= 1,
            false => line.others -= 1,
        }
        for is_urgent in [true, false] {
            let free = line.free(self.max_starts, is_urgent);
            line.in_order(is_urgent)
                .into_iter()
                .take(free)
                .for_each(|(_, waiting)| waiting.turn.notify_one());
        }
    }
}

impl Line {
    fn free(&self, max_starts: usize, is_urgent: bool) -> usize {
        let starting = if is_urgent { self.urgent } else { self.urgent + self.others };
        max_starts.saturating_sub(starting)
    }

    fn in_order(&self, is_urgent: bool) -> Vec<(u64, &Waiting)> {
        let of_kind = |(_, waiting): &(&u64, &Waiting)| waiting.rank.start.is_urgent() == is_urgent;
        let mut line: Vec<_> =
            self.waiting.iter().filter(of_kind).map(|(number, it)| (*number, it)).collect();
        line.sort_by_key(|(_, waiting)| (waiting.rank, waiting.since));
        line
    }
}

/// The place of a controller in the queue. Dropping this leaves the queue.
#[derive(Debug)]
pub struct StartPlace {
    queue: Arc<StartQueue>,
    number: u64,
    turn: Arc<Notify>,
}

impl StartPlace {
    /// Returns a permit to start a worker. Otherwise, adds the model to the queue and returns
    /// `None`. The controller then asks again after [`StartPlace::turn`], or after a short time.
    pub fn ask(&self, rank: Rank, now: Timestamp) -> Option<StartPermit> {
        let is_urgent = rank.start.is_urgent();
        let mut line = self.queue.line.lock();
        line.waiting.retain(|_, waiting| now.since(waiting.asked) < PLACE_TIMEOUT);
        let before = line.waiting.get(&self.number).filter(|before| before.rank.start == rank.start);
        let since = before.map_or(now, |before| before.since);
        let waiting = Waiting { rank, since, asked: now, turn: Arc::clone(&self.turn) };
        line.waiting.insert(self.number, waiting);
        let free = line.free(self.queue.max_starts, is_urgent);
        let is_own = |(number, _): (u64, &Waiting)| number == self.number;
        let is_turn = line.in_order(is_urgent).into_iter().take(free).any(is_own);
        if rank.start != Start::Shadow && !is_turn {
            return None;
        }
        line.waiting.remove(&self.number);
        match is_urgent {
            true => line.urgent += 1,
            false => line.others += 1,
        }
        Some(StartPermit { queue: Arc::clone(&self.queue), is_urgent })
    }

    /// Returns a notification of the time to ask again.
    pub fn turn(&self) -> Arc<Notify> {
        Arc::clone(&self.turn)
    }
}

impl Drop for StartPlace {
    fn drop(&mut self) {
        self.queue.line.lock().waiting.remove(&self.number);
    }
}

/// A permit to start a worker. Dropping this at the worker's hello lets the next worker start.
#[derive(Debug)]
pub struct StartPermit {
    queue: Arc<StartQueue>,
    is_urgent: bool,
}

impl Drop for StartPermit {
    fn drop(&mut self) {
        self.queue.ended(self.is_urgent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(start: Start, priority: u32) -> Rank {
        Rank { start, priority, is_reference: false }
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp::default() + Duration::from_secs(seconds)
    }

    fn places<const COUNT: usize>(max_starts: usize) -> [StartPlace; COUNT] {
        let queue = StartQueue::new(max_starts);
        std::array::from_fn(|_| queue.enter())
    }

    #[test]
    fn a_hello_lets_the_next_in_line_start() {
        let [one, two, late, first] = places(1);
        let permit = one.ask(rank(Start::First, 2), at(0)).unwrap();
        assert!(two.ask(rank(Start::First, 2), at(0)).is_none());
        assert!(late.ask(rank(Start::First, 2), at(1)).is_none());
        assert!(first.ask(rank(Start::First, 1), at(1)).is_none());
        drop(permit);
        assert!(two.ask(rank(Start::First, 2), at(1)).is_none(), "another priority is first");
        let permit = first.ask(rank(Start::First, 1), at(1)).unwrap();
        assert!(two.ask(rank(Start::First, 2), at(1)).is_none());
        drop(permit);
        assert!(late.ask(rank(Start::First, 2), at(1)).is_none(), "another has waited longer");
        assert!(two.ask(rank(Start::First, 2), at(1)).is_some());
    }

    #[test]
    fn a_model_that_has_its_reference_goes_before_one_that_begins_and_a_standing_worker_goes_last() {
        let [one, begins, goes_on, stands] = places(1);
        let permit = one.ask(rank(Start::First, 1), at(0));
        assert!(stands.ask(rank(Start::Standby, 1), at(0)).is_none());
        assert!(begins.ask(Rank { is_reference: true, ..rank(Start::First, 1) }, at(0)).is_none());
        assert!(goes_on.ask(rank(Start::First, 1), at(1)).is_none());
        drop(permit);
        let order = [Start::Standby, Start::First].map(|start| rank(start, 1));
        assert!(stands.ask(order[0], at(1)).is_none());
        assert!(begins.ask(Rank { is_reference: true, ..order[1] }, at(1)).is_none());
        assert!(goes_on.ask(order[1], at(1)).is_some());
        assert!(begins.ask(Rank { is_reference: true, ..order[1] }, at(1)).is_some());
        assert!(stands.ask(order[0], at(1)).is_some());
    }

    #[test]
    fn who_has_served_waits_only_for_others_that_have() {
        let [one, two, dead, also_dead, resized] = places(1);
        let _permit = one.ask(rank(Start::First, 1), at(0)).unwrap();
        assert!(two.ask(rank(Start::First, 1), at(0)).is_none());
        let restart = dead.ask(rank(Start::Restart, 9), at(0)).unwrap();
        assert!(also_dead.ask(rank(Start::Restart, 9), at(0)).is_none());
        assert!(resized.ask(rank(Start::Shadow, 9), at(0)).is_some());
        drop(restart);
        assert!(two.ask(rank(Start::First, 1), at(0)).is_none());
        assert!(also_dead.ask(rank(Start::Restart, 9), at(0)).is_some());
    }

    #[test]
    fn who_leaves_or_asks_no_more_holds_nobody_up() {
        let [one, two, three] = places(1);
        let permit = one.ask(rank(Start::First, 2), at(0));
        assert!(two.ask(rank(Start::First, 1), at(0)).is_none());
        assert!(three.ask(rank(Start::First, 2), at(0)).is_none());
        drop(permit);
        assert!(three.ask(rank(Start::First, 2), at(2)).is_none());
        let permit = three.ask(rank(Start::First, 2), at(4));
        assert!(permit.is_some() && two.ask(rank(Start::First, 1), at(4)).is_none());
        drop((permit, two));
        assert!(three.ask(rank(Start::First, 2), at(4)).is_some());
    }

    #[tokio::test]
    async fn whose_turn_comes_is_woken() {
        let [one, two, three] = places(1);
        let permit = one.ask(rank(Start::First, 1), at(0));
        assert!(two.ask(rank(Start::First, 1), at(0)).is_none());
        assert!(three.ask(rank(Start::First, 2), at(0)).is_none());
        drop(permit);
        two.turn().notified().await;
        let turn = three.turn();
        let mut early = std::pin::pin!(turn.notified());
        assert!(!early.as_mut().enable(), "it is not its turn");
    }
}
