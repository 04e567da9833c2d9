//! The door: how a model batches and which requests it refuses, as its sharing policy last said.
//!
//! The predictions are means of what was seen, so the door refuses what is more likely late than
//! not. [`punctual`](super::punctual) looks once more when batches are sent.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::batcher::Limits;
use super::lane::Lane;
use super::punctual::Punctual;
use super::queue::Entry;
use super::writing::WritingTime;
use crate::sharing::Door;

/// For so many times as long as an outage lasted, no request is refused for being late.
const FORGIVEN_PER_OUTAGE: u32 = 10;

const MAX_FORGIVEN: Duration = Duration::from_secs(30);

/// A batch is sent this long before the one before it should end: several times what the way takes,
/// and a small part of an execution. A batch that is sent early is closed early: requests that
/// arrive while it waits there cannot join it.
const LEAD: Duration = Duration::from_micros(500);

#[derive(Debug)]
pub(super) struct Doorkeeper {
    door: Door,
    /// `on_late: serve`.
    serves_late: bool,
    most: Limits,
    /// Since when no lane has served, or the one that does has stalled.
    outage: Option<Timestamp>,
    /// Requests that came before this may be late without that being a sign of load.
    forgiven: Timestamp,
    writing: WritingTime,
}

impl Doorkeeper {
    pub(super) fn new(most: Limits, serves_late: bool) -> Self {
        let (door, forgiven) = (Door::open(u32::MAX), Timestamp::default());
        Self { door, serves_late, most, outage: None, forgiven, writing: WritingTime::default() }
    }

    pub(super) fn set(&mut self, door: Door) {
        self.door = door;
    }

    pub(super) fn configure(&mut self, max_delay: Duration, serves_late: bool) {
        self.most.max_delay = max_delay;
        self.serves_late = serves_late;
    }

    /// Learns that writing an answer to its client's socket took this long.
    pub(super) fn wrote(&mut self, took: Duration, slo: Duration) {
        self.writing.observe(took, slo);
    }

    pub(super) fn found(&mut self, max_rows: u32, max_requests: usize) {
        self.most = Limits { max_rows, max_requests, ..self.most };
    }

    pub(super) fn limits(&self) -> Limits {
        // Zero says that there is no batch axis; then there is nothing to cap.
        Limits { max_rows: self.most.max_rows.min(self.door.max_batch.max(1)), ..self.most }
    }

    /// Whether a request that comes now cannot be answered in time. `lane` is the lane that serves.
    /// While none serves, or it stalls, no request is refused: the load is not to blame.
    pub(super) fn refuses<K, T>(
        &self,
        request: &Entry<K, T>,
        queued_rows: impl FnOnce() -> u64,
        lane: Option<&Lane<K, T>>,
        now: Timestamp,
    ) -> bool {
        let may = self.refuses_late() && self.outage.is_none() && now >= self.forgiven;
        let Some(lane) = lane.filter(|_| may) else { return false };
        let answered = self.answered_at(request, queued_rows(), lane, now);
        answered.is_some_and(|answered| answered > request.deadline)
    }

    /// Predicts when the client of a request that comes now has its answer: full batches go first, then
    /// its own, and the answer is written.
    /// `None` if no rows are before it: then it is tried in any case, or predictions would never be
    /// corrected.
    fn answered_at<K, T>(
        &self,
        request: &Entry<K, T>,
        queued_rows: u64,
        lane: &Lane<K, T>,
        now: Timestamp,
    ) -> Option<Timestamp> {
        if queued_rows == 0 && lane.executes_nothing() {
            return None;
        }
        let rows = queued_rows + u64::from(request.rows.saturating_sub(1));
        let max = lane.limits(self.limits()).max_rows.max(1);
        let (full, part) = (rows / u64::from(max), rows % u64::from(max));
        let own = u32::try_from(part).map_or(max, |part| part + 1);
        let mut answered = lane.free_at(now) + lane.time(own);
        if full > 0 {
            let full = u32::try_from(full).unwrap_or(u32::MAX);
            answered = answered + lane.time(max).saturating_mul(full);
        }
        Some(answered + self.writing.mean())
    }

