//! Changes of a share inside the worker: its batches move to other SMs, and nothing is started.
//!
//! ```text
//!   order ─▶ groups from the ledger ─▶ Prepare ─▶ Prepared ─▶ the next batch names them: completed
//!                  ▲                                │
//!   neighbours ────┘                                └▶ they cannot be had: as before, or a shadow
//! ```
//!
//! Where a worker says that its model cannot be moved, shadows change the share from then on.

use std::time::Duration;

use shadowslice_shared::batch::Prepared;
use shadowslice_shared::boot::{PartitionProof, Partitioned, ProvenPartitions, WarmTime};
use shadowslice_shared::groups::{Division, Groups, READY_PARTITIONS};
use shadowslice_shared::units::{Moment, Percent, Sms};
use std::sync::Arc;

use super::ResizeRefused;
use super::events::Controller;
use super::groups::{GroupLedger, Tenancy};
use super::outcome::Effect;
use super::primary::Primary;
use super::resize::ResizeRequest;
use crate::backend::GpuBackend;
use shadowslice_config::{HandoverMode, Model};
use shadowslice_datapath::pipeline::Slice;
use shadowslice_shared::ids::WorkerId;

/// How long a worker may take to make a partition ready, before it counts as hung.
const PREPARE_WITHIN: Duration = Duration::from_secs(10);

/// The means by which a model's share is changed.
#[derive(Debug)]
pub(super) enum Mechanism {
    /// Inside its worker.
    InProcess(Box<InProcess>),
    /// By another process, and why so.
    Process { why: String },
}

/// The state of a model with a partition inside its worker as its share.
#[derive(Debug)]
pub(super) struct InProcess {
    division: Arc<Division>,
    tenancy: Tenancy,
    /// What was proven of each number of groups; empty until the first worker is warm.
    proven: Vec<PartitionProof>,
    /// The partition on which batches run.
    current: Groups,
    /// Partitions that the serving worker has ready; the last one was used last.
    ready: Vec<Groups>,
    /// The partition that is being made ready, and the deadline.
    moving: Option<(Groups, Moment)>,
    /// The last partition that the model could not have.
    refused: Option<Groups>,
    /// The change of share that is under way, and the share before.
    order: Option<(ResizeRequest, Percent)>,
}

impl Mechanism {
    /// How the share of a model is changed, as far as that is known before its load. An error where
    /// the configuration asks for `in-process` and that is not possible.
    pub(super) fn of(
        model: &Model,
        gpu: &dyn GpuBackend,
        ledger: &Arc<GroupLedger>,
        share: Percent,
    ) -> Result<Self, String> {
        let why = match model.handover {
            HandoverMode::Auto | HandoverMode::InProcess => match gpu.division() {
                Ok(_) if model.engine.has_tensorrt() => "TensorRT's engines are built for a share".to_owned(),
                Ok(division) => {
                    let (division, count) = (Arc::clone(division), division.groups_of(share));
                    let tenancy = Tenancy::of(ledger, count, model.priority);
                    return Ok(Self::InProcess(Box::new(InProcess {
                        division,
                        tenancy,
                        proven: Vec::new(),
                        current: Groups::WHOLE,
                        ready: Vec::new(),
                        moving: None,
                        refused: None,
                        order: None,
                    })));
                }
                Err(why) => why.to_owned(),
            },
            HandoverMode::Shadow => "the configuration says `handover: shadow`".to_owned(),
            HandoverMode::Restart => "the configuration says `handover: restart`".to_owned(),
            HandoverMode::Never => "the configuration says `handover: never`".to_owned(),
        };
        if model.handover == HandoverMode::InProcess { Err(why) } else { Ok(Self::Process { why }) }
    }

    /// Whether a change of share has a shadow started.
    pub(super) fn makes_shadows(&self, handover: HandoverMode) -> bool {
        match self {
            Self::InProcess(_) => false,
            Self::Process { .. } => matches!(handover, HandoverMode::Auto | HandoverMode::Shadow),
        }
    }
}

