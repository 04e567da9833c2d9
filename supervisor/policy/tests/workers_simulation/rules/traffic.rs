//! Rules about traffic. If at least one worker can serve, the traffic must go to such a worker.

use shadowslice_policy::scheduler::Slice;
use shadowslice_policy::workers::{Action, Launch, LifecycleEvent, WorkerRole, WorkersState};
use shadowslice_shared::boot::WorkerPurpose;
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Timestamp};

use super::record::WorkerRecord;
use super::shares::sms_of;
use super::{RuleChecker, Step, Stimulus, Violation, awaits, rule};

impl RuleChecker {
    pub(super) fn start(&mut self, launch: &Launch, step: &Step<'_>) -> Result<(), Violation> {
        let worker = launch.worker;
        rule(!self.workers.contains_key(&worker), "every worker has its own name")?;
        rule(!self.stopping, "a model that stops starts no worker")?;
        let serves =
            self.routed.and_then(|routed| self.workers.get(&routed)).is_some_and(WorkerRecord::is_usable);
        rule(!serves || launch.low_priority, "beside a worker that serves, workers start at low priority")?;
        rule(launch.low_priority || !launch.standby, "a standby starts at low priority")?;
        self.boots(launch, step)?;
        let shadow = launch.low_priority && !launch.standby;
        let started = if shadow { self.answers.begun_at().unwrap_or(step.now) } else { step.now };
        self.workers.insert(worker, WorkerRecord::new(*launch, started + self.settings.timeouts.spawn));
        match launch.purpose {
            WorkerPurpose::DeviceReference => self.note("the device writes the reference answers"),
            _ if shadow && started < step.now => self.note("a shadow waits for memory"),
            _ => {}
        }
        self.starts_in_time(launch, step)?;
        if launch.standby { self.standby_starts(launch, step) } else { Ok(()) }
    }

    pub(super) fn load(&mut self, worker: WorkerId) -> Result<(), Violation> {
        let seen = self.seen(worker);
        rule(seen.connected, "a worker loads after its hello")?;
        rule(!seen.loaded && !seen.warm, "a worker loads once")?;
        seen.loaded = true;
        Ok(())
    }

    pub(super) fn attach(
        &mut self,
        worker: WorkerId,
        slice: &Slice,
        share: Percent,
    ) -> Result<(), Violation> {
        let whole = sms_of(&self.settings, Percent::WHOLE);
        let own = sms_of(&self.settings, share);
        let seen = self.seen(worker);
        rule(seen.warm, "a lane is attached after its worker is warm")?;
        rule(!seen.attached, "a lane is attached once")?;
        rule(!seen.leaves(), "an exiting worker gets no lane")?;
        rule(seen.launch.purpose == WorkerPurpose::Serve, "a reference worker has no lane")?;
        rule(share == seen.launch.share, "a lane has the share of its worker")?;
        let first = seen.first.unwrap_or(Groups::WHOLE);
        rule(slice.groups == first, "the first batches run on the partition that is ready")?;
        let right = if seen.first.is_none() { slice.sms == own } else { slice.sms <= whole };
        rule(right, "a lane without partitions has the SMs of its share")?;
        rule(!slice.times.is_empty(), "a lane knows the times of its batches")?;
        seen.attached = true;
        seen.runs_on = first;
        seen.ready.extend(Some(first).filter(|groups| *groups != Groups::WHOLE));
        Ok(())
    }

    pub(super) fn route(&mut self, worker: WorkerId, step: &Step<'_>) -> Result<(), Violation> {
        let seen = self.seen(worker);
        let becomes_standby = seen.role == Some(WorkerRole::Standby) || seen.standby_since.is_some();
        let takes_back = self.seen(worker).drains.is_some();
        let seen = self.seen(worker);
        rule(seen.is_usable(), "traffic goes only to a warm worker that is neither dead nor exiting")?;
        (seen.busy, seen.drains, seen.parked, seen.standby_since) = (true, None, None, None);
        seen.routed = step.now;
        rule(self.routed != Some(worker), "traffic moves from one worker to another")?;
        let before = self.routed.replace(worker);
        self.boots.serves();
        // The batch that a misbehaving worker was executing may have caused the fault.
        if let Some(seen) = before.and_then(|before| self.workers.get(&before)) {
            let blamed = !seen.misbehaved || seen.condemned || seen.gone || seen.lane_ended.is_some();
            // A shadow may become warm before a killed worker has exited.
            let shadow = matches!(step.stimulus, Stimulus::LifecycleEvent(LifecycleEvent::Warmed { .. }));
            rule(blamed || shadow, "the batch of a misbehaving worker is condemned before traffic moves")?;
        }
        if takes_back {
            self.note("the incumbent takes the traffic back");
            self.shares.taken_back();
        }
        if becomes_standby {
            self.standby.taken();
        }
        Ok(())
    }

    pub(super) fn drain(&mut self, worker: WorkerId, now: Timestamp) -> Result<(), Violation> {
        rule(self.routed != Some(worker), "the worker that has the traffic does not drain")?;
        let seen = self.seen(worker);
        rule(seen.is_usable() && seen.drains.is_none(), "a worker that has served drains once")?;
        rule(seen.busy, "a worker drains that may have batches")?;
        seen.drains = Some(now);
        Ok(())
    }

