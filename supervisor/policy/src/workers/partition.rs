//! Shares that are a partition inside the worker. Batches move to other SMs without starting a worker.
//! The [`Relocator`] decides which groups the worker prepares, releases and moves to.
//!
//! If a worker reports that its model cannot change partitions, all later changes of the share start a
//! shadow.

use std::collections::BTreeMap;

use shadowslice_shared::batch::PartitionReply;
use shadowslice_shared::boot::{ProvenPartitions, WarmTime, WarmUpReport};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::profile::{Execution, ExecutionRow};
use shadowslice_shared::units::{Percent, Timestamp};

use super::Workers;
use super::change::{ChangeMechanism, OngoingChange, ResizeRefused};
use super::messages::{Action, Cause, HandoverMode, LifecycleReport, ResizeRequest};
use super::primary::Primary;
use super::relocator::{Departure, Relocation, Relocator, times_of};
use crate::scheduler::Slice;

impl Workers {
    pub(super) fn attach(&mut self, worker: WorkerId, warmed: &WarmUpReport, asked: Option<Groups>) {
        let ready = warmed.partitions.as_ref().map(|proven| proven.ready);
        if let Some((asked, proven)) = asked.zip(warmed.partitions.as_ref()) {
            self.note_proofs(asked, proven);
        }
        let Some(slot) = self.processes.slot_mut(worker) else { return };
        slot.partition = ready;
        let share = slot.share;
        let times = times_of(&warmed.times);
        if ready.is_some() || share == Percent::WHOLE {
            self.learn_execution(warmed);
        }
        let slice = match (ready, &self.relocator) {
            (Some(groups), Ok(relocator)) => {
                let slice = relocator.slice(groups);
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
        columns.extend(self.relocator.iter().flat_map(Relocator::times));
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
        let Ok(relocator) = &mut self.relocator else { return };
        let cannot = relocator.learn(asked, proven);
        self.ask(self.share_inside(), cannot);
    }

    /// Requests the groups of a share, unless the last request was for the same number of groups.
    pub(super) fn ask_groups(&mut self, share: Percent) {
        if self.relocator.as_ref().is_ok_and(|relocator| relocator.needs_request(share)) {
            self.ask(share, None);
        }
    }

    fn ask(&mut self, share: Percent, cannot: Option<Groups>) {
        let Ok(relocator) = &mut self.relocator else { return };
        let count = relocator.request(share);
        self.act(Action::AskGroups { count, cannot });
    }

    /// Handles the groups that the model should have.
    pub(super) fn groups_are(&mut self, groups: Groups) {
        let Ok(relocator) = &mut self.relocator else { return };
        let Some(why) = relocator.retarget(groups) else { return };
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
        let groups = self.processes.slot(worker).and_then(|slot| slot.partition);
        if let (Ok(relocator), Some(groups)) = (&mut self.relocator, groups) {
            relocator.starts_on(groups);
        }
    }

    pub(super) fn repartition(&mut self, request: ResizeRequest) {
        self.act(Action::MeasureStall { outage: false });
        self.change = Some(OngoingChange::Inside { request, from: self.share });
        if let Ok(relocator) = &mut self.relocator {
            relocator.forget_refusal();
        }
        self.ask_groups(request.share);
    }

    /// Moves the serving worker to the groups that the model should have.
    pub(super) fn update_partition(&mut self) {
        let Some(worker) = self.processes.serving().filter(|_| !self.is_handing_over()) else { return };
        let Ok(relocator) = &mut self.relocator else { return };
        match relocator.next(self.now) {
            Some(Relocation::Prepare { target, release }) => {
                self.release(worker, release);
                self.act(Action::Prepare(worker, target));
            }
            Some(Relocation::Move(target)) => {
                self.move_to(worker, target);
                self.repartitioned(worker, true);
            }
            Some(Relocation::Stay) => self.repartitioned(worker, false),
            None => {}
        }
    }

    fn move_to(&mut self, worker: WorkerId, groups: Groups) {
        let inside = self.inside();
        let share = inside.map_or(self.share, |(request, _)| request.share);
        let Ok(relocator) = &mut self.relocator else { return };
        let Departure { slice, release } = relocator.depart(groups);
        if let Some((request, _)) = inside {
            self.act(Action::AwaitEffect(worker, Some(request)));
        }
        self.act(Action::Move { worker, share, slice });
        self.release(worker, release);
    }

    fn release(&mut self, worker: WorkerId, partition: Option<Groups>) {
        if let Some(partition) = partition {
            self.act(Action::Forget(worker, partition));
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
        if self.processes.serving() != Some(worker) {
            return;
        }
        let Ok(relocator) = &mut self.relocator else { return };
        match result {
            Ok(()) => relocator.prepared(groups),
            Err(why) => {
                relocator.refuse(groups, why);
                self.ask(self.share_inside(), Some(groups));
            }
        }
    }

    /// Stops using partitions. From now on, changes of the share start another worker.
    pub(super) fn leave_partitions(&mut self, why: &str) {
        if self.relocator.is_err() {
            return;
        }
        let model = self.settings.model.clone();
        self.repartition_failed(&ResizeRefused::NoPartition { model, why: why.to_owned() });
        if self.settings.handover == HandoverMode::InProcess {
            return self.down(format!(
                "{why}; set `handover: auto` to serve the model and change its share by shadows"
            ));
        }
        let serving = self.processes.serving();
        if let Some(worker) = serving {
            self.move_to(worker, Groups::WHOLE);
            self.has_whole_gpu(worker);
        }
        self.relocator = Err(why.to_owned());
        self.act(Action::NeedsShadows);
        self.restore_share();
    }

    /// Starts a hand-over that restores the share, if the serving worker has the whole GPU instead. A
    /// worker has the whole GPU if it was started for a partition and the model can no longer use
    /// partitions.
    pub(super) fn restore_share(&mut self) {
        let slot = self.processes.serving().and_then(|worker| self.processes.slot(worker));
        let whole = slot.is_some_and(|slot| slot.partition == Some(Groups::WHOLE));
        if self.relocator.is_err() && whole && self.share != Percent::WHOLE && self.change.is_none() {
            let share = std::mem::replace(&mut self.share, Percent::WHOLE);
            let (cause, decided) = (Cause::Worker, self.now);
            self.begin_handover(ResizeRequest { number: None, share, cause, decided }, None);
        }
    }

    /// Records that the worker has the whole GPU, even if it was started with a smaller partition.
    fn has_whole_gpu(&mut self, worker: WorkerId) {
        if let Some(slot) = self.processes.slot_mut(worker) {
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
        self.relocator.as_ref().ok()?.due().filter(|_| self.processes.serving().is_some())
    }

    pub(super) fn partition_on_time(&mut self) {
        if let Some(worker) = self.processes.serving()
            && self.partition_due().is_some_and(|due| due <= self.now)
            && !matches!(self.processes.primary, Primary::Down { .. })
        {
            self.misbehaved(worker, "the worker did not prepare a partition within 10 s");
        }
    }
}