impl InProcess {
    /// The number of groups of a share: the largest proven one that fits, else the smallest proven.
    fn count_of(&self, share: Percent) -> usize {
        let fitting = self.division.groups_of(share);
        let able = self.proven.iter().filter(|proof| proof.result.is_ok()).map(|proof| proof.groups);
        let below = able.clone().filter(|&count| count <= fitting).max();
        below.or(able.min()).unwrap_or(fitting)
    }

    fn sms_of_count(&self, count: usize) -> Sms {
        if count == self.division.count() {
            return self.division.total();
        }
        self.division.sms(Groups::first(count))
    }

    pub(super) fn sms_of(&self, share: Percent) -> Sms {
        self.sms_of_count(self.count_of(share))
    }

    /// The partition that a serving worker is told at its start.
    pub(super) fn assignment(&self) -> Partitioned {
        Partitioned { division: (*self.division).clone(), groups: self.tenancy.groups() }
    }

    /// The share that is to come.
    pub(super) fn coming(&self) -> Option<Percent> {
        self.order.as_ref().map(|(wanted, _)| wanted.share)
    }

    pub(super) fn due(&self) -> Option<Moment> {
        self.moving.map(|(_, until)| until)
    }

    /// The groups on which batches run.
    pub(super) fn current(&self) -> Groups {
        self.current
    }

    pub(super) fn division(&self) -> &Arc<Division> {
        &self.division
    }

    /// If `many` partitions are ready: takes out the one that was used longest ago. The worker
    /// keeps the partition of a batch that was sent until that batch has run.
    fn spare(&mut self, many: usize) -> Option<Groups> {
        let spare = self.ready.iter().position(|&groups| groups != self.current);
        let full = self.ready.len() >= many;
        spare.filter(|_| full).map(|spare| self.ready.remove(spare))
    }

    /// What a lane is told of a partition.
    fn slice(&self, groups: Groups) -> Slice {
        let count = if groups == Groups::WHOLE { self.division.count() } else { groups.count() };
        let proof = self.proven.iter().find(|proof| proof.groups == count);
        let times = proof.and_then(|proof| proof.result.as_ref().ok()).map_or(&[][..], Vec::as_slice);
        Slice { groups, sms: self.division.sms(groups), times: times_of(times) }
    }
}

/// How long batches of so many rows took as a worker warmed up.
pub(super) fn times_of(warmed: &[WarmTime]) -> Vec<(u32, Duration)> {
    warmed.iter().map(|time| (time.rows, time.took)).collect()
}

impl Controller {
    pub(super) fn in_process(&self) -> Option<&InProcess> {
        match &self.mechanism {
            Mechanism::InProcess(inside) => Some(inside),
            Mechanism::Process { .. } => None,
        }
    }

    fn in_process_mut(&mut self) -> Option<&mut InProcess> {
        match &mut self.mechanism {
            Mechanism::InProcess(inside) => Some(inside),
            Mechanism::Process { .. } => None,
        }
    }

    /// Takes note of the partitions that a warm worker has proven; it was to begin with `asked`.
    pub(super) fn note_proofs(&mut self, asked: Groups, proven: &ProvenPartitions) {
        let left_out =
            proven.counts.iter().filter_map(|proof| Some((proof.groups, proof.result.as_ref().err()?)));
        for (groups, why) in left_out {
            tracing::warn!(model = self.model.name, groups, why, "partitions of so many groups are left out");
        }
        let share = self.share;
        let Some(inside) = self.in_process_mut() else { return };
        inside.proven.clone_from(&proven.counts);
        if proven.ready != asked {
            inside.tenancy.cannot_have(asked);
        }
        let share = inside.coming().unwrap_or(share);
        inside.tenancy.ask(inside.count_of(share));
    }

    /// The partition on which a worker begins, and how long its batches should take there.
    pub(super) fn first_slice(&self, groups: Groups, times: &[WarmTime], share: Percent) -> Slice {
        let inside = self.in_process().map(|inside| inside.slice(groups));
        let sms = self.sms(share);
        inside.filter(|slice| !slice.times.is_empty()).unwrap_or(Slice {
            groups,
            sms,
            times: times_of(times),
        })
    }