    /// Whether requests that cannot be answered in time are refused, rather than those with their
    /// time up.
    pub(super) fn refuses_late(&self) -> bool {
        self.door.refuse_late && !self.serves_late
    }

    /// `None` where no request is refused for being late.
    pub(super) fn punctual<'l, K, T>(&self, lane: &'l Lane<K, T>, now: Timestamp) -> Option<Punctual<'l>> {
        let refuses = self.refuses_late() && self.outage.is_none();
        refuses.then(|| Punctual {
            starts: lane.free_at(now),
            idle: lane.executes_nothing(),
            forgiven: self.forgiven,
            writing: self.writing.mean(),
            predictor: &lane.predictor,
        })
    }

    /// Until when the next batch waits though a slot is free; `None` when it may go.
    pub(super) fn holds_until<K, T>(&self, lane: &Lane<K, T>, now: Timestamp) -> Option<Timestamp> {
        if lane.executes_nothing() {
            return None;
        }
        Some(lane.free_at(now) - LEAD).filter(|&moment| moment > now)
    }

    /// `serves`: a lane does, and does not stall.
    pub(super) fn note_service(&mut self, serves: bool, now: Timestamp) {
        match (self.outage, serves) {
            (None, false) => self.outage = Some(now),
            (Some(since), true) => {
                let forgiven = now.since(since).saturating_mul(FORGIVEN_PER_OUTAGE).min(MAX_FORGIVEN);
                self.forgiven = self.forgiven.max(now + forgiven);
                self.outage = None;
            }
            _ => {}
        }
    }

    /// The requests that wait now are delayed by those that were put back and go first.
    pub(super) fn put_back(&mut self, now: Timestamp) {
        self.forgiven = self.forgiven.max(now);
    }

    /// No request waits any more that could have been delayed.
    pub(super) fn emptied(&mut self, now: Timestamp) {
        self.forgiven = self.forgiven.min(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Limits = Limits { max_rows: 16, max_requests: 9, max_delay: Duration::from_millis(2) };

    fn at(seconds: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_secs(seconds))
    }

    #[test]
    fn the_door_moves_within_what_the_configuration_and_the_model_allow() {
        let mut door = Doorkeeper::new(MOST, false);
        assert_eq!(door.limits(), MOST);
        for (max_batch, rows) in [(0, 1), (1, 1), (4, 4), (16, 16), (u32::MAX, 16)] {
            door.set(Door::open(max_batch));
            assert_eq!(door.limits(), Limits { max_rows: rows, ..MOST });
        }
        door.found(0, 1);
        door.set(Door::open(4));
        assert_eq!(door.limits().max_rows, 0, "there is no batch axis");
    }

    #[test]
    fn an_outage_is_forgiven_in_proportion_or_until_the_queue_was_empty() {
        let mut door = Doorkeeper::new(MOST, false);
        assert_eq!(door.forgiven, at(0));
        door.note_service(false, at(10));
        door.note_service(false, at(11));
        door.note_service(true, at(12));
        door.note_service(true, at(13));
        assert_eq!(door.forgiven, at(32));
        door.note_service(false, at(100));
        door.note_service(true, at(500));
        assert_eq!(door.forgiven, at(530));
    }

    #[test]
    fn whom_a_hand_over_or_a_death_delayed_is_forgiven_and_who_comes_after_an_empty_queue_is_not() {
        let mut door = Doorkeeper::new(MOST, false);
        door.put_back(at(5));
        assert_eq!(door.forgiven, at(5));
        door.note_service(false, at(6));
        door.note_service(true, at(8));
        assert_eq!(door.forgiven, at(28));
        door.emptied(at(10));
        assert_eq!(door.forgiven, at(10));
    }
}