    pub(super) fn requeue(&mut self, worker: WorkerId, step: &Step<'_>) -> Result<(), Violation> {
        rule(self.routed != Some(worker), "the requests of the worker that serves are not requeued")?;
        let (drain, now) = (self.settings.timeouts.drain, step.now);
        let seen = self.seen(worker);
        let late = seen.late || seen.drains.is_some_and(|since| now >= since + drain);
        let dead = seen.gone || seen.lane_ended.is_some();
        rule(late || dead, "requests are requeued only from a dead or slow worker")?;
        seen.busy = false;
        self.note("requests are served elsewhere");
        Ok(())
    }

    pub(super) fn condemn(&mut self, worker: WorkerId, now: Timestamp) -> Result<(), Violation> {
        let seen = self.seen(worker);
        let hangs = seen.prepares.is_some_and(|(_, by)| now >= by);
        let bad = seen.misbehaved || seen.late || hangs;
        rule(bad, "only the batch of a misbehaving or late worker is to blame")?;
        (seen.condemned, seen.busy) = (true, false);
        self.note("a batch is to blame");
        Ok(())
    }

    pub(super) fn hurry(&mut self, worker: WorkerId) -> Result<(), Violation> {
        let seen = self.seen(worker);
        rule(seen.launch.standby && !seen.warm, "only a starting standby is hurried")?;
        seen.hurried = true;
        Ok(())
    }

    /// Checks that a worker serves, unless no worker can serve.
    pub(super) fn traffic_flows(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        if self.stopping {
            return rule(
                step.workers.state() == WorkersState::Stopping,
                "a stopping model is reported as stopping",
            );
        }
        let serves =
            self.routed.and_then(|routed| self.workers.get(&routed)).is_some_and(WorkerRecord::is_usable);
        let state = step.workers.state();
        rule(serves == (state == WorkersState::Ready), "a model is ready if a worker serves, and only then")?;
        let low_priority = self.workers.values().any(WorkerRecord::is_usable);
        rule(serves || !low_priority, "a worker that can serve does so if no other does")?;
        let ready = self
            .workers
            .values()
            .filter(|seen| seen.is_usable() && (seen.standby_since.is_some() || seen.parked.is_some()));
        let ready = ready.map(|seen| seen.launch.share).max();
        rule(step.workers.ready_share() == ready, "the reported standby share is right")?;
        if awaits(step.workers) {
            let shadow = step.workers.handover_phase().is_some();
            let hurried = self.workers.values().any(|seen| seen.hurried && !seen.leaves());
            rule(hurried || shadow, "an awaited worker starts at normal priority")?;
            self.note("a starting standby is awaited");
        }
        if matches!(state, WorkersState::Waiting(_)) && !awaits(step.workers) {
            self.note("the GPU takes no worker");
        }
        Ok(())
    }

    /// Checks that a model sleeps when it must, unless it says that it cannot, and that a model that sleeps
    /// starts no worker.
    pub(super) fn sleep_is_kept(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        if self.stopping {
            return Ok(());
        }
        let sleeps = step.workers.state() == WorkersState::Asleep;
        if let Stimulus::LifecycleEvent(LifecycleEvent::Sleep(worker)) = step.stimulus {
            let refuses = step.actions.contains(&Action::StayAwake(*worker));
            let alone = self.workers.values().all(|seen| seen.leaves() || seen.launch.worker == *worker);
            rule(sleeps != refuses || self.was_asleep, "a model sleeps when it must, or stays awake")?;
            rule(!sleeps || alone, "only a model with one worker sleeps")?;
            self.note(if sleeps { "a model sleeps without a worker" } else { "a model cannot sleep now" });
        }
        let starts = step.actions.iter().any(|action| matches!(action, Action::Start(_)));
        let wakes = match step.stimulus {
            Stimulus::LifecycleEvent(LifecycleEvent::Wake) => true,
            Stimulus::LifecycleEvent(LifecycleEvent::Resize { request, .. }) => {
                self.refusal(request, step).is_none()
            }
            _ => false,
        };
        rule(!self.was_asleep || sleeps || wakes, "only a wake or a change by hand ends a sleep")?;
        rule(!self.was_asleep || starts == wakes, "a wake starts a worker, and nothing else does")
    }

    /// Checks that a worker always serves in a run without faults, and that no worker is killed.
    pub(super) fn all_is_well(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        let bad = |action: &Action| {
            matches!(action, Action::Kill(..) | Action::Condemn(_) | Action::Requeue(_) | Action::Shut(_))
        };
        rule(self.stopping || !step.actions.iter().any(bad), "without faults no worker fails")?;
        rule(step.workers.deaths_and_restarts() == (0, 0), "without faults no worker dies")?;
        let ready = matches!(step.workers.state(), WorkersState::Ready | WorkersState::Asleep);
        let flows = ready || !self.was_ready || self.stopping;
        rule(flows, "without faults a worker serves throughout")
    }
}
