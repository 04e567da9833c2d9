//! The report of a controller to other parts of the supervisor.

use std::mem::discriminant;
use std::sync::Arc;
use std::time::Instant;

use shadowslice_policy::workers::{Workers, WorkersState};
use shadowslice_shared::units::Timestamp;

use super::events::Controller;
use super::reported::{Mechanism, ReportedRole};
use super::reports::{ModelReport, ModelState, NextStart, WaitReason, Warming, WorkerMemory, WorkerReport};
use crate::process::Worker;

impl ModelReport {
    /// Creates a report with the values that the state machine knows. All other values are those of a
    /// model without workers.
    pub(super) fn of(workers: &Workers) -> Self {
        Self {
            state: ModelState::Loading,
            state_since: Instant::now(),
            share: workers.share(),
            sms: workers.sms_in_force().0,
            partition: None,
            execution: workers.execution().cloned(),
            mechanism: Mechanism::of(workers),
            no_partition: workers.no_partition().map(str::to_owned),
            since: Timestamp::default(),
            coming: None,
            ready: None,
            warming: None,
            batch_limit: None,
            no_standby: None,
            waits: Vec::new(),
            memory_need: None,
            held: workers.is_held(),
            workers: Vec::new(),
            worker_deaths: 0,
            last_death: None,
            worker_restarts: 0,
            handovers: Default::default(),
            changes: Default::default(),
        }
    }
}

impl Controller {
    pub(super) fn publish(&self) {
        let workers = &self.workers;
        let state = self.state();
        let (since, state_since) = {
            let seen = self.report_tx.borrow();
            let same = discriminant(&seen.state) == discriminant(&state);
            (
                if seen.share == workers.share() { seen.since } else { self.now() },
                if same { seen.state_since } else { Instant::now() },
            )
        };
        let (worker_deaths, worker_restarts) = workers.deaths_and_restarts();
        let division = self.gpu.division().ok();
        let partition = workers.partition().and_then(|(_, groups)| Some((Arc::clone(division?), groups)));
        let no_standby = workers.standby_obstacle().map(str::to_owned);
        let report = ModelReport {
            waits: self.waits.current(&state, no_standby.is_some()),
            state,
            state_since,
            partition,
            since,
            coming: workers.coming(),
            ready: workers.ready_share(),
            memory_need: self.account.need(),
            warming: self.warming(),
            batch_limit: self.batch_limit.clone(),
            no_standby,
            workers: self.worker_reports(),
            worker_deaths,
            last_death: workers.last_death().map(str::to_owned),
            worker_restarts,
            handovers: self.records.handovers.clone(),
            changes: self.records.changes.clone(),
            ..ModelReport::of(workers)
        };
        self.log_changes(&report);
        self.report_tx.send_if_modified(|seen| {
            let changed = *seen != report;
            *seen = report;
            changed
        });
    }

    fn log_changes(&self, new: &ModelReport) {
        let old = self.report_tx.borrow();
        let model = &self.model.name;
        if old.state != new.state {
            match &new.state {
                ModelState::Unready { next: NextStart::UnderWay, .. } => {}
                // The reason contains figures that change while the model waits.
                ModelState::Waiting(_) if matches!(old.state, ModelState::Waiting(_)) => {}
                ModelState::Ready => tracing::info!(model, share = %new.share, "model ready"),
                ModelState::Restarting => self.log_restart(&old, new),
                ModelState::Waiting(why) => tracing::warn!(
                    model,
                    why,
                    "the GPU cannot take the model's worker now; requests wait, and the supervisor tries again"
                ),
                ModelState::Unready { why, next: NextStart::At(at) } => tracing::error!(
                    model,
                    why,
                    retry_ms = u64::try_from(at.saturating_duration_since(Instant::now()).as_millis()).ok(),
                    "the model is unready and refuses requests; the supervisor tries again after retry_ms, or earlier when the model's files or configuration change"
                ),
                ModelState::Unready { why, next: NextStart::OnChange } => tracing::error!(
                    model,
                    why,
                    "the model is unready and refuses requests; correct the cause: the supervisor tries again when the model's files change, or on `shadowslice reload` or `resize`"
                ),
                ModelState::Loading | ModelState::Stopping => {}
            }
        }
        if old.no_partition != new.no_partition
            && let Some(why) = &new.no_partition
        {
            tracing::info!(
                model,
                why,
                mechanism = new.mechanism.to_string(),
                "in-worker resize is not available for this model; share changes use the mechanism shown here"
            );
        }
        if old.no_standby != new.no_standby
            && let Some(why) = &new.no_standby
        {
            tracing::warn!(model, why, "the model has no warm standby now; the supervisor tries again");
        }
    }

