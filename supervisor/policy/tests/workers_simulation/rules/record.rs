//! What is known of each worker.

use std::time::Duration;

use shadowslice_policy::workers::{Launch, LifecycleEvent, Settings};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Percent, Timestamp};

use super::RuleChecker;
use super::shares::sms_of;

/// A worker, as the rules see it.
pub(super) struct WorkerRecord {
    pub(super) launch: Launch,
    pub(super) connected: bool,
    pub(super) loaded: bool,
    /// When its present phase of booting must be over.
    pub(super) boot_by: Timestamp,
    /// It is warm, with this partition ready if its share is one.
    pub(super) warm: bool,
    pub(super) first: Option<Groups>,
    pub(super) attached: bool,
    pub(super) refused: Option<Timestamp>,
    pub(super) misbehaved: bool,
    pub(super) lane_ended: Option<Timestamp>,
    /// Whether it had no batch then.
    pub(super) lane_idle: Option<bool>,
    /// When it got the traffic.
    pub(super) routed: Timestamp,
    pub(super) told_to_end: Option<Timestamp>,
    /// When it must have ended that was told so.
    pub(super) ends_by: Option<Timestamp>,
    pub(super) killed: Option<Timestamp>,
    /// Batches may be in flight.
    pub(super) busy: bool,
    pub(super) drains: Option<Timestamp>,
    /// It has drained, and can take the traffic back.
    pub(super) parked: Option<Timestamp>,
    pub(super) standby_since: Option<Timestamp>,
    pub(super) unwanted: Option<Timestamp>,
    /// Its role, as the machine shows it.
    pub(super) role: &'static str,
    /// It was waited for, or had to go, while it started to stand.
    pub(super) hurried: bool,
    /// It failed to stand; the next one waits so long after its exit.
    pub(super) failed: bool,
    pub(super) rest: Duration,
    /// It was asked to end, or killed, in vain.
    pub(super) late: bool,
    /// It was killed in vain.
    pub(super) outlives: bool,
    pub(super) condemned: bool,
    pub(super) gone: bool,
    /// Where its batches run; partitions that it has ready; the one that it makes ready; and those that it
    /// could not.
    pub(super) runs_on: Groups,
    pub(super) ready: Vec<Groups>,
    pub(super) prepares: Option<(Groups, Timestamp)>,
    pub(super) cannot: Vec<Groups>,
}

impl WorkerRecord {
    pub(super) fn new(launch: Launch, boot_by: Timestamp) -> Self {
        Self {
            launch,
            connected: false,
            loaded: false,
            boot_by,
            warm: false,
            first: None,
            attached: false,
            refused: None,
            misbehaved: false,
            lane_ended: None,
            lane_idle: None,
            routed: Timestamp::default(),
            told_to_end: None,
            ends_by: None,
            killed: None,
            busy: false,
            drains: None,
            parked: None,
            standby_since: None,
            unwanted: None,
            role: "",
            hurried: false,
            failed: false,
            rest: Duration::ZERO,
            late: false,
            outlives: false,
            condemned: false,
            gone: false,
            runs_on: Groups::WHOLE,
            ready: Vec::new(),
            prepares: None,
            cannot: Vec::new(),
        }
    }

    /// Whether it ends, or is about to.
    pub(super) fn leaves(&self) -> bool {
        let ends = self.refused.or(self.lane_ended).or(self.told_to_end).or(self.killed);
        self.gone || ends.is_some()
    }

    /// The share that it has: of one with a partition that the model can have no more, the whole GPU.
    pub(super) fn share(&self) -> Percent {
        let whole = self.first.is_some() && self.runs_on == Groups::WHOLE;
        if whole { Percent::WHOLE } else { self.launch.share }
    }

    /// Whether it can stand for this share; `inside`: the model's share is a partition. On a partition that
    /// is no more it stands for none.
    pub(super) fn fits(&self, share: Percent, settings: &Settings, inside: bool) -> bool {
        let apart = self.first.is_none() || self.runs_on == Groups::WHOLE;
        inside || (apart && sms_of(settings, self.share()) == sms_of(settings, share))
    }

    /// Whether it could serve.
    pub(super) fn is_usable(&self) -> bool {
        self.attached && !self.leaves() && !self.misbehaved
    }
}

impl RuleChecker {
    /// Takes note of what a worker is heard to be.
    pub(super) fn hear_of_worker(&mut self, fact: &LifecycleEvent, now: Timestamp) {
        let warm_by = now + self.settings.timeouts.warm;
        let worker = match fact {
            LifecycleEvent::NotStarted { worker, .. }
            | LifecycleEvent::Connected(worker)
            | LifecycleEvent::Warmed { worker, .. }
            | LifecycleEvent::Refused { worker, .. }
            | LifecycleEvent::Misbehaved { worker, .. }
            | LifecycleEvent::LaneEnded { worker, .. }
            | LifecycleEvent::Exited { worker, .. }
            | LifecycleEvent::Drained(worker)
            | LifecycleEvent::Prepared { worker, .. } => worker,
            _ => return,
        };
        let Some(seen) = self.workers.get_mut(worker) else { return };
        match fact {
            LifecycleEvent::NotStarted { .. } | LifecycleEvent::Exited { .. } => seen.gone = true,
            LifecycleEvent::Connected(_) if !seen.connected => {
                seen.connected = true;
                seen.boot_by = warm_by;
            }
            LifecycleEvent::Warmed { warmed, .. } if !seen.warm => {
                seen.warm = true;
                seen.first = warmed.partitions.as_ref().map(|proven| proven.ready);
            }
            // What a worker says that was warm already is late.
            LifecycleEvent::Refused { .. } if !seen.warm => {
                seen.refused.get_or_insert(now);
            }
            LifecycleEvent::Misbehaved { .. } => seen.misbehaved = true,
            LifecycleEvent::LaneEnded { idle, .. } => {
                seen.lane_ended.get_or_insert(now);
                if seen.killed.is_none() {
                    seen.lane_idle.get_or_insert(*idle);
                }
            }
            LifecycleEvent::Drained(_) if seen.drains.is_some() => {
                seen.busy = false;
                seen.parked.get_or_insert(now);
            }
            LifecycleEvent::Prepared { prepared, .. } => {
                let groups = prepared.groups;
                let awaited = seen.prepares.take_if(|(prepares, _)| *prepares == groups).is_some();
                if prepared.result.is_err() {
                    seen.cannot.push(groups);
                } else if awaited {
                    seen.ready.push(groups);
                }
            }
            _ => {}
        }
    }
}
