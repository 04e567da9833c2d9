//! The line in which models wait to start a worker. If many workers start at once on few cores, each
//! of them is slow to say hello, and `timeouts.spawn` would kill workers that only lack a core.
//!
//! A worker counts from its start to its hello. Workers of models that have served count only each
//! other, so that no restart waits for models that start for the first time. A shadow never waits,
//! since the end of its hand-over is awaited.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::units::Timestamp;
use tokio::sync::Notify;

/// The least number of workers that may start at once, whatever the number of cores.
const LEAST: usize = 2;

/// The time after which a model that doesn't ask again has lost its place. Models that wait ask five
/// times a second, those that wait for a standing worker once a second.
const FORGET_AFTER: Duration = Duration::from_secs(3);

/// What a worker is started for. The order is that in which workers start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Start {
    /// A hand-over.
    Shadow,
    /// The next worker of a model that has served.
    Restart,
    /// A first worker of a model.
    First,
    /// The standing worker of a model that serves.
    Standby,
}

impl Start {
    fn is_urgent(self) -> bool {
        matches!(self, Self::Shadow | Self::Restart)
    }
}

/// A place in the order: the lowest starts first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    pub start: Start,
    /// The model's priority.
    pub priority: u32,
    /// Whether it writes the reference answers. Models that have these become ready first.
    pub is_reference: bool,
}

#[derive(Debug)]
pub struct StartQueue {
    most: usize,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    /// Workers between their start and their hello.
    urgent: usize,
    others: usize,
    /// By the numbers of their places.
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
    /// Returns the queue of this host: as many workers start at once as there are cores.
    pub fn of_host() -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(LEAST, std::num::NonZero::get);
        Self::new(cores.max(LEAST))
    }

    fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, line: Mutex::default() })
    }

    /// Returns the place of a controller, which starts one worker at a time.
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
            let free = line.free(self.most, is_urgent);
            line.in_order(is_urgent)
                .into_iter()
                .take(free)
                .for_each(|(_, waiting)| waiting.turn.notify_one());
        }
    }
}

impl Line {
    fn free(&self, most: usize, is_urgent: bool) -> usize {
        let starting = if is_urgent { self.urgent } else { self.urgent + self.others };
        most.saturating_sub(starting)
    }

    fn in_order(&self, is_urgent: bool) -> Vec<(u64, &Waiting)> {
        let of_kind = |(_, waiting): &(&u64, &Waiting)| waiting.rank.start.is_urgent() == is_urgent;
        let mut line: Vec<_> =
            self.waiting.iter().filter(of_kind).map(|(number, it)| (*number, it)).collect();
        line.sort_by_key(|(_, waiting)| (waiting.rank, waiting.since));
        line
    }
}

/// The place of one controller in the line. Dropping it leaves the line.
#[derive(Debug)]
pub struct StartPlace {
    queue: Arc<StartQueue>,
    number: u64,
    turn: Arc<Notify>,
}

impl StartPlace {
    /// Returns the permit to start a worker. `None` puts the model into the line: it asks again after
    /// [`StartPlace::turn`], or in a moment.
    pub fn ask(&self, rank: Rank, now: Timestamp) -> Option<StartPermit> {
        let is_urgent = rank.start.is_urgent();
        let mut line = self.queue.line.lock();
        line.waiting.retain(|_, waiting| now.since(waiting.asked) < FORGET_AFTER);
        let before = line.waiting.get(&self.number).filter(|before| before.rank.start == rank.start);
        let since = before.map_or(now, |before| before.since);
        let waiting = Waiting { rank, since, asked: now, turn: Arc::clone(&self.turn) };
        line.waiting.insert(self.number, waiting);
        let free = line.free(self.queue.most, is_urgent);
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

    /// Tells when it is worth to ask again.
    pub fn turn(&self) -> Arc<Notify> {
        Arc::clone(&self.turn)
    }
}

impl Drop for StartPlace {
    fn drop(&mut self) {
        self.queue.line.lock().waiting.remove(&self.number);
    }
}

/// A worker's leave to start. Dropping it, at the worker's hello, lets the next one start.
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

    fn places<const COUNT: usize>(most: usize) -> [StartPlace; COUNT] {
        let queue = StartQueue::new(most);
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
