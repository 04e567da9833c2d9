//! The events of starting and running workers, and the limit of batches that follows from them.

use shadowslice_policy::workers::{HandoverMode, LifecycleEvent, WorkerPhase, WorkerRole};
use shadowslice_shared::boot::{BootRefusal, LoadedModel, WarmUpReport, WorkerPurpose};
use shadowslice_shared::errors;
use shadowslice_shared::ids::WorkerId;

use super::events::Controller;
use super::loaded::{self, BatchLimit};
use super::reported::ReportedRole;
use crate::backend::shown;
use crate::process::{KeptWeights, WorkerEnd, WorkerSaid};

impl Controller {
    pub(super) fn handle_worker_event(&mut self, worker: WorkerId, event: WorkerSaid) {
        let (model, pid) = (&self.model.name, self.pid(worker));
        tracing::debug!(model, pid, said = ?event, "worker event");
        let Some(process) = self.processes.get_mut(&worker) else { return };
        process.note(&event);
        let purpose = process.purpose;
        match event {
            WorkerSaid::Connected { .. } => self.handle(LifecycleEvent::Connected(worker)),
            WorkerSaid::Loaded(found) => {
                self.described = loaded::describe(&self.model, self.largest_batch().as_ref(), &found).ok();
                if self.pipeline.metadata().is_some()
                    && let Err(why) = self.describe(&found)
                {
                    self.handle(LifecycleEvent::Misbehaved { worker, why });
                }
            }
            WorkerSaid::Warming { rows } => {
                tracing::debug!(model, pid, rows, "worker warming up");
            }
            WorkerSaid::Warmed(warmed) if purpose.is_reference() => {
                let useful = self.useful_batches(purpose);
                self.limit_batches(BatchLimit::of_use(useful, self.model.slo.latency, &warmed.times));
                let result = self.reference.seal().map_err(|error| errors::chain(&error));
                self.handle(LifecycleEvent::ReferenceWritten { worker, result });
            }
            WorkerSaid::Warmed(warmed) => self.handle_warmed(worker, warmed),
            WorkerSaid::Refused(refusal) => self.handle_refusal(worker, purpose, refusal),
            WorkerSaid::Lost(why) => {
                tracing::debug!(model, why, "the connection to a starting worker broke; its exit follows");
            }
            WorkerSaid::Exited(WorkerEnd { status, shared }) => {
                let mut status = shown(&status);
                tracing::info!(model, pid, status, "worker exited");
                let warming = self.processes.remove(&worker).and_then(|process| process.warming);
                if let Some((rows, _)) = warming {
                    status = self.ended_warming(rows, status);
                }
                let idle = self.pipeline.is_idle(worker);
                if let Some(cause) = shared {
                    self.record_shared_end(worker, cause, idle);
                }
                self.handle(LifecycleEvent::Exited { worker, status, idle });
            }
        }
    }

    fn handle_warmed(&mut self, worker: WorkerId, warmed: WarmUpReport) {
        self.keep_weights(worker);
        let (model, pid) = (&self.model.name, self.pid(worker));
        let Some(process) = self.processes.get_mut(&worker) else { return };
        let asked = process.groups;
        if let Some(why) = &warmed.unshared {
            tracing::warn!(
                model,
                pid,
                why,
                "a worker cannot share the model's weights with other workers; the worker loaded a copy, which takes more GPU memory"
            );
        }
        let found = process.loaded.take();
        self.account.warmed(self.now());
        if let Some(Err(why)) = found.map(|found| self.describe(&found)) {
            return self.handle(LifecycleEvent::Misbehaved { worker, why });
        }
        self.handle(LifecycleEvent::Warmed { worker, warmed: Box::new(warmed), asked });
        if self.workers.role_and_phase(worker) == (WorkerRole::Standby, WorkerPhase::Standing) {
            tracing::info!(model = self.model.name, pid, "warm standby ready");
        }
    }

    /// Keeps the weights that a worker has loaded, for the model's later workers.
    pub(super) fn keep_weights(&mut self, worker: WorkerId) {
        let Some(process) = self.processes.get(&worker) else { return };
        if let Some(Err(error)) = process.weights.as_ref().map(|socket| self.weights.take(socket)) {
            tracing::warn!(model = self.model.name, pid = process.pid, %error, "cannot keep the model's weights on the GPU for later workers; each may load a copy and take more GPU memory");
        }
    }

    fn handle_refusal(&mut self, worker: WorkerId, purpose: WorkerPurpose, refusal: BootRefusal) {
        if matches!(refusal, BootRefusal::NoClient(_)) {
            self.gpu.refuses_processes();
        }
        if matches!(refusal, BootRefusal::Proof { .. }) {
            // The weights may be damaged, so the next worker loads them from the file.
            self.weights = KeptWeights::default();
        }
        let refusal = self.with_smaller_batches(refusal);
        self.log_refusal(worker, purpose, &refusal);
        self.handle(LifecycleEvent::Refused { worker, refusal });
    }

