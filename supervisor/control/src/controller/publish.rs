//! What other parts of the supervisor see of a controller.

use std::sync::Arc;

use shadowslice_shared::units::{Percent, Sms};

use super::events::Controller;
use super::primary::Primary;
use super::reports::{BootMs, ModelReport, ModelState, WorkerReport};
use crate::process::Worker;

impl Controller {
    pub(super) fn publish(&self) {
        let (share, since) = {
            let seen = self.standing.borrow();
            (self.share, if seen.share == self.share { seen.since } else { self.now() })
        };
        let (mechanism, no_partition) = self.mechanism_name();
        let partition = self.in_process().map(|inside| (Arc::clone(inside.division()), inside.current()));
        let standing = ModelReport {
            state: self.state(),
            share,
            sms: self.sms_in_force().0,
            partition,
            mechanism,
            no_partition,
            since,
            coming: self.coming(),
            ready: self.ready_share(),
            memory_need: self.ledger.need(&self.model.name),
            no_standby: self.standby_obstacle(),
            held: self.held,
            workers: self.worker_standings(),
            worker_deaths: self.all_deaths,
            worker_restarts: self.all_restarts,
            handovers: self.handovers.clone(),
            changes: self.changes.clone(),
        };
        self.standing.send_if_modified(|seen| {
            let changed = *seen != standing;
            *seen = standing;
            changed
        });
    }

    /// The SMs on which batches run. A partition may have more or fewer than its share comes to,
    /// as the left-over group is smaller or larger than the others.
    fn sms_in_force(&self) -> Sms {
        let serves = matches!(self.primary, Primary::Serving { .. });
        let inside = self.in_process().filter(|_| serves);
        inside.map_or_else(|| self.sms(self.share), |inside| inside.division().sms(inside.current()))
    }

    /// The share that a worker has.
    fn share_of(&self, worker: &Worker) -> Percent {
        if worker.groups.is_some() { self.share } else { worker.share }
    }

    /// While the next worker boots, requests wait for it if there was one before.
    fn state(&self) -> ModelState {
        match self.primary.state() {
            _ if self.stopping.is_some() => ModelState::Stopping,
            ModelState::Loading if self.pipeline.ready().is_ok() => ModelState::Restarting,
            state => state,
        }
    }

    /// All workers, the one that serves first.
    fn worker_standings(&self) -> Vec<WorkerReport> {
        let mut all: Vec<_> = self.workers.values().map(|worker| self.worker_standing(worker)).collect();
        all.sort_by_key(|worker| worker.role != "incumbent");
        all
    }

    fn worker_standing(&self, worker: &Worker) -> WorkerReport {
        let (role, phase) = match &self.swap {
            Some(swap) if swap.has(worker.id) => swap.standing(worker.id, &self.primary),
            _ if self.standby.is(worker.id) => self.standby.standing(),
            _ => self.primary.standing(worker.id),
        };
        WorkerReport {
            role: role.to_owned(),
            pid: worker.pid,
            share_percent: self.share_of(worker).get(),
            sms: self.sms_of(worker.id).unwrap_or(worker.sms).0,
            phase: phase.to_owned(),
            restarts: self.restarts.deaths(),
            boot_ms: BootMs::of(worker.times()),
            answer_error: worker.answer_error(),
        }
    }
}
