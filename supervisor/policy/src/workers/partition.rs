//! Shares that are a partition inside the worker. Batches move to other SMs without starting a worker.
//!
//! ```text
//!   request ─▶ groups are requested ─▶ Prepare ─▶ Prepared ─▶ the next batch runs there: completed
//!                        ▲                          │
//!   other models move ───┘                          └▶ the partition is impossible: another one,
//!                                                      or the former share, or shadows
//! ```
//!
//! If a worker reports that its model cannot change partitions, all later changes of the share start a
//! shadow.

use std::collections::BTreeMap;
use std::time::Duration;

use shadowslice_shared::batch::PartitionReply;
use shadowslice_shared::boot::{PartitionProof, ProvenPartitions, WarmTime, WarmUpReport};
use shadowslice_shared::groups::{Division, Groups, READY_PARTITIONS};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::profile::{Execution, ExecutionRow};
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use super::Workers;
use super::change::{ChangeMechanism, OngoingChange, ResizeRefused};
use super::messages::{Action, Cause, HandoverMode, LifecycleReport, ResizeRequest};
use super::primary::Primary;
use crate::scheduler::Slice;

/// The maximum time in which a worker prepares a partition. After this time, the worker counts as hung.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of a model's partition inside its worker.
#[derive(Debug)]
pub(super) struct Partition {
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

impl Partition {
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

    /// Removes and returns the least recently used partition if at least `count` partitions are ready.
    /// The worker keeps the removed partition until the batches that use it have run.
    fn take_oldest(&mut self, count: usize) -> Option<Groups> {
        let oldest = self.ready.iter().position(|&groups| groups != self.current);
        let full = self.ready.len() >= count;
        oldest.filter(|_| full).map(|oldest| self.ready.remove(oldest))
    }

    fn slice(&self, groups: Groups) -> Slice {
        let count = if groups == Groups::WHOLE { self.division.count() } else { groups.count() };
        let (times, all) = (self.times_on(count), self.times_on(self.division.count()));
        let max_rows = times.last().filter(|_| times.len() < all.len()).map(|time| time.rows);
        Slice { groups, sms: self.division.sms(groups), times: times_of(times), max_rows }
    }

    fn times_on(&self, count: usize) -> &[WarmTime] {
        let proof = self.proven.iter().find(|proof| proof.groups == count);
        proof.and_then(|proof| proof.result.as_deref().ok()).unwrap_or_default()
    }
}

fn times_of(warmed: &[WarmTime]) -> Vec<(u32, Duration)> {
    warmed.iter().map(|time| (time.rows, time.took)).collect()
}

impl Workers {
    pub(super) fn attach(&mut self, worker: WorkerId, warmed: &WarmUpReport, asked: Option<Groups>) {
        let ready = warmed.partitions.as_ref().map(|proven| proven.ready);
        if let Some((asked, proven)) = asked.zip(warmed.partitions.as_ref()) {
            self.note_proofs(asked, proven);
        }
        let Some(slot) = self.slots.get_mut(&worker) else { return };
        slot.partition = ready;
        let share = slot.share;
        let times = times_of(&warmed.times);
        if ready.is_some() || share == Percent::WHOLE {
            self.learn_execution(warmed);
        }
        let slice = match (ready, &self.partition) {
            (Some(groups), Ok(partition)) => {
                let slice = partition.slice(groups);
                if slice.times.is_empty() {
                    Slice { groups, sms: self.sms(share), times, max_rows: None }
                } else {
                    slice
                }
            }
            (groups, _) => {
                let whole = groups == Some(Groups::WHOLE);
                let sms = self.settings.sms_of(if whole { Percent::WHOLE } else { share });
                Slice { groups: groups.unwrap_or(Groups::WHOLE), sms, times, max_rows: None }
            }
        };
        let sizes = warmed.times.iter().map(|time| time.rows).collect();
        self.act(Action::Attach { worker, share, slice, sizes });
    }

    /// Records the execution times on the whole GPU and on each proven number of groups. Other workers
    /// on the GPU may have executed batches during the measurement.
    fn learn_execution(&mut self, WarmUpReport { times: on_all, kernels, .. }: &WarmUpReport) {
        let all = self.settings.sms_of(Percent::WHOLE);
        let mut columns = BTreeMap::from([(all, on_all.as_slice())]);
        if let Ok(Partition { division, proven, .. }) = &self.partition {
            let parts = proven.iter().filter(|proof| proof.groups < division.count());
            let part = |proof: &'_ PartitionProof| division.sms(Groups::first(proof.groups));
            columns.extend(parts.filter_map(|proof| Some((part(proof), proof.result.as_deref().ok()?))));
        }
        let ms = |times: &[WarmTime], rows| {
            // A batch size that does not fit runs as several batches of the largest size that fits.
            let time = times.iter().find(|time| time.rows == rows).or(times.last())?;
            Some(time.took.as_secs_f64() * 1e3 * f64::from(rows.div_ceil(time.rows)))
        };
        let row = |size: &WarmTime| {
            let ms = columns.values().map(|times| ms(times, size.rows)).collect::<Option<Vec<f64>>>()?;
            Some(ExecutionRow { batch: size.rows, ms })
        };
        let rows = on_all.iter().filter_map(row).collect();
        let table = Execution::new(columns.keys().copied().collect(), rows);
        let counted = |table: Execution| match kernels {
            Some(kernels) => table.with_kernels(*kernels),
            None => table,
        };
        self.execution = table.ok().map(counted).or(self.execution.take());
    }

