//! The door: how the model batches and whom it turns away, as its sharing policy last said.

use std::time::Duration;

use shadowslice_policy::batcher::Limits;
use shadowslice_policy::door::{self, Ahead};
use shadowslice_policy::punctual::Punctual;
use shadowslice_policy::sharing::Door;
use shadowslice_shared::units::Moment;

use super::lane::{Lane, Waiting};
use super::request::Failure;

/// What an outage delayed is not refused for as many times as long as that lasted.
const FORGIVEN_PER_OUTAGE: u32 = 10;

/// Nor for longer than this.
const MAX_FORGIVEN: Duration = Duration::from_secs(30);

/// Keeps the door.
#[derive(Debug)]
pub(crate) struct Doorkeeper {
    door: Door,
    /// Whether everybody is let in, however late he will be: `on_late: serve`.
    serves_late: bool,
    /// What the configuration and the model allow.
    most: Limits,
    forgiveness: Forgiveness,
}

impl Doorkeeper {
    /// An open door.
    pub(crate) fn new(most: Limits, serves_late: bool) -> Self {
        Self { door: Door::open(u32::MAX), serves_late, most, forgiveness: Forgiveness::default() }
    }

    /// The policy opens or narrows the door.
    pub(crate) fn set(&mut self, door: Door) {
        self.door = door;
    }

    /// The configuration says otherwise.
    pub(crate) fn configure(&mut self, max_delay: Duration, serves_late: bool) {
        self.most.max_delay = max_delay;
        self.serves_late = serves_late;
    }

    /// The model has been found to allow these batches.
    pub(crate) fn found(&mut self, max_rows: u32, max_requests: usize) {
        self.most = Limits { max_rows, max_requests, ..self.most };
    }

    /// What bounds batches now.
    pub(crate) fn limits(&self) -> Limits {
        // Zero says that there is no batch axis; then there is nothing to cap.
        Limits { max_rows: self.most.max_rows.min(self.door.max_batch.max(1)), ..self.most }
    }

    /// Whether a request that comes now is refused, as it cannot be answered in time behind so many rows; `lane` is the one that
    /// serves. While none does, or it stalls, none is: the load is not to blame.
    pub(crate) fn refuses(
        &self,
        request: &Waiting,
        queued_rows: u64,
        lane: Option<&Lane>,
        now: Moment,
    ) -> bool {
        let may = self.refuses_late() && self.forgiveness.outage.is_none() && !self.forgiveness.covers(now);
        let answered =
            lane.filter(|_| may).and_then(|lane| self.answered_at(request, queued_rows, lane, now));
        answered.is_some_and(|answered| answered > request.deadline)
    }

    /// When a request that comes now should be answered, with so many rows before it. Nobody asks for one that finds
    /// nobody before it: it is tried in any case, or predictions would never be corrected.
    fn answered_at(&self, request: &Waiting, queued_rows: u64, lane: &Lane, now: Moment) -> Option<Moment> {
        if queued_rows == 0 && lane.executes_nothing() {
            return None;
        }
        let ahead = Ahead {
            lane_free: lane.free_at(now),
            rows: queued_rows + u64::from(request.rows.saturating_sub(1)),
            max_batch: self.limits().max_rows,
        };
        Some(ahead.answered_at(|rows| lane.time(rows)))
    }

    /// Whether requests are refused that cannot be answered in time, rather than those whose time is up.
    pub(crate) fn refuses_late(&self) -> bool {
        self.door.refuse_late && !self.serves_late
    }

