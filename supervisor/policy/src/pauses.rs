//! Pauses: which batches wait at their next piece, so that a batch with less time can use their SMs.
//!
//! A long batch of one model delays the batches of all models on the same SMs. A worker cuts long batches
//! into pieces ([`shadowslice_shared::pause`]). When a batch starts that would otherwise be late, the
//! [`PauseBoard`] of the GPU pauses the batches that may wait: those of a lower priority, and those of the same
//! priority with a longer SLO, if their own deadlines permit it. Paused batches continue when the urgent batch
//! ends. A worker is paused for at most about half of the time, as in Paella's deficit (SOSP 2023).

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::pause::MAX_BATCH_PAUSE;
use shadowslice_shared::units::Timestamp;

/// The minimum ratio of a paused model's SLO to the urgent model's SLO, if their priorities are equal. Models
/// with similar SLOs would otherwise pause each other.
const LONGER_SLO: u32 = 4;

/// The excess of the time for which a worker was paused over the time for which it was not, beyond which no new
/// pause begins: two of the longest pauses.
const MAX_DEFICIT: Duration = MAX_BATCH_PAUSE.saturating_mul(2);

/// The id of a worker on a [`PauseBoard`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// The terms on which a worker's batches wait for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PauseTerms {
    /// The model's priority; 1 is the highest.
    pub priority: u32,
    /// The model's SLO.
    pub slo: Duration,
    /// False if the worker's batches never wait.
    pub can_be_paused: bool,
}

impl PauseTerms {
    /// Returns true if batches of this model may pause for batches of a model with the terms `urgent`.
    pub fn allow_pause_for(&self, urgent: &Self) -> bool {
        self.can_be_paused
            && match self.priority.cmp(&urgent.priority) {
                Ordering::Less => false,
                Ordering::Equal => self.slo >= urgent.slo.saturating_mul(LONGER_SLO),
                Ordering::Greater => true,
            }
    }
}

/// A batch that executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunningBatch {
    /// A number that differs between consecutive batches of the worker.
    pub id: u64,
    /// The groups of SMs.
    pub groups: Groups,
    /// The time of the batch if no other batch slows it down.
    pub time: Duration,
    /// The time at which the worker is expected to finish all batches that were sent to it.
    pub free_at: Timestamp,
    /// The earliest deadline of the requests in the batch.
    pub deadline: Timestamp,
    /// The time for which the batches that were sent to the worker, and the requests behind them, can wait
    /// without being late.
    pub slack: Duration,
}

/// A change of a worker's [pause word](shadowslice_shared::pause::PauseWord).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PauseChange {
    /// The worker's batch waits at its next piece. Each pause has another number.
    Pause {
        /// The worker to pause.
        worker: MemberId,
        /// The number of the pause.
        number: u32,
    },
    /// The worker's batch continues.
    Release {
        /// The paused worker.
        worker: MemberId,
        /// The worker for whose batch it waited.
        beneficiary: MemberId,
        /// The time since the pause began.
        paused: Duration,
    },
}

impl PauseChange {
    /// Returns the worker whose word changes.
    pub const fn worker(&self) -> MemberId {
        match *self {
            Self::Pause { worker, .. } | Self::Release { worker, .. } => worker,
        }
    }
}

/// The workers of one GPU, with their executing batches and their pauses.
#[derive(Debug, Default)]
pub struct PauseBoard {
    members: BTreeMap<MemberId, Member>,
    /// The time of the latest report.
    latest: Timestamp,
    next_number: u32,
}

#[derive(Debug)]
struct Member {
    terms: PauseTerms,
    running: Option<RunningBatch>,
    pause: Option<CurrentPause>,
    /// The batch of the last pause that lasted too long. It pauses this worker only once.
    expired: Option<(MemberId, u64)>,
    /// The excess of paused over other time, at the time `since`.
    deficit: Duration,
    since: Timestamp,
}

#[derive(Debug)]
struct CurrentPause {
    beneficiary: MemberId,
    /// The batch of the beneficiary for which this worker waits.
    batch: u64,
    began: Timestamp,
}

impl Member {
    fn deficit_at(&self, now: Timestamp) -> Duration {
        let passed = now.since(self.since);
        match self.pause {
            Some(_) => self.deficit + passed,
            None => self.deficit.saturating_sub(passed),
        }
    }

    /// Updates the deficit before a pause begins or ends.
    fn advance(&mut self, now: Timestamp) {
        self.deficit = self.deficit_at(now);
        self.since = now.max(self.since);
    }

    /// Returns whether this worker's batch should wait for the batch `urgent` of another worker.
    fn yields_to(&self, urgent: &RunningBatch, terms: PauseTerms, now: Timestamp) -> bool {
        let Some(own) = self.running.as_ref().filter(|_| self.terms.allow_pause_for(&terms)) else {
            return false;
        };
        let meets = own.groups.common(urgent.groups) != Groups::NONE;
        let would_be_late = own.free_at.max(now) + urgent.time > urgent.deadline;
        let is_short = urgent.time <= MAX_BATCH_PAUSE;
        meets && would_be_late && is_short && own.slack >= urgent.time && self.deficit_at(now) < MAX_DEFICIT
    }

