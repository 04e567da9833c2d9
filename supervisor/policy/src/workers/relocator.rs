//! The relocator: the partitions of a model inside its worker. It decides which groups of SMs the worker
//! prepares, releases and moves to.
//!
//! ```text
//!   a share ─▶ a number of groups is requested ─▶ target ─▶ prepare ─▶ ready ─▶ move
//!                           ▲                                  │
//!      other models move ───┘                                  └─▶ refused: other groups are requested
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use shadowslice_shared::boot::{PartitionProof, ProvenPartitions, WarmTime};
use shadowslice_shared::groups::{Division, Groups, READY_PARTITIONS};
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use crate::scheduler::Slice;

/// The maximum time in which a worker prepares a partition. After this time, the worker counts as hung.
pub(super) const PREPARE_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of a model's partitions inside its worker.
#[derive(Debug)]
pub(super) struct Relocator {
    division: Division,
    /// The number of groups in the last request for groups.
    asked: usize,
    /// The number of unanswered requests for groups.
    unanswered: u32,
    /// The groups that the model should have.
    target: Groups,
    /// The proofs for each number of groups. The list is empty until the first worker is warm.
    proven: Vec<PartitionProof>,
    /// The groups on which batches run.
    current: Groups,
    /// The partitions that the serving worker has ready. The most recently used partition is the last
    /// one.
    ready: Vec<Groups>,
    /// The partition that is being prepared, and the time by which it must be ready.
    moving: Option<(Groups, Timestamp)>,
    /// The last partition that the model could not use, and the reason.
    refused: Option<(Groups, String)>,
}

/// The next step of the serving worker towards the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Relocation {
    /// The worker prepares the target. If its last place for a partition is occupied, the worker first
    /// releases another partition.
    Prepare { target: Groups, release: Option<Groups> },
    /// The worker's batches move to the target.
    Move(Groups),
    /// The worker's batches already run on the target.
    Stay,
}

/// A move of the worker's batches to other groups.
#[derive(Debug)]
pub(super) struct Departure {
    /// The SMs on which further batches run.
    pub(super) slice: Slice,
    /// The partition that the worker releases after the move.
    pub(super) release: Option<Groups>,
}

impl Relocator {
    pub(super) fn new(division: Division, share: Percent) -> Self {
        Self {
            asked: division.groups_of(share),
            unanswered: 0,
            division,
            target: Groups::WHOLE,
            proven: Vec::new(),
            current: Groups::WHOLE,
            ready: Vec::new(),
            moving: None,
            refused: None,
        }
    }

    /// Returns the largest proven number of groups that fits into the share. If no proven number fits,
    /// returns the smallest one.
    fn count_of(&self, share: Percent) -> usize {
        let fitting = self.division.groups_of(share);
        let able = self.proven.iter().filter(|proof| proof.result.is_ok()).map(|proof| proof.groups);
        let below = able.clone().filter(|&count| count <= fitting).max();
        below.or(able.min()).unwrap_or(fitting)
    }

    pub(super) fn sms_of(&self, share: Percent) -> Sms {
        let count = self.count_of(share);
        let whole = count == self.division.count();
        self.division.sms(if whole { Groups::WHOLE } else { Groups::first(count) })
    }

    pub(super) fn target(&self) -> Groups {
        self.target
    }

    pub(super) fn division(&self) -> &Division {
        &self.division
    }

    pub(super) fn current(&self) -> Groups {
        self.current
    }

    /// Returns the time by which the partition that is being prepared must be ready.
    pub(super) fn due(&self) -> Option<Timestamp> {
        self.moving.map(|(_, until)| until)
    }

    /// Returns the execution times on each proven number of groups, by the number of SMs.
    pub(super) fn times(&self) -> BTreeMap<Sms, &[WarmTime]> {
        let parts = self.proven.iter().filter(|proof| proof.groups < self.division.count());
        let part = |proof: &'_ PartitionProof| self.division.sms(Groups::first(proof.groups));
        parts.filter_map(|proof| Some((part(proof), proof.result.as_deref().ok()?))).collect()
    }

