//! The incumbent: booting it, keeping it alive, and replacing it in place where no shadow may be.

use std::time::Duration;

use shadowslice_policy::restart::AfterDeath;
use shadowslice_shared::boot::{BootRefusal, Purpose, Warmed};
use shadowslice_shared::units::{Moment, Percent};

use super::ResizeRefused;
use super::events::Controller;
use super::reports::ModelState;
use crate::process::WorkerSaid;
use shadowslice_shared::ids::WorkerId;

/// The pause before a model asks again for a place on a GPU that took no worker.
const GPU_PAUSE: Duration = Duration::from_millis(200);

/// How many wrong answers at one share count as no accident.
const WRONG_TWICE: u32 = 2;

/// What is known of repeated wrong answers, and what helps.
pub(super) const WRONG_AT_A_SHARE: &str = "Two workers with this share answered wrongly, so that no further one is tried. \
    Half precision (FP16, BF16) is wrong under MPS percentages below 100 % on Hopper GPUs (cuBLAS); it is right with \
    `handover: in-process`, and at a share of 100 %";

/// The worker that serves, or what there is instead of it.
#[derive(Debug)]
pub(super) enum Primary {
    /// A reference worker computes the answers that the others will have to prove.
    Proving { worker: WorkerId, deadline: Moment },
    /// It boots.
    Booting { worker: WorkerId, deadline: Moment },
    /// It serves.
    Serving { worker: WorkerId },
    /// It died; the next worker is started at `until`.
    BackingOff { until: Moment },
    /// It died, and the standing worker, which still starts, will serve. If that start fails, the
    /// next worker is started, at `back_off` at the earliest.
    AwaitingStandby { back_off: Moment, why: String },
    /// The GPU takes no worker, and is asked again at `until`.
    Waiting { until: Moment, why: String },
    /// It makes room for a worker with another share (`handover: restart`): it finishes its
    /// batches, and is then `told` to end.
    Leaving { worker: WorkerId, deadline: Moment, told: bool, to: Percent },
    /// No worker will be started until an operator or a client acts.
    Down { why: String },
}

impl Primary {
    pub(super) fn worker(&self) -> Option<WorkerId> {
        match self {
            Self::Proving { worker, .. }
            | Self::Booting { worker, .. }
            | Self::Serving { worker }
            | Self::Leaving { worker, .. } => Some(*worker),
            Self::BackingOff { .. }
            | Self::AwaitingStandby { .. }
            | Self::Waiting { .. }
            | Self::Down { .. } => None,
        }
    }

    pub(super) fn due(&self) -> Option<Moment> {
        match self {
            Self::Proving { deadline, .. }
            | Self::Booting { deadline, .. }
            | Self::Leaving { deadline, .. } => Some(*deadline),
            Self::BackingOff { until } | Self::Waiting { until, .. } => Some(*until),
            Self::Serving { .. } | Self::AwaitingStandby { .. } | Self::Down { .. } => None,
        }
    }

    pub(super) fn state(&self) -> ModelState {
        match self {
            Self::Proving { .. } | Self::Booting { .. } => ModelState::Loading,
            Self::Serving { .. } => ModelState::Ready,
            Self::BackingOff { .. } | Self::Leaving { .. } => ModelState::Restarting,
            Self::AwaitingStandby { .. } => {
                ModelState::Waiting("the standing worker, which still starts, will serve".to_owned())
            }
            Self::Waiting { why, .. } => ModelState::Waiting(why.clone()),
            Self::Down { why } => ModelState::Unready(why.clone()),
        }
    }

    /// Role and phase of a worker that is in no hand-over.
    pub(super) fn standing(&self, id: WorkerId) -> (&'static str, &'static str) {
        match self {
            Self::Proving { worker, .. } if *worker == id => ("reference", "warming"),
            Self::Booting { worker, .. } if *worker == id => ("incumbent", "warming"),
            Self::Serving { worker } if *worker == id => ("incumbent", "serving"),
            _ => ("leaving", "stopping"),
        }
    }
}

impl Controller {
    /// Starts the model from nothing.
    pub(super) fn begin(&mut self) {
        if let Some(why) = self.model.broken.clone().or(self.no_mechanism.clone()) {
            self.down(why);
        } else {
            self.boot(self.reference_by);
        }
    }

    /// Boots a worker, the reference worker or an incumbent.
    pub(super) fn boot(&mut self, purpose: Purpose) {
        let deadline = self.after(self.context.timeouts.spawn);
        match self.launch(purpose, self.share, false) {
            Ok(worker) => {
                self.primary = match purpose {
                    Purpose::Reference | Purpose::DeviceReference => Primary::Proving { worker, deadline },
                    Purpose::Serve => Primary::Booting { worker, deadline },
                };
                self.swap_incumbent_is(Some(worker));
            }
            Err(error) if error.is_passing() => {
                self.make_room(&error);
                self.await_gpu(shadowslice_shared::errors::chain(&error));
            }
            Err(error) => {
                self.last_words = shadowslice_shared::errors::chain(&error);
                tracing::error!(model = self.model.name, error = self.last_words, "no worker");
                self.died();
            }
        }
    }

