//! What others see of a controller.

use super::controller::Controller;
use super::standing::{BootMs, ModelState, Standing, WorkerStanding};
use crate::process::Worker;

impl Controller {
    pub(super) fn publish(&self) {
        let (share, since) = {
            let seen = self.standing.borrow();
            (self.share, if seen.share == self.share { seen.since } else { self.now() })
        };
        let standing = Standing {
            state: self.state(),
            share,
            sms: self.sms(share).0,
            since,
            coming: self.coming(),
            ready: self.ready_share(),
            starting: self.starting_share(),
            memory_need: self.ledger.need(&self.model.name),
            standby_wish: self.standby.wish,
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

    /// While the next worker boots, requests wait for it if there was one before.
    fn state(&self) -> ModelState {
        match self.incumbent.state() {
            _ if self.stopping.is_some() => ModelState::Stopping,
            ModelState::Loading if self.pipeline.ready().is_ok() => ModelState::Restarting,
            state => state,
        }
    }

    /// All workers, the one that serves first.
    fn worker_standings(&self) -> Vec<WorkerStanding> {
        let mut all: Vec<_> = self.workers.values().map(|worker| self.worker_standing(worker)).collect();
        all.sort_by_key(|worker| worker.role != "incumbent");
        all
    }

    fn worker_standing(&self, worker: &Worker) -> WorkerStanding {
        let (role, phase) = match &self.swap {
            Some(swap) if swap.has(worker.id) => swap.standing(worker.id, &self.incumbent),
            _ if self.standby.is(worker.id) => self.standby.standing(),
            _ => self.incumbent.standing(worker.id),
        };
        WorkerStanding {
            role: role.to_owned(),
            pid: worker.pid,
            share_percent: worker.share.get(),
            sms: worker.sms.0,
            phase: phase.to_owned(),
            restarts: self.restarts.deaths(),
            boot_ms: BootMs::of(worker.times()),
            answer_error: worker.answer_error(),
        }
    }
}