    fn times_on(&self, count: usize) -> &[WarmTime] {
        let proof = self.proven.iter().find(|proof| proof.groups == count);
        proof.and_then(|proof| proof.result.as_deref().ok()).unwrap_or_default()
    }

    pub(super) fn slice(&self, groups: Groups) -> Slice {
        let count = if groups == Groups::WHOLE { self.division.count() } else { groups.count() };
        let (times, all) = (self.times_on(count), self.times_on(self.division.count()));
        let max_rows = times.last().filter(|_| times.len() < all.len()).map(|time| time.rows);
        Slice { groups, sms: self.division.sms(groups), times: times_of(times), max_rows }
    }

    /// Records the proofs of a worker that was started with the partition `asked`. Returns this
    /// partition if the worker cannot use it.
    pub(super) fn learn(&mut self, asked: Groups, proven: &ProvenPartitions) -> Option<Groups> {
        self.proven.clone_from(&proven.counts);
        (proven.ready != asked).then_some(asked)
    }

    /// Returns true if the share needs another number of groups than the last request was for.
    pub(super) fn needs_request(&self, share: Percent) -> bool {
        self.asked != self.count_of(share)
    }

    /// Records a request for the groups of a share. Returns the number of groups to request.
    pub(super) fn request(&mut self, share: Percent) -> usize {
        self.asked = self.count_of(share);
        self.unanswered += 1;
        self.asked
    }

    /// Records the groups that the model should have. If the model requested fewer groups but gets the
    /// whole GPU, it cannot use any partition of the requested size. In that case, returns the reason.
    pub(super) fn retarget(&mut self, groups: Groups) -> Option<String> {
        self.target = groups;
        self.unanswered = self.unanswered.saturating_sub(1);
        let none = groups == Groups::WHOLE && self.asked < self.division.count();
        if !none || self.unanswered > 0 {
            return None;
        }
        let refused = self.refused.as_ref().map(|(_, why)| why.clone());
        Some(refused.unwrap_or_else(|| "the worker can prepare none of the possible groups".to_owned()))
    }

    /// Records that a worker starts to serve with the partition that it has ready.
    pub(super) fn starts_on(&mut self, groups: Groups) {
        (self.current, self.moving, self.refused) = (groups, None, None);
        self.ready = Some(groups).into_iter().filter(|&groups| groups != Groups::WHOLE).collect();
    }

    /// Lets the model try the last refused partition again.
    pub(super) fn forget_refusal(&mut self) {
        self.refused = None;
    }

    /// Decides the next step towards the target. Returns `None` while the worker prepares a partition,
    /// while requests for groups are unanswered, and if the worker has refused the target.
    pub(super) fn next(&mut self, now: Timestamp) -> Option<Relocation> {
        let target = self.target;
        let refused = self.refused.as_ref().is_some_and(|(groups, _)| *groups == target);
        if self.moving.is_some() || self.unanswered > 0 || refused {
            return None;
        }
        let (moves, whole) = (self.current != target, target == Groups::WHOLE);
        if moves && !whole && !self.ready.contains(&target) {
            self.moving = Some((target, now + PREPARE_TIMEOUT));
            return Some(Relocation::Prepare { target, release: self.take_oldest() });
        }
        Some(if moves { Relocation::Move(target) } else { Relocation::Stay })
    }

    /// Moves batches to these groups.
    pub(super) fn depart(&mut self, groups: Groups) -> Departure {
        let slice = self.slice(groups);
        self.current = groups;
        self.ready.retain(|&other| other != groups);
        if groups != Groups::WHOLE {
            self.ready.push(groups);
        }
        Departure { slice, release: self.take_oldest() }
    }

    /// Removes and returns the least recently used partition if all places for partitions are occupied.
    /// The worker keeps the removed partition until the batches that use it have run.
    fn take_oldest(&mut self) -> Option<Groups> {
        let oldest = self.ready.iter().position(|&groups| groups != self.current);
        let full = self.ready.len() >= READY_PARTITIONS;
        oldest.filter(|_| full).map(|oldest| self.ready.remove(oldest))
    }

    /// Records that the worker has prepared a partition. A late reply changes nothing.
    pub(super) fn prepared(&mut self, groups: Groups) {
        if self.moving.take_if(|(moving, _)| *moving == groups).is_some() {
            self.ready.insert(0, groups);
        }
    }

