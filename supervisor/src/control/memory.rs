//! Whether there is memory for another worker.

use super::controller::Controller;
use super::incumbent::Incumbent;
use crate::partition::Room;

impl Controller {
    /// What another worker will take of its GPU's memory, and what there is of it. It takes what the
    /// one that serves has, else what one had before, else what the profile says. `None` where nothing
    /// is known, as on an emulated GPU.
    pub(super) fn room(&mut self) -> Option<Room> {
        let readings = self.context.readings.look();
        let usage = readings.get(self.model.gpu)?.reading.as_ref()?.usage.as_ref()?;
        if let Incumbent::Serving { worker } = self.incumbent
            && let Some(bytes) = self.pid(worker).and_then(|pid| usage.bytes_of(pid))
        {
            self.memory_seen = Some(bytes);
        }
        let memory = self.model.profile.as_ref().map(|profile| profile.memory);
        let told = memory
            .map(|memory| memory.context.saturating_add(memory.weights).saturating_add(memory.activations));
        let needed = self.memory_seen.or(told.filter(|bytes| *bytes > 0))?;
        Some(Room { needed, free: usage.memory.free })
    }
}
