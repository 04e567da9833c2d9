//! The readings of the GPU's memory, for decisions about another worker or a warm standby.

use super::events::Controller;
use super::launch::LaunchError;
use super::standbys::{Beneficiary, FreeMemory, NoRoom};
use crate::backend::{GrantError, Room};
use crate::nvml;

impl Controller {
    /// Reads the GPU's memory, and records how much of it the workers use. Returns `None` if the driver
    /// does not report the memory.
    fn reading(&self) -> Option<nvml::Memory> {
        let readings = self.context.readings.look();
        let usage = readings.get(self.model.gpu)?.as_ref()?.usage.as_ref()?;
        self.account.measure(|pid| usage.bytes_of(pid));
        Some(usage.memory)
    }

    fn memory(&self) -> FreeMemory {
        match self.reading() {
            _ if !self.gpu.is_real() => FreeMemory::Emulated,
            None => FreeMemory::Unknown,
            Some(nvml::Memory { free, total, .. }) => {
                FreeMemory::Real { free: self.gpu.facts().unreserved(free), total }
            }
        }
    }

    /// Returns the memory that a worker needs and finds. Returns `None` if one of them is unknown, as
    /// on an emulated GPU without a limit.
    pub(super) fn room(&self) -> Option<Room> {
        let read = self.reading().map(|memory| memory.free);
        // Models sleep if a starting worker needs their memory.
        let available = self.context.residency.available(self.model.gpu);
        // Before the first start, the files show at least how large the weights are.
        let needed = self.account.need().or_else(|| available.map(|_| self.files.bytes()))?;
        Some(Room { needed, free: available.or(read)? })
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
        self.pipeline.await_memory();
        self.account.make_room(needed.saturating_sub(*free), Beneficiary::Worker)
    }
}