    /// From now on this worker serves, on the partition that it began with.
    pub(super) fn serves_on(&mut self, groups: Groups) {
        if let Some(inside) = self.in_process_mut() {
            (inside.current, inside.moving, inside.refused) = (groups, None, None);
            inside.ready = Some(groups).into_iter().filter(|&groups| groups != Groups::WHOLE).collect();
        }
    }

    /// Sets the share in force without a change inside the worker.
    pub(super) fn share_is(&mut self, share: Percent) {
        self.share = share;
        if let Some(inside) = self.in_process_mut() {
            inside.tenancy.ask(inside.count_of(share));
        }
    }

    /// Changes the share inside the worker; gives the order back where another process is needed.
    pub(super) fn repartition(&mut self, wanted: ResizeRequest) -> Result<(), ResizeRequest> {
        let down = matches!(self.primary, Primary::Down { .. });
        if down || self.swap.is_some() || self.in_process().is_none() {
            return Err(wanted);
        }
        tracing::info!(model = self.model.name, from = %self.share, to = %wanted.share, "the share changes inside the worker");
        self.pipeline.begin_stall();
        let from = self.share;
        let Some(inside) = self.in_process_mut() else { return Err(wanted) };
        inside.refused = None;
        inside.tenancy.ask(inside.count_of(wanted.share));
        inside.order = Some((wanted, from));
        Ok(())
    }

    /// After each event: moves the worker that serves to the groups that the ledger gives it.
    pub(super) fn tend_partition(&mut self) {
        let until = self.after(PREPARE_WITHIN);
        let Primary::Serving { worker } = self.primary else { return };
        if self.stopping.is_some() || self.swap.is_some() {
            return;
        }
        let Some(inside) = self.in_process_mut().filter(|inside| inside.moving.is_none()) else { return };
        let target = inside.tenancy.groups();
        if inside.refused == Some(target) {
            return;
        }
        if inside.current != target && target != Groups::WHOLE && !inside.ready.contains(&target) {
            inside.moving = Some((target, until));
            // A partition that was prepared and never used may fill the last place.
            let spare = inside.spare(READY_PARTITIONS);
            if let Some(spare) = spare {
                self.pipeline.forget(worker, spare);
            }
            self.pipeline.prepare(worker, target);
            return;
        }
        if inside.current != target {
            self.move_to(worker, target);
        }
        self.repartitioned(worker);
    }

    /// Batches run on these groups from now on, which are ready.
    fn move_to(&mut self, worker: WorkerId, groups: Groups) {
        let share = self.coming().unwrap_or(self.share);
        let Some(inside) = self.in_process_mut() else { return };
        let slice = inside.slice(groups);
        inside.current = groups;
        inside.ready.retain(|&other| other != groups);
        if groups != Groups::WHOLE {
            inside.ready.push(groups);
        }
        let spare = inside.spare(READY_PARTITIONS);
        let awaited = inside.order.as_ref().map(|(wanted, _)| Effect::awaited(worker, wanted));
        self.effect = awaited.or(self.effect.take());
        self.pipeline.move_to(worker, share, &slice);
        if let Some(spare) = spare {
            self.pipeline.forget(worker, spare);
        }
    }

    /// The order that is under way, if there is one, is carried out.
    fn repartitioned(&mut self, worker: WorkerId) {
        let Some((mut wanted, from)) = self.in_process_mut().and_then(|inside| inside.order.take()) else {
            return;
        };
        // The share is also in force where no batch had to move to other groups.
        self.effect.get_or_insert_with(|| Effect::awaited(worker, &wanted));
        self.share = wanted.share;
        self.handovers.completed += 1;
        self.handovers.in_process += 1;
        let report = self.report_of_change(&wanted, from);
        self.changes.completed(wanted.cause, &report);
        tracing::info!(model = self.model.name, share = %self.share, sms = self.sms(self.share).0, "the share is in force");
        self.reported(report.clone());
        self.begin_settling(wanted.cause, wanted.onset);
        if let Some(reply) = wanted.reply.take() {
            // The receiver may be gone.
            reply.send(Ok(report)).ok();
        }
    }