    /// What says who of those that wait for this lane is in time; nothing where nobody is refused for that.
    pub(crate) fn punctual<'l>(&self, lane: &'l Lane, now: Moment) -> Option<Punctual<'l>> {
        let refuses = self.refuses_late() && self.forgiveness.outage.is_none();
        refuses.then(|| Punctual {
            starts: lane.free_at(now),
            idle: lane.executes_nothing(),
            forgiven: self.forgiveness.before,
            predictor: &lane.predictor,
        })
    }

    /// Until when the next batch for `lane` waits though there is a slot for it; nothing when it may go.
    pub(crate) fn holds_until(&self, lane: &Lane, now: Moment) -> Option<Moment> {
        if lane.executes_nothing() {
            return None;
        }
        Some(door::send_at(lane.free_at(now))).filter(|&moment| moment > now)
    }

    /// Says whether a lane serves, and does not stall.
    pub(crate) fn note_service(&mut self, serves: bool, now: Moment) {
        self.forgiveness.note_service(serves, now);
    }

    /// What waits now is delayed by what ran without an answer and goes before it.
    pub(crate) fn put_back(&mut self, now: Moment) {
        self.forgiveness.before = self.forgiveness.before.max(now);
    }

    /// Nothing waits any more that could have been delayed.
    pub(crate) fn emptied(&mut self, now: Moment) {
        self.forgiveness.before = self.forgiveness.before.min(now);
    }
}

/// What a request hears that cannot be answered in time.
pub(crate) fn too_late(model: &str, request: &Waiting) -> Failure {
    let due = request.deadline.since(request.arrived).as_secs_f64() * 1e3;
    Failure::Unavailable(format!(
        "model '{model}' could not answer the request within {due} ms, its SLO or timeout, under the present load"
    ))
}

/// Whose lateness is no sign of load.
#[derive(Debug, Default)]
struct Forgiveness {
    /// Since when no lane has served, or the one that does has stalled.
    outage: Option<Moment>,
    /// Requests that came before this are not refused for being late.
    before: Moment,
}

impl Forgiveness {
    fn covers(&self, arrived: Moment) -> bool {
        arrived < self.before
    }

    fn note_service(&mut self, serves: bool, now: Moment) {
        match (self.outage, serves) {
            (None, false) => self.outage = Some(now),
            (Some(since), true) => {
                let forgiven = now.since(since).saturating_mul(FORGIVEN_PER_OUTAGE).min(MAX_FORGIVEN);
                self.before = self.before.max(now + forgiven);
                self.outage = None;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::after_origin(Duration::from_secs(seconds))
    }

    #[test]
    fn the_door_moves_within_what_the_configuration_and_the_model_allow() {
        let most = Limits { max_rows: 16, max_requests: 9, max_delay: Duration::from_millis(2) };
        let mut door = Doorkeeper::new(most, false);
        assert_eq!(door.limits(), most);
        for (max_batch, rows) in [(0, 1), (1, 1), (4, 4), (16, 16), (u32::MAX, 16)] {
            door.set(Door::open(max_batch));
            assert_eq!(door.limits(), Limits { max_rows: rows, ..most });
        }
        door.found(0, 1);
        door.set(Door::open(4));
        assert_eq!(door.limits().max_rows, 0, "there is no batch axis");
    }

    #[test]
    fn an_outage_is_forgiven_in_proportion_or_until_the_queue_was_empty() {
        let mut forgiveness = Forgiveness::default();
        assert!(!forgiveness.covers(at(0)));
        forgiveness.note_service(false, at(10));
        forgiveness.note_service(false, at(11));
        forgiveness.note_service(true, at(12));
        forgiveness.note_service(true, at(13));
        assert!(forgiveness.covers(at(31)) && !forgiveness.covers(at(32)));
        forgiveness.note_service(false, at(100));
        forgiveness.note_service(true, at(500));
        assert!(forgiveness.covers(at(529)) && !forgiveness.covers(at(530)));
    }

    #[test]
    fn whom_a_hand_over_or_a_death_delayed_is_forgiven_and_who_comes_after_an_empty_queue_is_not() {
        let most = Limits { max_rows: 16, max_requests: 9, max_delay: Duration::ZERO };
        let mut door = Doorkeeper::new(most, false);
        door.put_back(at(5));
        assert!(door.forgiveness.covers(at(4)) && !door.forgiveness.covers(at(5)));
        door.note_service(false, at(6));
        door.note_service(true, at(8));
        assert!(door.forgiveness.covers(at(20)));
        door.emptied(at(10));
        assert!(!door.forgiveness.covers(at(10)));
    }
}
