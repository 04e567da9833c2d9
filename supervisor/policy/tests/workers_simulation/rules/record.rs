//! The rules' record of each worker.

use std::time::Duration;

use shadowslice_policy::workers::{Launch, LifecycleEvent, Settings, WorkerRole};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Percent, Timestamp};

use super::RuleChecker;
use super::shares::sms_of;

/// The state of a worker, derived from events and actions.
pub(super) struct WorkerRecord {
    pub(super) launch: Launch,
    pub(super) connected: bool,
    pub(super) loaded: bool,
    /// The time by which the current phase of the start must end.
    pub(super) boot_by: Timestamp,
    /// True after the worker has become warm.
    pub(super) warm: bool,
    /// The partition that is ready when the worker becomes warm, if its share is a partition.
    pub(super) first: Option<Groups>,
    pub(super) attached: bool,
    pub(super) refused: Option<Timestamp>,
    pub(super) misbehaved: bool,
    pub(super) lane_ended: Option<Timestamp>,
    /// True if the worker had no batch when its lane ended.
    pub(super) lane_idle: Option<bool>,
    /// The time at which the worker took the traffic over.
    pub(super) routed: Timestamp,
    pub(super) told_to_end: Option<Timestamp>,
    /// The time by which the worker must have exited after an order.
    pub(super) ends_by: Option<Timestamp>,
    pub(super) killed: Option<Timestamp>,
    /// True if batches may be in flight on the worker.
    pub(super) busy: bool,
    pub(super) drains: Option<Timestamp>,
    /// The time at which the worker had drained. From this time on, the worker can take the traffic
    /// back.
    pub(super) parked: Option<Timestamp>,
    pub(super) standby_since: Option<Timestamp>,
    pub(super) unwanted: Option<Timestamp>,
    /// The role that status reports show.
    pub(super) role: Option<WorkerRole>,
    /// True if the worker was awaited or revoked while it was starting as a standby.
    pub(super) hurried: bool,
    /// True if the worker failed as a standby. The next standby must not start before the time of this
    /// worker's exit plus `rest`.
    pub(super) failed: bool,
    pub(super) rest: Duration,
    /// True if the worker did not exit in time after an order or a kill.
    pub(super) late: bool,
    /// True if the worker did not exit in time after a kill.
    pub(super) outlives: bool,
    pub(super) condemned: bool,
    pub(super) gone: bool,
    /// The groups on which batches run, the prepared partitions, the partition in preparation, and the
    /// partitions that the model cannot use.
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
            role: None,
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

    /// Returns true if the worker is exiting or has exited.
    pub(super) fn leaves(&self) -> bool {
        let ends = self.refused.or(self.lane_ended).or(self.told_to_end).or(self.killed);
        self.gone || ends.is_some()
    }

    /// Returns the worker's share. This is the whole GPU if the worker was started for a partition and
    /// the model can no longer use partitions.
    pub(super) fn share(&self) -> Percent {
        let whole = self.first.is_some() && self.runs_on == Groups::WHOLE;
        if whole { Percent::WHOLE } else { self.launch.share }
    }

    /// Returns true if the worker can be the standby for this share. `inside` is true if the share is a
    /// partition. A worker on a partition that no longer exists does not fit any share.
    pub(super) fn fits(&self, share: Percent, settings: &Settings, inside: bool) -> bool {
        let apart = self.first.is_none() || self.runs_on == Groups::WHOLE;
        inside || (apart && sms_of(settings, self.share()) == sms_of(settings, share))
    }

    /// Returns true if the worker could serve.
    pub(super) fn is_usable(&self) -> bool {
        self.attached && !self.leaves() && !self.misbehaved
    }
}

impl RuleChecker {
    /// Records a lifecycle event of a worker.
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
            // A refusal that arrives after the worker was warm is an outdated event.
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