    /// Records the proofs of a worker that was started with the partition `asked`.
    fn note_proofs(&mut self, asked: Groups, proven: &ProvenPartitions) {
        let share = self.share_inside();
        let Ok(partition) = &mut self.partition else { return };
        partition.proven.clone_from(&proven.counts);
        let cannot = (proven.ready != asked).then_some(asked);
        self.ask(share, cannot);
    }

    /// Requests the groups of a share, unless the last request was for the same number of groups.
    pub(super) fn ask_groups(&mut self, share: Percent) {
        if self.partition.as_ref().is_ok_and(|partition| partition.asked != partition.count_of(share)) {
            self.ask(share, None);
        }
    }

    fn ask(&mut self, share: Percent, cannot: Option<Groups>) {
        let Ok(partition) = &mut self.partition else { return };
        let count = partition.count_of(share);
        partition.asked = count;
        partition.unanswered += 1;
        self.act(Action::AskGroups { count, cannot });
    }

    /// Records the groups that the model should have. If the model requested fewer groups but gets the
    /// whole GPU, it cannot use any partition of the requested size.
    pub(super) fn groups_are(&mut self, groups: Groups) {
        let Ok(partition) = &mut self.partition else { return };
        partition.target = groups;
        partition.unanswered = partition.unanswered.saturating_sub(1);
        let none = groups == Groups::WHOLE && partition.asked < partition.division.count();
        if !none || partition.unanswered > 0 {
            return;
        }
        let refused = partition.refused.as_ref().map(|(_, why)| why.clone());
        let why = refused.unwrap_or_else(|| "the worker can prepare none of the possible groups".to_owned());
        if self.inside().is_none() {
            return self.leave_partitions(&why);
        }
        let model = self.settings.model.clone();
        self.repartition_failed(&ResizeRefused::NoPartition { model, why });
    }

    fn inside(&self) -> Option<(ResizeRequest, Percent)> {
        match self.change {
            Some(OngoingChange::Inside { request, from }) => Some((request, from)),
            _ => None,
        }
    }

    /// Returns the share for which the model should have groups. During a change inside the worker,
    /// this is the new share.
    pub(super) fn share_inside(&self) -> Percent {
        self.inside().map_or(self.share, |(request, _)| request.share)
    }

    /// Records that the worker starts to serve with the partition that it has ready.
    pub(super) fn serves_on(&mut self, worker: WorkerId) {
        let groups = self.slots.get(&worker).and_then(|slot| slot.partition);
        if let (Ok(partition), Some(groups)) = (&mut self.partition, groups) {
            (partition.current, partition.moving, partition.refused) = (groups, None, None);
            partition.ready = Some(groups).into_iter().filter(|&groups| groups != Groups::WHOLE).collect();
        }
    }

    pub(super) fn repartition(&mut self, request: ResizeRequest) {
        self.act(Action::MeasureStall { outage: false });
        self.change = Some(OngoingChange::Inside { request, from: self.share });
        if let Ok(partition) = &mut self.partition {
            partition.refused = None;
        }
        self.ask_groups(request.share);
    }

    /// Moves the serving worker to the groups that the model should have.
    pub(super) fn update_partition(&mut self) {
        let until = self.now + PREPARE_TIMEOUT;
        let Some(worker) = self.serving().filter(|_| !self.is_handing_over()) else { return };
        let Ok(partition) = &mut self.partition else { return };
        let target = partition.target;
        let refused = partition.refused.as_ref().is_some_and(|(groups, _)| *groups == target);
        if partition.moving.is_some() || partition.unanswered > 0 || refused {
            return;
        }
        let (moves, whole) = (partition.current != target, target == Groups::WHOLE);
        if moves && !whole && !partition.ready.contains(&target) {
            partition.moving = Some((target, until));
            // An unused partition may occupy the worker's last place for a partition. The worker must
            // release the unused partition before it prepares another one.
            let oldest = partition.take_oldest(READY_PARTITIONS);
            if let Some(oldest) = oldest {
                self.act(Action::Forget(worker, oldest));
            }
            return self.act(Action::Prepare(worker, target));
        }
        if moves {
            self.move_to(worker, target);
        }
        self.repartitioned(worker, moves);
    }

