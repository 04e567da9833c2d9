//! Where requests go: to a worker that can serve, at every moment at which there is one.

use shadowslice_policy::scheduler::Slice;
use shadowslice_policy::workers::{Action, Fact, HandoverMode, Launch, State};
use shadowslice_shared::boot::WorkerPurpose;
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Timestamp};

use super::seen::Seen;
use super::shares::sms_of;
use super::{Broken, Rules, Step, Told, awaits, rule};

impl Rules {
    pub(super) fn start(&mut self, launch: &Launch, step: &Step<'_>) -> Result<(), Broken> {
        let worker = launch.worker;
        rule(!self.workers.contains_key(&worker), "every worker has a name of its own")?;
        rule(!self.stopping, "no worker is started that would have to end at once")?;
        let serves = self.routed.and_then(|routed| self.workers.get(&routed)).is_some_and(Seen::is_usable);
        rule(!serves || launch.spare, "beside a worker that serves only spares are started")?;
        rule(launch.spare || !launch.stands, "a worker that stands is a spare")?;
        self.boots(launch, step)?;
        let shadow = launch.spare && !launch.stands;
        let started = if shadow { self.answers.begun_at().unwrap_or(step.now) } else { step.now };
        self.workers.insert(worker, Seen::new(*launch, started + self.settings.timeouts.spawn));
        match launch.purpose {
            WorkerPurpose::DeviceReference => self.note("the device writes the reference answers"),
            _ if shadow && started < step.now => self.note("a shadow waits for memory"),
            _ => {}
        }
        self.starts_in_time(launch, step)?;
        if launch.stands { self.starts_to_stand(launch, step) } else { Ok(()) }
    }

    pub(super) fn load(&mut self, worker: WorkerId) -> Result<(), Broken> {
        let seen = self.seen(worker);
        rule(seen.connected, "a worker loads after its hello")?;
        rule(!seen.loaded && !seen.warm, "a worker loads once")?;
        seen.loaded = true;
        Ok(())
    }

    pub(super) fn attach(&mut self, worker: WorkerId, slice: &Slice, share: Percent) -> Result<(), Broken> {
        let whole = sms_of(&self.settings, Percent::WHOLE);
        let own = sms_of(&self.settings, share);
        let seen = self.seen(worker);
        rule(seen.warm, "a lane is attached after its worker is warm")?;
        rule(!seen.attached, "a lane is attached once")?;
        rule(!seen.leaves(), "no lane is attached of a worker that leaves")?;
        rule(seen.launch.purpose == WorkerPurpose::Serve, "a reference worker has no lane")?;
        rule(share == seen.launch.share, "a lane has the share of its worker")?;
        let first = seen.first.unwrap_or(Groups::WHOLE);
        rule(slice.groups == first, "the first batches run on the partition that is ready")?;
        let right = if seen.first.is_none() { slice.sms == own } else { slice.sms <= whole };
        rule(right, "a lane without partitions has the SMs of its share")?;
        rule(!slice.times.is_empty(), "a lane is told how long its batches take")?;
        seen.attached = true;
        seen.runs_on = first;
        seen.ready.extend(Some(first).filter(|groups| *groups != Groups::WHOLE));
        Ok(())
    }

    pub(super) fn route(&mut self, worker: WorkerId, step: &Step<'_>) -> Result<(), Broken> {
        let seen = self.seen(worker);
        let stands_ready = seen.role == "standby" || seen.stands_since.is_some();
        let takes_back = self.seen(worker).drains.is_some();
        let seen = self.seen(worker);
        rule(seen.is_usable(), "traffic goes to a warm worker that is not known to be dead or told to end")?;
        (seen.busy, seen.drains, seen.parked, seen.stands_since) = (true, None, None, None);
        seen.routed = step.now;
        rule(self.routed != Some(worker), "traffic moves from one worker to another")?;
        let before = self.routed.replace(worker);
        self.boots.serves();
        self.restarts = false;
        // What it executes may be what made it hang.
        if let Some(seen) = before.and_then(|before| self.workers.get(&before)) {
            let blamed = !seen.misbehaved || seen.condemned || seen.gone || seen.lane_ended.is_some();
            // A shadow may be warm before the end of a worker that was killed.
            let shadow = matches!(step.told, Told::Fact(Fact::Warmed { .. }));
            rule(blamed || shadow, "what a misbehaving worker executes is condemned before traffic moves")?;
        }
        if takes_back {
            self.note("the incumbent takes the traffic back");
            self.shares.taken_back();
        }
        if stands_ready {
            self.stands.taken();
        }
        Ok(())
    }

