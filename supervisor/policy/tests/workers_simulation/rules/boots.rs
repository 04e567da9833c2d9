//! First workers: reference answers first, final faults and passing ones.

use std::time::Duration;

use shadowslice_policy::workers::{Fact, Launch, StartFailure, State};
use shadowslice_shared::boot::{BootRefusal, WorkerPurpose};
use shadowslice_shared::units::Timestamp;

use super::{Broken, Rules, Step, Told, rule};

/// The pause before a start is tried again that failed for a passing reason.
const PAUSE: Duration = Duration::from_millis(200);

#[derive(Default)]
pub(super) struct Boots {
    /// The processor lacks operators of the model.
    no_operator: bool,
    /// When the worker that is to serve, or the shadow, is tried again at the earliest.
    again: Timestamp,
    shadow_again: Timestamp,
    /// A refusal is final in this step.
    is_final: bool,
    passing_refusal: bool,
    /// A start failed for a passing reason in this step.
    passing: bool,
}

impl Boots {
    /// Another hand-over need not wait.
    pub(super) fn begun(&mut self) {
        self.shadow_again = Timestamp::default();
    }

    /// Nor the next worker after one that served.
    pub(super) fn serves(&mut self) {
        self.again = Timestamp::default();
    }
}

impl Rules {
    pub(super) fn boots_before(&mut self, step: &Step<'_>) {
        (self.boots.is_final, self.boots.passing, self.boots.passing_refusal) = (false, false, false);
        match step.told {
            Told::Fact(Fact::NotStarted { worker, failure: StartFailure::Passing { .. } }) => {
                let Some(seen) = self.workers.get(worker).filter(|seen| seen.told_to_end.is_none()) else {
                    return;
                };
                let stands = seen.launch.stands;
                if !seen.launch.spare {
                    self.boots.again = step.now + PAUSE;
                    self.boots.passing = true;
                } else if !stands {
                    self.boots.shadow_again = step.now + PAUSE;
                }
            }
            Told::Fact(Fact::Refused { worker, refusal }) => {
                let Some(seen) = self.workers.get(worker).filter(|seen| !seen.launch.spare) else { return };
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

    /// Whether this worker may be started now, and for this purpose.
    pub(super) fn boots(&mut self, launch: &Launch, step: &Step<'_>) -> Result<(), Broken> {
        let written = self.reference_is_written();
        rule(written == (launch.purpose == WorkerPurpose::Serve), "the reference answers come first")?;
        let device = launch.purpose == WorkerPurpose::DeviceReference;
        rule(
            device == (self.boots.no_operator && !written),
            "the device writes them where the processor cannot",
        )?;
        if self.down && !launch.spare {
            self.boots.serves();
        }
        let again = if launch.spare { self.boots.shadow_again } else { self.boots.again };
        let waits = step.now < again && !launch.stands;
        rule(!waits, "a start that failed is tried again after a pause")
    }

    pub(super) fn boots_after(&mut self, step: &Step<'_>) -> Result<(), Broken> {
        if self.stopping {
            return Ok(());
        }
        let is_final = matches!(step.workers.state(), State::Down { again: None, .. });
        rule(!is_final || self.down || !self.boots.passing_refusal, "a fault that may pass is not final")?;
        if self.boots.is_final {
            self.note("down: a fault in the model");
            rule(is_final, "a fault in the model is final")?;
        }
        let due = step.workers.due().is_some_and(|due| due <= self.boots.again);
        rule(!self.boots.passing || due, "a GPU that took no worker is asked again soon")
    }
}