    /// The GPU takes no worker for a while, which does not count as a death of a worker.
    fn await_gpu(&mut self, why: String) {
        if !matches!(self.primary, Primary::Waiting { .. }) {
            tracing::warn!(model = self.model.name, why, "no worker for now");
        }
        self.swap_incumbent_is(None);
        self.primary = Primary::Waiting { until: self.after(GPU_PAUSE), why };
    }

    /// Whether the reference answers are there decides what boots next.
    pub(super) fn boot_next(&mut self) {
        let purpose = if self.reference_written { Purpose::Serve } else { self.reference_by };
        self.boot(purpose);
    }

    pub(super) fn primary_said(&mut self, worker: WorkerId, said: WorkerSaid) {
        if self.primary.worker() != Some(worker) {
            return;
        }
        match said {
            WorkerSaid::Connected => self.connected(worker),
            WorkerSaid::Warmed(warmed) => self.warmed(worker, &warmed),
            WorkerSaid::Refused(refusal) => self.refused(&refusal),
            WorkerSaid::Loaded(_) | WorkerSaid::Lost(_) | WorkerSaid::Exited(_) => {}
        }
    }

    /// A fault that a reference worker finds in the model is final. After the reference answers are
    /// written, a refusal may be temporary (memory was short, say), so it counts as a death.
    fn refused(&mut self, refusal: &BootRefusal) {
        let why = refusal.to_string();
        match refusal {
            BootRefusal::NoPartitions(_) => {
                self.leave_partitions(&why);
                if self.in_process().is_none() {
                    // This is no death: another worker is started at once, at the model's share.
                    self.primary = Primary::Waiting { until: self.now(), why };
                }
                return;
            }
            BootRefusal::NoOperator(_) if self.reference_by == Purpose::Reference && self.on_gpu() => {
                tracing::warn!(
                    model = self.model.name,
                    why,
                    "the host's processor cannot compute the reference answers; the GPU does, on all of its SMs"
                );
                self.reference_by = Purpose::DeviceReference;
                self.primary = Primary::Waiting { until: self.now(), why };
                return;
            }
            BootRefusal::Proof { .. } if self.answers_wrongly(self.share) => {
                return self.down(format!("{why}. {WRONG_AT_A_SHARE}"));
            }
            _ => {}
        }
        if self.reference_written || matches!(refusal, BootRefusal::Setup(_)) {
            tracing::error!(model = self.model.name, why, "a worker refused");
            self.last_words = why;
        } else {
            self.down(why);
        }
    }

    fn on_gpu(&self) -> bool {
        self.gpu.standing().uuid.is_some()
    }

    /// Counts a wrong answer at this share; true from the `WRONG_TWICE`th on. With the whole GPU
    /// the share is not the cause, so nothing is counted.
    pub(super) fn answers_wrongly(&mut self, share: Percent) -> bool {
        if share == Percent::WHOLE || self.in_process().is_some() {
            return false;
        }
        let sms = self.sms(share);
        let times = self.wrong_at.entry(sms).or_default();
        *times += 1;
        *times >= WRONG_TWICE
    }

    /// Whether workers with this share answer wrongly, as far as that is known.
    pub(super) fn is_wrong_at(&self, share: Percent) -> bool {
        self.wrong_at.get(&self.sms(share)).is_some_and(|&times| times >= WRONG_TWICE)
    }

