//! Rules about first workers. The reference answers must exist before a worker serves, and faults are
//! either final or temporary.

use std::time::Duration;

use shadowslice_policy::workers::{Launch, LifecycleEvent, StartFailure, WorkersState};
use shadowslice_shared::boot::{BootRefusal, WorkerPurpose};
use shadowslice_shared::units::Timestamp;

use super::{RuleChecker, Step, Stimulus, Violation, rule};

/// The time before a start is retried after a temporary failure.
const PAUSE: Duration = Duration::from_millis(200);

#[derive(Default)]
pub(super) struct Boots {
    /// True if the CPU does not support the model's operators.
    no_operator: bool,
    /// The times before which the primary worker and the shadow must not start again.
    again: Timestamp,
    shadow_again: Timestamp,
    /// True if a refusal in this step is final.
    is_final: bool,
    passing_refusal: bool,
    /// True if a start failed for a temporary reason in this step.
    passing: bool,
}

impl Boots {
    /// Allows an immediate start for a new hand-over.
    pub(super) fn begun(&mut self) {
        self.shadow_again = Timestamp::default();
    }

    /// Allows an immediate start of the next worker, because a worker has served.
    pub(super) fn serves(&mut self) {
        self.again = Timestamp::default();
    }
}

impl RuleChecker {
    pub(super) fn boots_before(&mut self, step: &Step<'_>) {
        (self.boots.is_final, self.boots.passing, self.boots.passing_refusal) = (false, false, false);
        match step.stimulus {
            Stimulus::LifecycleEvent(LifecycleEvent::NotStarted {
                worker,
                failure: StartFailure::Passing { .. },
            }) => {
                let Some(seen) = self.workers.get(worker).filter(|seen| seen.told_to_end.is_none()) else {
                    return;
                };
                let stands = seen.launch.standby;
                if !seen.launch.low_priority {
                    self.boots.again = step.now + PAUSE;
                    self.boots.passing = true;
                } else if !stands {
                    self.boots.shadow_again = step.now + PAUSE;
                }
            }
            Stimulus::LifecycleEvent(LifecycleEvent::Refused { worker, refusal }) => {
                let Some(seen) = self.workers.get(worker).filter(|seen| !seen.launch.low_priority) else {
                    return;
                };
                let news = seen.refused == Some(step.now) && seen.killed.or(seen.told_to_end).is_none();
                if !news || self.reference_is_written() {
                    return;
                }
                let lacks = matches!(refusal, BootRefusal::NoOperator(_));
                let first = seen.launch.purpose == WorkerPurpose::Reference && self.settings.on_gpu;
                self.boots.no_operator |= lacks && first;
                let passing =
                    matches!(refusal, BootRefusal::Setup(_) | BootRefusal::Library(_)) || (lacks && first);
                self.boots.is_final = !passing;
                self.boots.passing_refusal = passing;
            }
            _ => {}
        }
    }

    /// Checks that this worker may start now and for this purpose.
    pub(super) fn boots(&mut self, launch: &Launch, step: &Step<'_>) -> Result<(), Violation> {
        let written = self.reference_is_written();
        rule(written == (launch.purpose == WorkerPurpose::Serve), "the reference answers come first")?;
        let device = launch.purpose == WorkerPurpose::DeviceReference;
        rule(
            device == (self.boots.no_operator && !written),
            "the device writes the reference answers if the processor cannot",
        )?;
        if self.down && !launch.low_priority {
            self.boots.serves();
        }
        let again = if launch.low_priority { self.boots.shadow_again } else { self.boots.again };
        let waits = step.now < again && !launch.standby;
        rule(!waits, "a failed start is retried after a pause")
    }

    pub(super) fn boots_after(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        if self.stopping {
            return Ok(());
        }
        let is_final = matches!(step.workers.state(), WorkersState::Down { again: None, .. });
        rule(!is_final || self.down || !self.boots.passing_refusal, "a temporary fault is not final")?;
        if self.boots.is_final {
            self.note("down: a fault in the model");
            rule(is_final, "a fault in the model is final")?;
        }
        let due = step.workers.due().is_some_and(|due| due <= self.boots.again);
        rule(!self.boots.passing || due, "a GPU that accepted no worker is asked again soon")
    }
}