    /// A worker has made a partition ready, or has failed to.
    pub(super) fn prepared(&mut self, worker: WorkerId, Prepared { groups, result }: Prepared) {
        tracing::debug!(model = self.model.name, %groups, ?result, "a partition was to be made ready");
        if !self.serves(worker) {
            return;
        }
        let Some(inside) = self.in_process_mut() else { return };
        let awaited = inside.moving.take_if(|(moving, _)| *moving == groups).is_some();
        match result {
            Ok(()) if awaited => inside.ready.insert(0, groups),
            Ok(()) => {}
            // The partition may have counted as ready: batches that name it run on all SMs until
            // the worker moves to another.
            Err(why) => self.cannot_have(groups, &why),
        }
    }

    /// The model cannot have this partition: another of as many groups is tried, if there is one.
    fn cannot_have(&mut self, groups: Groups, why: &str) {
        tracing::warn!(model = self.model.name, %groups, why, "a partition cannot be had");
        let share = self.share;
        let Some(inside) = self.in_process_mut() else { return };
        inside.refused = Some(groups);
        inside.tenancy.cannot_have(groups);
        let share = inside.coming().unwrap_or(share);
        let none =
            inside.tenancy.groups() == Groups::WHOLE && inside.count_of(share) < inside.division.count();
        if !none {
            return;
        }
        match inside.order.take() {
            Some((wanted, from)) => {
                inside.tenancy.ask(inside.count_of(from));
                let (model, why) = (self.model.name.clone(), why.to_owned());
                self.aborted(wanted, ResizeRefused::NoPartition { model, why });
            }
            None => self.leave_partitions(why),
        }
    }

    /// The model's share is changed by other processes from now on.
    pub(super) fn leave_partitions(&mut self, why: &str) {
        let Some(inside) = self.in_process_mut() else { return };
        let order = inside.order.take();
        if self.model.handover == HandoverMode::InProcess {
            return self.down(format!(
                "{why}; with `handover: auto` it would be served, its share changed by a shadow"
            ));
        }
        tracing::warn!(model = self.model.name, why, "its share is changed by shadows from now on");
        if let Primary::Serving { worker } = self.primary {
            self.move_to(worker, Groups::WHOLE);
        }
        self.mechanism = Mechanism::Process { why: why.to_owned() };
        self.ledger.tell(&self.model, self.makes_shadows());
        if let Some((wanted, _)) = order {
            let (model, why) = (self.model.name.clone(), why.to_owned());
            self.aborted(wanted, ResizeRefused::NoPartition { model, why });
        }
        let serves = matches!(self.primary, Primary::Serving { .. });
        if serves && self.share != Percent::WHOLE && self.swap.is_none() {
            // The worker that serves has the whole GPU from now on.
            let back = ResizeRequest::again(self.share, self.now());
            self.share = Percent::WHOLE;
            self.begin_swap(back);
        }
    }

    /// Ends an order that is under way inside the worker.
    pub(super) fn repartition_failed(&mut self, refused: &ResizeRefused) {
        let Some(inside) = self.in_process_mut() else { return };
        if let Some((wanted, from)) = inside.order.take() {
            inside.tenancy.ask(inside.count_of(from));
            self.aborted(wanted, refused.clone());
        }
    }

    pub(super) fn partition_on_time(&mut self, now: Moment) {
        let late = |inside: &InProcess| inside.due().is_some_and(|due| due <= now);
        let Primary::Serving { worker } = self.primary else { return };
        if self.in_process().is_some_and(late) {
            self.misbehaved(worker, "it hangs: a partition is not ready in time");
        }
    }

    /// Whether a change of share, or a fault, may have a shadow started.
    pub(super) fn makes_shadows(&self) -> bool {
        self.mechanism.makes_shadows(self.model.handover)
    }

    /// How the share is changed, for reports; and if not inside the worker, why.
    pub(super) fn mechanism_name(&self) -> (&'static str, Option<String>) {
        match (&self.mechanism, self.model.handover) {
            (Mechanism::InProcess(_), _) => ("in-process", None),
            (Mechanism::Process { why }, HandoverMode::Restart) => ("restart", Some(why.clone())),
            (Mechanism::Process { why }, HandoverMode::Never) => ("never", Some(why.clone())),
            (Mechanism::Process { why }, _) => ("shadow", Some(why.clone())),
        }
    }
}