    fn log_refusal(&self, worker: WorkerId, purpose: WorkerPurpose, refusal: &BootRefusal) {
        let (model, pid, why) = (&self.model.name, self.pid(worker), refusal.to_string());
        let on_gpu = self.gpu.is_real();
        let (role, _) = self.workers.role_and_phase(worker);
        let needs_partition = self.model.handover == HandoverMode::InProcess;
        match refusal {
            BootRefusal::OtherForm(_) => {
                tracing::info!(
                    model,
                    pid,
                    why,
                    "a worker cannot serve the model as loaded; starting a worker that loads the model in another way"
                )
            }
            BootRefusal::NoOperator(_) if purpose == WorkerPurpose::Reference && on_gpu => {
                tracing::info!(
                    model,
                    pid,
                    why,
                    "the CPU cannot compute the model's reference answers; starting a worker that computes them on the GPU"
                )
            }
            BootRefusal::NoPartitions(_)
                if matches!(role, WorkerRole::Reference | WorkerRole::Incumbent) && !needs_partition =>
            {
                tracing::info!(
                    model,
                    pid,
                    why,
                    "the model cannot run on a partition of the GPU's SMs; its next worker runs without a partition"
                )
            }
            _ => tracing::warn!(
                model,
                pid,
                role = ReportedRole::from(role).to_string(),
                why,
                "stopping a worker that cannot serve the model; if no other worker serves, requests wait or are refused until one starts; correct the cause"
            ),
        }
    }

    /// Describes the loaded model for clients. Fails if the model differs from the one that earlier
    /// workers loaded.
    fn describe(&self, found: &LoadedModel) -> Result<(), String> {
        let described = loaded::describe(&self.model, self.largest_batch().as_ref(), found);
        let described = described.map_err(|refusal| refusal.to_string());
        described.and_then(|metadata| self.pipeline.describe(metadata)).map(|_| ())
    }

    /// Returns the limit of the default batch. Once the model has served, clients know its batches, in
    /// an outage also those of its workers at another supervisor.
    pub(super) fn largest_batch(&self) -> Option<BatchLimit> {
        let known = || {
            let max = self.pipeline.metadata()?.max_batch;
            Some(BatchLimit { max, why: "clients already know this batch size".to_owned() })
        };
        self.batch_limit.clone().or_else(known)
    }

    /// Lowers the limit of batches if the refusal is due to their size and the configuration gives none.
    /// Returns the refusal, with advice if the configuration gives the size.
    fn with_smaller_batches(&mut self, refusal: BootRefusal) -> BootRefusal {
        let batch = &self.model.batch;
        let limit = match &refusal {
            BootRefusal::WarmUp { size, why } if *size > 1 && batch.max.is_some() => {
                let why = format!("{why}; lower batch.max, or correct `warmup`");
                return BootRefusal::WarmUp { size: *size, why };
            }
            BootRefusal::WarmUp { size, why } => BatchLimit::below(batch, *size, why),
            BootRefusal::RowsDepend(why) if batch.max.is_none() => {
                Some(BatchLimit { max: 0, why: why.clone() })
            }
            BootRefusal::RowsDepend(why) => {
                let max = batch.max.unwrap_or_default();
                return BootRefusal::Model(format!("batch.max is {max}, but {why}; set `batch: {{max: 0}}`"));
            }
            _ => None,
        };
        let why = refusal.to_string();
        if self.limit_batches(limit) { BootRefusal::OtherForm(why) } else { refusal }
    }

    /// Returns the reason for the exit of a worker that was trying batches of `rows` rows.
    fn ended_warming(&mut self, rows: u32, status: String) -> String {
        let limit = BatchLimit::below(&self.model.batch, rows, &format!("the worker exited ({status})"));
        if self.limit_batches(limit) || rows <= 1 {
            return format!("{status}, during the warm-up at batch size {rows}");
        }
        format!(
            "{status}, during the warm-up at batch size {rows}, perhaps because memory ran out; \
             lower batch.max"
        )
    }

    /// Sets the limit of batches. Does nothing if clients already know the model's batches. Returns true
    /// if the limit was set.
    fn limit_batches(&mut self, limit: Option<BatchLimit>) -> bool {
        let Some(limit) = limit.filter(|_| self.pipeline.metadata().is_none()) else { return false };
        let BatchLimit { max, why } = &limit;
        tracing::warn!(
            model = self.model.name,
            max_batch = max,
            why,
            "the default maximum batch size is too large for the model; lowering the size to max_batch; set `batch.max` to choose another size"
        );
        self.batch_limit = Some(limit);
        true
    }
}