    /// Records that the worker cannot use a partition. The partition may have counted as ready. In that
    /// case, its batches run on all SMs until the worker moves to another partition.
    pub(super) fn refuse(&mut self, groups: Groups, why: String) {
        self.moving.take_if(|(moving, _)| *moving == groups);
        self.refused = Some((groups, why));
    }
}

pub(super) fn times_of(warmed: &[WarmTime]) -> Vec<(u32, Duration)> {
    warmed.iter().map(|time| (time.rows, time.took)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relocator() -> Relocator {
        Relocator::new(Division::of(Sms(132)).unwrap(), Percent::WHOLE)
    }

    fn now() -> Timestamp {
        Timestamp::default()
    }

    fn pair(first: usize) -> Groups {
        (first..first + 2).collect()
    }

    /// Moves the worker to groups that it must prepare first. Returns the released partitions.
    fn relocate(relocator: &mut Relocator, target: Groups) -> Vec<Groups> {
        assert_eq!(relocator.retarget(target), None);
        let Some(Relocation::Prepare { release, .. }) = relocator.next(now()) else {
            panic!("{relocator:?}")
        };
        relocator.prepared(target);
        assert_eq!(relocator.next(now()), Some(Relocation::Move(target)));
        let Departure { slice, release: after } = relocator.depart(target);
        assert_eq!(slice.groups, target);
        [release, after].into_iter().flatten().collect()
    }

    #[test]
    fn a_worker_prepares_a_partition_once_and_then_moves() {
        let mut relocator = relocator();
        assert_eq!(relocator.next(now()), Some(Relocation::Stay));
        assert!(relocate(&mut relocator, pair(0)).is_empty());
        assert_eq!(relocator.next(now()), Some(Relocation::Stay));
        assert!(relocate(&mut relocator, pair(2)).is_empty());
        relocator.retarget(pair(0));
        assert_eq!(relocator.next(now()), Some(Relocation::Move(pair(0))), "it is still ready");
        relocator.retarget(Groups::WHOLE);
        assert_eq!(relocator.next(now()), Some(Relocation::Move(Groups::WHOLE)), "it needs no preparation");
    }

    #[test]
    fn a_worker_waits_for_answers_and_for_its_preparation() {
        let mut relocator = relocator();
        let share = Percent::new(20).unwrap();
        assert!(relocator.needs_request(share));
        let count = relocator.request(share);
        assert!(count > 0 && !relocator.needs_request(share));
        relocator.request(share);
        assert_eq!(relocator.retarget(pair(0)), None);
        assert_eq!(relocator.next(now()), None, "one request is unanswered");
        relocator.retarget(pair(2));
        assert!(
            matches!(relocator.next(now()), Some(Relocation::Prepare { target, .. }) if target == pair(2))
        );
        assert_eq!((relocator.next(now()), relocator.due()), (None, Some(now() + PREPARE_TIMEOUT)));
        relocator.prepared(pair(0));
        assert_eq!(relocator.next(now()), None, "a late reply changes nothing");
    }

    #[test]
    fn a_refused_partition_is_not_tried_again() {
        let mut relocator = relocator();
        relocator.request(Percent::new(20).unwrap());
        relocator.retarget(pair(0));
        relocator.next(now());
        relocator.refuse(pair(0), "too small".to_owned());
        assert_eq!((relocator.next(now()), relocator.due()), (None, None));
        assert_eq!(relocator.retarget(Groups::WHOLE), Some("too small".to_owned()));
        relocator.retarget(pair(0));
        relocator.forget_refusal();
        assert!(matches!(relocator.next(now()), Some(Relocation::Prepare { .. })));
    }

    #[test]
    fn the_least_recently_used_partition_is_released_for_another_one() {
        let mut relocator = relocator();
        for first in [0, 2, 4] {
            assert!(relocate(&mut relocator, pair(first)).is_empty());
        }
        assert_eq!(relocate(&mut relocator, pair(6)), [pair(0)]);
        assert_eq!(relocate(&mut relocator, pair(8)), [pair(2)]);
    }
}