    pub(super) fn unroute(&mut self, step: &Step<'_>) -> Result<(), Broken> {
        let drained =
            |action: &Action| matches!(action, Action::Drain(worker) if Some(*worker) == self.routed);
        rule(step.actions.iter().any(drained), "traffic stops only for a worker that drains")?;
        rule(self.was_ready, "traffic stops only where it flows")?;
        let restart = self.settings.handover == HandoverMode::Restart;
        rule(restart, "traffic stops only with `handover: restart`")?;
        self.routed = None;
        self.restarts = true;
        self.shares.restarts();
        Ok(())
    }

    pub(super) fn drain(&mut self, worker: WorkerId, now: Timestamp) -> Result<(), Broken> {
        rule(self.routed != Some(worker), "the worker that has the traffic does not drain")?;
        let seen = self.seen(worker);
        rule(seen.is_usable() && seen.drains.is_none(), "a worker that has served drains, once")?;
        rule(seen.busy, "a worker drains that may have batches")?;
        seen.drains = Some(now);
        Ok(())
    }

    pub(super) fn requeue(&mut self, worker: WorkerId, step: &Step<'_>) -> Result<(), Broken> {
        rule(self.routed != Some(worker), "what the worker that serves has is not served elsewhere")?;
        let (drain, now) = (self.settings.timeouts.drain, step.now);
        let seen = self.seen(worker);
        let late = seen.late || seen.drains.is_some_and(|since| now >= since + drain);
        let dead = seen.gone || seen.lane_ended.is_some();
        rule(late || dead, "what a worker has is served elsewhere if it is dead or takes too long")?;
        seen.busy = false;
        self.note("requests are served elsewhere");
        Ok(())
    }

    pub(super) fn condemn(&mut self, worker: WorkerId, now: Timestamp) -> Result<(), Broken> {
        let seen = self.seen(worker);
        let hangs = seen.prepares.is_some_and(|(_, by)| now >= by);
        let bad = seen.misbehaved || seen.late || hangs;
        rule(bad, "only what a misbehaving or late worker executes is to blame")?;
        (seen.condemned, seen.busy) = (true, false);
        self.note("a batch is to blame");
        Ok(())
    }

    pub(super) fn hurry(&mut self, worker: WorkerId) -> Result<(), Broken> {
        let seen = self.seen(worker);
        rule(seen.launch.stands && !seen.warm, "a standing worker that starts is hurried")?;
        seen.hurried = true;
        Ok(())
    }

    /// Traffic flows if it can.
    pub(super) fn traffic_flows(&mut self, step: &Step<'_>) -> Result<(), Broken> {
        if self.stopping {
            return rule(step.workers.state() == State::Stopping, "a model that stops says so");
        }
        let serves = self.routed.and_then(|routed| self.workers.get(&routed)).is_some_and(Seen::is_usable);
        let state = step.workers.state();
        rule(serves == (state == State::Ready), "a model is ready if a worker serves, and only then")?;
        let spare = self.workers.values().any(Seen::is_usable);
        rule(serves || self.restarts || !spare, "a worker that can serve does, if no other does")?;
        let ready = self
            .workers
            .values()
            .filter(|seen| seen.is_usable() && (seen.stands_since.is_some() || seen.parked.is_some()));
        let ready = ready.map(|seen| seen.launch.share).max();
        let shown = self.restarts || step.workers.ready_share() == ready;
        rule(shown, "the share is shown to which traffic could move at once")?;
        if awaits(step.workers) {
            let shadow = step.workers.handover_phase().is_some();
            let hurried = self.workers.values().any(|seen| seen.hurried && !seen.leaves());
            rule(hurried || shadow, "the worker that is waited for starts at normal priority")?;
            self.note("a standing worker that starts is waited for");
        }
        if matches!(state, State::Waiting(_)) && !awaits(step.workers) {
            self.note("the GPU takes no worker");
        }
        Ok(())
    }

    /// Without faults a worker serves at all times, and none is killed.
    pub(super) fn all_is_well(&mut self, step: &Step<'_>) -> Result<(), Broken> {
        let bad = |action: &Action| {
            matches!(action, Action::Kill(..) | Action::Condemn(_) | Action::Requeue(_) | Action::Shut(_))
        };
        rule(self.stopping || !step.actions.iter().any(bad), "without faults no worker fails")?;
        rule(step.workers.deaths_and_restarts() == (0, 0), "without faults no worker dies")?;
        let ready = step.workers.state() == State::Ready;
        let flows = ready || !self.was_ready || self.stopping || self.restarts;
        rule(flows, "without faults a worker serves throughout")
    }
}