    /// Logs that requests wait for another worker after a failure. A worker whose socket closes
    /// counts as a death only when it exits.
    fn log_restart(&self, old: &ModelReport, new: &ModelReport) {
        let died = new.worker_deaths > old.worker_deaths;
        tracing::warn!(
            model = self.model.name,
            deaths = Some(self.workers.failures_in_a_row()).filter(|deaths| *deaths > 0),
            why = new.last_death.as_deref().filter(|_| died),
            "the model's worker failed; starting another one, while requests wait"
        );
    }

    /// Returns the state of the model. A model that is unready stays unready until a worker serves.
    fn state(&self) -> ModelState {
        let was = &self.report_tx.borrow().state;
        match self.workers.state() {
            WorkersState::Loading | WorkersState::Restarting | WorkersState::Waiting(_)
                if let ModelState::Unready { why, .. } = was =>
            {
                ModelState::Unready { why: why.clone(), next: NextStart::UnderWay }
            }
            // The worker starts as usual when it is its turn.
            WorkersState::Waiting(_) if self.waits.primary == Some(WaitReason::Turn) => self.loading(),
            // Clients that wake the model only wait for longer.
            WorkersState::Loading if self.pipeline.is_without_worker() => ModelState::Ready,
            WorkersState::Loading => self.loading(),
            WorkersState::Ready | WorkersState::Asleep => ModelState::Ready,
            WorkersState::Restarting => ModelState::Restarting,
            WorkersState::Waiting(why) => ModelState::Waiting(why.to_owned()),
            WorkersState::Down { why, again } => {
                let next = again.map_or(NextStart::OnChange, |again| {
                    NextStart::At(self.context.clock.instant(again).into_std())
                });
                ModelState::Unready { why: why.to_owned(), next }
            }
            WorkersState::Stopping => ModelState::Stopping,
        }
    }

    /// Returns the state of a model whose worker starts. If a worker has served before, requests wait
    /// for the next worker.
    fn loading(&self) -> ModelState {
        if self.pipeline.ready().is_ok() { ModelState::Restarting } else { ModelState::Loading }
    }

    /// Returns the progress of the worker that is warming up.
    fn warming(&self) -> Option<Warming> {
        let limit = self.context.timeouts.warm;
        let warming = self.processes.values().filter_map(|process| process.warming);
        warming.map(|(rows, since)| Warming { rows, since, limit }).next()
    }

    fn worker_reports(&self) -> Vec<WorkerReport> {
        let mut all: Vec<_> = self.processes.values().map(|process| self.worker_report(process)).collect();
        all.sort_by_key(|worker| worker.role != ReportedRole::Incumbent);
        all
    }

    fn worker_report(&self, process: &Worker) -> WorkerReport {
        let (role, phase) = self.workers.role_and_phase(process.id);
        WorkerReport {
            role: role.into(),
            pid: process.pid,
            shared: self.model.shared_worker.clone().filter(|_| process.is_member),
            share_percent: self.workers.share_of(process.id).unwrap_or(process.share).get(),
            sms: process.sms.0,
            phase: phase.into(),
            restarts: self.workers.failures_in_a_row(),
            boot_ms: process.boot_ms,
            answer_error: process.answer_error,
            memory: process.memory.map(WorkerMemory::from),
        }
    }
}