    fn connected(&mut self, worker: WorkerId) {
        let deadline = self.after(self.context.timeouts.warm);
        match &mut self.primary {
            Primary::Proving { deadline: due, .. } | Primary::Booting { deadline: due, .. } => {
                *due = deadline
            }
            _ => return,
        }
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.warm();
        }
    }

    fn warmed(&mut self, worker: WorkerId, warmed: &Warmed) {
        match self.primary {
            Primary::Proving { .. } => match self.reference.seal() {
                Ok(()) => {
                    self.reference_written = true;
                    self.let_go(worker);
                    self.boot(Purpose::Serve);
                }
                Err(error) => self.down(shadowslice_shared::errors::chain(&error)),
            },
            Primary::Booting { .. } => {
                self.attach(worker, warmed);
                self.serve_with(worker);
                self.swap_incumbent_serves();
                self.replaced();
            }
            _ => {}
        }
    }

    /// From now on `worker` is the incumbent and serves; its lane is attached.
    pub(super) fn serve_with(&mut self, worker: WorkerId) {
        // The worker's own share replaces this: in a hand-over without an incumbent the worker's
        // share is about to be in force.
        let mut share = self.share;
        if let Some(process) = self.workers.get_mut(&worker) {
            process.serve();
            share = process.share;
            if let Some(groups) = process.groups {
                self.serves_on(groups);
            }
        }
        self.note_serving(self.pid(worker));
        self.pipeline.route(Some(worker));
        self.pipeline.open();
        if !matches!(self.primary, Primary::Serving { .. }) {
            tracing::info!(model = self.model.name, %share, "model ready");
        }
        self.primary = Primary::Serving { worker };
        self.serves_since = self.now();
    }

    pub(super) fn primary_exited(&mut self, worker: WorkerId, status: String) {
        if self.primary.worker() != Some(worker) {
            return;
        }
        if let Primary::Leaving { to, .. } = self.primary {
            self.share = to;
            self.last_words.clear();
            self.boot(Purpose::Serve);
            return;
        }
        if self.last_words.is_empty() {
            self.last_words = status;
        }
        let served = matches!(self.primary, Primary::Serving { .. });
        if served && self.pipeline.is_idle(worker) {
            self.restarts.idled(self.now().since(self.serves_since));
        }
        self.died();
    }

    /// The incumbent is dead: the standing worker serves, or another one after a pause, unless too
    /// many have died.
    pub(super) fn died(&mut self) {
        self.swap_incumbent_is(None);
        self.all_deaths += 1;
        let last_words = std::mem::take(&mut self.last_words);
        match self.restarts.died() {
            AfterDeath::After(pause) => {
                let back_off = self.after(pause);
                if !self.fail_over(&last_words)
                    && !self.await_standby(back_off, &last_words)
                    && !self.go_back(&last_words)
                {
                    self.restart_at(back_off);
                }
            }
            AfterDeath::GiveUp { deaths } => {
                self.down(format!(
                    "{deaths} workers in a row died before they served anything, the last with: {last_words}"
                ));
            }
        }
    }

    /// Starts another worker in the place of the dead one, at `until`.
    pub(super) fn restart_at(&mut self, until: Moment) {
        self.all_restarts += 1;
        let (pause, deaths) = (until.since(self.now()), self.restarts.deaths());
        tracing::warn!(model = self.model.name, ?pause, deaths, "restarting the worker");
        self.primary = Primary::BackingOff { until };
    }

    /// The model does not serve until an operator or a client acts.
    pub(super) fn down(&mut self, why: String) {
        tracing::error!(model = self.model.name, why, "the model is unready");
        if let Some(worker) = self.primary.worker() {
            self.let_go(worker);
        }
        self.dismiss_standby();
        self.pipeline.shut(&why);
        self.primary = Primary::Down { why: why.clone() };
        self.swap_incumbent_is(None);
        self.replacing_failed(&why);
        self.repartition_failed(&ResizeRefused::NotServing { model: self.model.name.clone(), why });
    }

    /// Tells a worker to end; it is killed if it does not.
    pub(super) fn let_go(&mut self, worker: WorkerId) {
        self.let_go_by(worker, self.after(self.context.timeouts.stop));
    }

    /// The same with another deadline.
    pub(super) fn let_go_by(&mut self, worker: WorkerId, deadline: Moment) {
        if let Some(process) = self.workers.get_mut(&worker) {
            process.stop();
            self.leaving.insert(worker, deadline);
        }
    }

    /// Kills workers that were told to end and have not; again after each `timeouts.stop`.
    pub(super) fn leavers_on_time(&mut self, now: Moment) {
        let again = self.after(self.context.timeouts.stop);
        let due = |(worker, deadline): (&WorkerId, &Moment)| (*deadline <= now).then_some(*worker);
        let due: Vec<WorkerId> = self.leaving.iter().filter_map(due).collect();
        for worker in due {
            self.leaving.insert(worker, again);
            if let Some(process) = self.workers.get(&worker) {
                tracing::warn!(
                    model = self.model.name,
                    pid = process.pid,
                    "a worker ignored its stop and is killed"
                );
                process.kill();
            }
            if self.serves(worker) {
                // A process may be stuck in its driver, and outlive a kill.
                self.pipeline.condemn(worker);
                self.abandon(worker, "it did not end in time (timeouts.stop)");
            }
        }
    }

    pub(super) fn primary_on_time(&mut self, now: Moment) {
        if self.primary.due().is_none_or(|due| due > now) {
            return;
        }
        match self.primary {
            Primary::BackingOff { .. } | Primary::Waiting { .. } => self.boot_next(),
            Primary::Proving { worker, .. } | Primary::Booting { worker, .. } => {
                let why = "it took too long to boot (timeouts.spawn, timeouts.warm)";
                tracing::error!(model = self.model.name, pid = self.pid(worker), why, "a worker is killed");
                self.last_words = why.to_owned();
                self.kill_and_wait(worker);
            }
            // A kill could cut off a running kernel, so the worker is told to end first.
            Primary::Leaving { worker, told: false, .. } => {
                self.pipeline.requeue(worker);
                self.tell_leaver();
            }
            Primary::Leaving { worker, told: true, .. } => self.kill_and_wait(worker),
            Primary::Serving { .. } | Primary::AwaitingStandby { .. } | Primary::Down { .. } => {}
        }
    }

    /// Kills a worker and waits for its exit; after `timeouts.stop` without an exit, kills it
    /// again.
    fn kill_and_wait(&mut self, worker: WorkerId) {
        let again = self.after(self.context.timeouts.stop);
        match &mut self.primary {
            Primary::Proving { deadline, .. }
            | Primary::Booting { deadline, .. }
            | Primary::Leaving { deadline, .. } => *deadline = again,
            _ => {}
        }
        if let Some(worker) = self.workers.get(&worker) {
            worker.kill();
        }
    }
}