    /// Postpones the expected ends of this worker's batches, which waited for this time.
    fn postpone(&mut self, paused: Duration) {
        if let Some(running) = &mut self.running {
            running.free_at = running.free_at + paused;
            running.slack = running.slack.saturating_sub(paused);
        }
    }
}

impl PauseBoard {
    /// Records the batch that a worker executes now, or `None` if it executes none. Returns the changes to
    /// the pause words of this and other workers.
    pub fn set_running(
        &mut self,
        worker: MemberId,
        terms: PauseTerms,
        running: Option<RunningBatch>,
        now: Timestamp,
    ) -> Vec<PauseChange> {
        let new =
            || Member { terms, running, pause: None, expired: None, deficit: Duration::ZERO, since: now };
        let member = self.members.entry(worker).or_insert_with(new);
        (member.terms, member.running) = (terms, running);
        self.latest = now;
        self.update(worker, now)
    }

    /// Removes a worker that has ended. The pauses for its batches end.
    pub fn remove(&mut self, worker: MemberId) -> Vec<PauseChange> {
        self.members.remove(&worker);
        self.update(worker, self.latest)
    }

    /// Ends the pauses whose batch has ended, and begins those that follow from the batch of `changed`. Looks at
    /// each worker once, and at all pairs of a worker whose pause has ended.
    fn update(&mut self, changed: MemberId, now: Timestamp) -> Vec<PauseChange> {
        let paused: Vec<_> =
            self.members.iter().filter(|(_, member)| member.pause.is_some()).map(|(id, _)| *id).collect();
        let mut changes: Vec<_> =
            paused.into_iter().filter_map(|worker| self.end_pause(worker, now)).collect();
        let released = changes.iter().map(|change| change.worker());
        let mut open: Vec<_> = released.chain([changed]).collect();
        open.dedup();
        for worker in open {
            if let Some(urgent) = self.urgent_batch(worker, now) {
                changes.push(self.begin_pause(worker, urgent, now));
            }
        }
        for (worker, batch) in self.yielding_to(changed, now) {
            changes.push(self.begin_pause(worker, (changed, batch), now));
        }
        changes
    }

    /// Returns the workers that should wait for the batch of `urgent`, each with this batch.
    fn yielding_to(&self, urgent: MemberId, now: Timestamp) -> Vec<(MemberId, u64)> {
        let member = self.members.get(&urgent);
        let Some((terms, batch)) = member.and_then(|member| Some((member.terms, member.running?))) else {
            return Vec::new();
        };
        let others = self.members.iter().filter(|(worker, _)| **worker != urgent);
        let yields = others.filter(|(_, member)| {
            member.pause.is_none()
                && member.expired != Some((urgent, batch.id))
                && member.yields_to(&batch, terms, now)
        });
        yields.map(|(worker, _)| (*worker, batch.id)).collect()
    }

    fn begin_pause(&mut self, worker: MemberId, urgent: (MemberId, u64), now: Timestamp) -> PauseChange {
        let (beneficiary, batch) = urgent;
        if let Some(member) = self.members.get_mut(&worker) {
            member.advance(now);
            member.pause = Some(CurrentPause { beneficiary, batch, began: now });
        }
        self.next_number = self.next_number.wrapping_add(1).max(1);
        PauseChange::Pause { worker, number: self.next_number }
    }

    /// Ends the pause of a worker if the urgent batch has ended, or if the pause has lasted too long.
    fn end_pause(&mut self, worker: MemberId, now: Timestamp) -> Option<PauseChange> {
        let runs =
            |id: MemberId| self.members.get(&id).and_then(|member| member.running).map(|batch| batch.id);
        let pause = self.members.get(&worker)?.pause.as_ref();
        let is_over = pause.is_some_and(|pause| {
            now.since(pause.began) >= MAX_BATCH_PAUSE || runs(pause.beneficiary) != Some(pause.batch)
        });
        let member = self.members.get_mut(&worker)?;
        member.advance(now);
        let CurrentPause { beneficiary, batch, began } = member.pause.take_if(|_| is_over)?;
        let paused = now.since(began);
        member.expired = (paused >= MAX_BATCH_PAUSE).then_some((beneficiary, batch));
        member.postpone(paused);
        Some(PauseChange::Release { worker, beneficiary, paused })
    }

    /// Returns the worker and the batch for which a worker without a pause should wait.
    fn urgent_batch(&self, worker: MemberId, now: Timestamp) -> Option<(MemberId, u64)> {
        let member = self.members.get(&worker).filter(|member| member.pause.is_none())?;
        let others = self.members.iter().filter(|(other, _)| **other != worker);
        let batches = others.filter_map(|(other, member)| Some((other, member.terms, member.running?)));
        let urgent = batches.filter(|(other, terms, batch)| {
            member.expired != Some((**other, batch.id)) && member.yields_to(batch, *terms, now)
        });
        let first = urgent.min_by_key(|(_, terms, batch)| (terms.priority, batch.deadline));
        first.map(|(other, _, batch)| (*other, batch.id))
    }
}

#[cfg(test)]
mod tests;