    fn move_to(&mut self, worker: WorkerId, groups: Groups) {
        let inside = self.inside();
        let share = inside.map_or(self.share, |(request, _)| request.share);
        let Ok(partition) = &mut self.partition else { return };
        let slice = partition.slice(groups);
        partition.current = groups;
        partition.ready.retain(|&other| other != groups);
        if groups != Groups::WHOLE {
            partition.ready.push(groups);
        }
        let oldest = partition.take_oldest(READY_PARTITIONS);
        if let Some((request, _)) = inside {
            self.act(Action::AwaitEffect(worker, Some(request)));
        }
        self.act(Action::Move { worker, share, slice });
        if let Some(oldest) = oldest {
            self.act(Action::Forget(worker, oldest));
        }
    }

    /// Completes a change inside the worker. `moved` is false if the new share has the same groups as
    /// the former share.
    fn repartitioned(&mut self, worker: WorkerId, moved: bool) {
        let Some((request, from)) = self.inside() else { return };
        if !moved {
            self.act(Action::AwaitEffect(worker, Some(request)));
        }
        self.share = request.share;
        self.change = None;
        self.report_completed(request, from, ChangeMechanism::InProcess);
    }

    pub(super) fn prepared(&mut self, worker: WorkerId, PartitionReply { groups, result }: PartitionReply) {
        if self.serving() != Some(worker) {
            return;
        }
        let share = self.share_inside();
        let Ok(partition) = &mut self.partition else { return };
        let awaited = partition.moving.take_if(|(moving, _)| *moving == groups).is_some();
        match result {
            Ok(()) if awaited => partition.ready.insert(0, groups),
            Ok(()) => {}
            // The partition may have counted as ready. In that case, its batches run on all SMs until
            // the worker moves to another partition.
            Err(why) => {
                partition.refused = Some((groups, why));
                self.ask(share, Some(groups));
            }
        }
    }

    /// Stops using partitions. From now on, changes of the share start another worker.
    pub(super) fn leave_partitions(&mut self, why: &str) {
        if self.partition.is_err() {
            return;
        }
        let model = self.settings.model.clone();
        self.repartition_failed(&ResizeRefused::NoPartition { model, why: why.to_owned() });
        if self.settings.handover == HandoverMode::InProcess {
            return self.down(format!(
                "{why}; set `handover: auto` to serve the model and change its share by shadows"
            ));
        }
        let serving = self.serving();
        if let Some(worker) = serving {
            self.move_to(worker, Groups::WHOLE);
            self.has_whole_gpu(worker);
        }
        self.partition = Err(why.to_owned());
        self.act(Action::NeedsShadows);
        self.restore_share();
    }

    /// Starts a hand-over that restores the share, if the serving worker has the whole GPU instead. A
    /// worker has the whole GPU if it was started for a partition and the model can no longer use
    /// partitions.
    pub(super) fn restore_share(&mut self) {
        let slot = self.serving().and_then(|worker| self.slots.get(&worker));
        let whole = slot.is_some_and(|slot| slot.partition == Some(Groups::WHOLE));
        if self.partition.is_err() && whole && self.share != Percent::WHOLE && self.change.is_none() {
            let share = std::mem::replace(&mut self.share, Percent::WHOLE);
            let (cause, decided) = (Cause::Worker, self.now);
            self.begin_handover(ResizeRequest { number: None, share, cause, decided }, None);
        }
    }

    /// Records that the worker has the whole GPU, even if it was started with a smaller partition.
    fn has_whole_gpu(&mut self, worker: WorkerId) {
        if let Some(slot) = self.slots.get_mut(&worker) {
            slot.partition = Some(Groups::WHOLE);
        }
    }

    /// Ends a change inside the worker, and keeps the former share.
    pub(super) fn repartition_failed(&mut self, refused: &ResizeRefused) {
        let Some((request, from)) = self.inside() else { return };
        self.change = None;
        self.act(Action::Report(LifecycleReport::Aborted(request, refused.clone())));
        self.ask_groups(from);
    }

    pub(super) fn partition_due(&self) -> Option<Timestamp> {
        let moving = self.partition.as_ref().ok()?.moving.as_ref()?;
        self.serving().map(|_| moving.1)
    }

    pub(super) fn partition_on_time(&mut self) {
        if let Some(worker) = self.serving()
            && self.partition_due().is_some_and(|due| due <= self.now)
            && !matches!(self.primary, Primary::Down { .. })
        {
            self.misbehaved(worker, "the worker did not prepare a partition within 10 s");
        }
    }
}
