//! The readings of the GPU's memory, for decisions about another worker or a warm standby.

use super::events::Controller;
use super::launch::LaunchError;
use super::memory::Memory;
use super::standbys::NoRoom;
use crate::backend::{GrantError, Room};
use shadowslice_config::GpuConfig;

impl Controller {
    fn memory(&self) -> Memory {
        let readings = self.context.readings.look();
        let Some(watched) = readings.get(self.model.gpu) else { return Memory::Unknown };
        if matches!(watched.gpu, GpuConfig::Emulated { .. }) {
            return Memory::Emulated;
        }
        let usage = watched.reading.as_ref().and_then(|reading| reading.usage.as_ref());
        let Some(usage) = usage else { return Memory::Unknown };
        self.account.measure(|pid| usage.bytes_of(pid));
        let free = self.gpu.usage().unreserved(usage.memory.free);
        Memory::Real { free, total: usage.memory.total }
    }

    /// Returns the memory that a worker needs and finds. Returns `None` if one of them is unknown, as
    /// on an emulated GPU.
    pub(super) fn room(&self) -> Option<Room> {
        let readings = self.context.readings.look();
        let usage = readings.get(self.model.gpu)?.reading.as_ref()?.usage.as_ref()?;
        self.account.measure(|pid| usage.bytes_of(pid));
        Some(Room { needed: self.account.need()?, free: usage.memory.free })
    }

    /// Checks that there is memory for a standby. `is_running` is true if a running worker is to become
    /// the standby.
    pub(super) fn room_to_stand(&self, is_running: bool) -> Result<(), NoRoom> {
        self.account.may_stand(self.memory(), is_running, self.now())
    }

    /// Makes standbys yield to a worker that found too little memory. Returns true if memory will become
    /// free.
    pub(super) fn make_room(&self, error: &LaunchError) -> bool {
        let LaunchError::Grant(GrantError::NoMemory { needed, free }) = error else { return false };
        self.account.make_room(needed.saturating_sub(*free))
    }
}
