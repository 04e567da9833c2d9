//! Pressure: a request comes that shows that its model should have more SMs at once, while they may be had.

use shadowslice_policy::pressure::{Alarm, Pressure, Watch};
use shadowslice_shared::units::Moment;
use tokio::sync::mpsc;

/// Notices that may wait for who decides.
pub const PRESSURES: usize = 64;

/// A model should have more SMs at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pressed {
    /// Which.
    pub model: usize,
    /// Why, and since when.
    pub alarm: Alarm,
}

/// Where a model gives notice.
#[derive(Debug, Clone)]
pub struct Bell {
    /// Which model it is.
    pub model: usize,
    /// Who decides.
    pub to: mpsc::Sender<Pressed>,
}

/// Gives notice, while that could help.
#[derive(Debug)]
pub(crate) struct Relief {
    bell: Option<Bell>,
    /// Whether more SMs are.
    may_be_had: bool,
    pressure: Pressure,
}

impl Relief {
    pub(crate) fn new(bell: Option<Bell>) -> Self {
        Self { bell, may_be_had: false, pressure: Pressure::default() }
    }

    /// What was noted before says nothing of a share from which more may be had only now.
    pub(crate) fn set(&mut self, may_be_had: bool) {
        if may_be_had && !self.may_be_had {
            self.pressure = Pressure::default();
        }
        self.may_be_had = may_be_had;
    }

    /// Whether pressure is news.
    pub(crate) fn listens(&self, now: Moment) -> bool {
        self.may_be_had && self.pressure.is_heard(now) && self.bell.is_some()
    }

    /// Notes requests that seemed in time when they came, and are refused now that they should be sent.
    pub(crate) fn too_late(&mut self, requests: usize, now: Moment) {
        if self.listens(now) {
            self.pressure.too_late(requests);
        }
    }

    /// Notes a request that came now and should be answered at that moment, or that is tried at once.
    pub(crate) fn note(&mut self, answered: Option<Moment>, deadline: Moment, watch: Watch, now: Moment) {
        let Some(alarm) = self.pressure.note(answered, deadline, watch, now) else { return };
        if let Some(bell) = &self.bell {
            // Who decides is behind, or has ended: the next interval, or nobody, will see to it.
            bell.to.try_send(Pressed { model: bell.model, alarm }).ok();
        }
    }
}
