//! A controller's side of the GPU's memory: whether there is room for another worker, and for one
//! that only stands ready.

use super::events::Controller;
use super::launch::LaunchError;
use super::memory::{EntryId, Memory, NoRoom};
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
        self.ledger.see(|pid| usage.bytes_of(pid));
        let free = self.gpu.usage().unreserved(usage.memory.free);
        Memory::Real { free, total: usage.memory.total }
    }

    /// `None` where the need or the free memory is not known, as on an emulated GPU.
    pub(super) fn room(&self) -> Option<Room> {
        let readings = self.context.readings.look();
        let usage = readings.get(self.model.gpu)?.reading.as_ref()?.usage.as_ref()?;
        self.ledger.see(|pid| usage.bytes_of(pid));
        Some(Room { needed: self.ledger.need(&self.model.name)?, free: usage.memory.free })
    }

    /// Whether memory allows a worker that stands ready; `there`: it is one that runs already.
    pub(super) fn room_to_stand(&self, there: bool) -> Result<(), NoRoom> {
        self.ledger.may_stand(self.entry(), self.memory(), there, self.now())
    }

    /// What the controller is called in the ledger.
    pub(super) fn entry(&self) -> (&str, EntryId) {
        (&self.model.name, self.entry)
    }

    pub(super) fn note_standing(&self, stands: bool) {
        self.ledger.stands(self.entry(), stands, self.now());
    }

    /// A worker found no memory: calls in what stands ready. True if some will be free before long.
    pub(super) fn make_room(&self, error: &LaunchError) -> bool {
        let LaunchError::Grant(GrantError::NoMemory { needed, free }) = error else { return false };
        self.ledger.call_in(&self.model.name, needed.saturating_sub(*free))
    }
}
