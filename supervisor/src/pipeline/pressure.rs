//! Pressure: a request comes for which slack runs out, while more SMs may be had.

use std::time::Duration;

use shadowslice_shared::units::Moment;
use tokio::sync::mpsc;

/// Notices that may wait for who decides.
pub const PRESSURES: usize = 64;

/// How long a model that has given notice is not heard again.
const PAUSE: Duration = Duration::from_millis(10);

/// A model runs out of slack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pressed {
    /// Which.
    pub model: usize,
    /// When the request came that shows it.
    pub arrived: Moment,
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
    /// Whether more SMs may be had.
    stands: bool,
    quiet_until: Moment,
}

impl Relief {
    pub(crate) fn new(bell: Option<Bell>) -> Self {
        Self { bell, stands: false, quiet_until: Moment::default() }
    }

    pub(crate) fn set(&mut self, stands: bool) {
        self.stands = stands;
    }

    /// Whether running out of slack is news.
    pub(crate) fn listens(&self, now: Moment) -> bool {
        self.stands && now >= self.quiet_until && self.bell.is_some()
    }

    /// Slack runs out for a request that came now.
    pub(crate) fn press(&mut self, now: Moment) {
        self.quiet_until = now + PAUSE;
        if let Some(bell) = &self.bell {
            // Who decides is behind, or has ended: the next interval, or nobody, will see to it.
            bell.to.try_send(Pressed { model: bell.model, arrived: now }).ok();
        }
    }
}
