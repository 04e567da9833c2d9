//! The part of a GPU that a worker uses.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shadowslice_datapath::pipeline::OccupancyGuard;
use shadowslice_shared::boot::{DeviceSpec, WorkerPurpose, descriptors};
use shadowslice_shared::units::Sms;

use super::{GpuBackend, GrantError, GrantRequest, Lease, Room, VISIBLE, Variables, Wait};
use crate::process::InheritedFile;

/// A worker's part of a GPU. [Give it back](Grant::give_back) only after the worker has exited.
#[derive(Debug)]
pub struct Grant {
    gpu: Arc<dyn GpuBackend>,
    wanted: GrantRequest,
    /// The lease, or `None` for a worker that must not use the GPU.
    lease: Option<Lease>,
    /// The memory that is reserved until the worker has allocated it.
    reservation: Option<Reservation>,
}

/// A reservation of memory for a worker. Dropping this ends the reservation.
#[derive(Debug)]
struct Reservation {
    reserved: Arc<AtomicU64>,
    bytes: u64,
}

impl Reservation {
    /// Reserves memory. Returns an error if too little is free after all other reservations.
    fn of(gpu: &dyn GpuBackend, Room { needed, free }: Room) -> Result<Self, GrantError> {
        let reserved = &gpu.facts().reserved;
        let others = reserved.fetch_add(needed, Ordering::Relaxed);
        let reservation = Self { reserved: Arc::clone(reserved), bytes: needed };
        let free = free.saturating_sub(others);
        if needed <= free { Ok(reservation) } else { Err(GrantError::NoMemory { needed, free }) }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.reserved.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Grant {
    /// Grants a worker its part of the GPU. A worker that computes the reference answers on the CPU
    /// gets no part.
    pub fn of(
        gpu: &Arc<dyn GpuBackend>,
        wanted: GrantRequest,
        purpose: WorkerPurpose,
    ) -> Result<Self, GrantError> {
        let (lease, reservation) = match purpose {
            WorkerPurpose::Reference => (None, None),
            WorkerPurpose::Serve | WorkerPurpose::DeviceReference => {
                let room = wanted.room.map(|room| Reservation::of(&**gpu, room)).transpose()?;
                (Some(gpu.enter()?), room)
            }
        };
        Ok(Self { gpu: Arc::clone(gpu), wanted, lease, reservation })
    }

    /// Counts the worker as executing, because a worker executes while it warms up.
    pub fn occupy(&self) -> Option<OccupancyGuard> {
        self.lease.map(|_| self.gpu.facts().occupancy.occupy(self.wanted.share))
    }

    pub fn environment(&self) -> Variables {
        match self.lease {
            Some(_) => self.gpu.environment(&self.wanted),
            None => vec![(VISIBLE, String::new())],
        }
    }

    pub fn device(&self) -> DeviceSpec {
        self.gpu.device(self.lease.unwrap_or(Lease(0)))
    }

    pub fn sms(&self) -> Sms {
        self.gpu.sms(self.wanted.share)
    }

    pub fn inherited(&self) -> Option<InheritedFile<'_>> {
        let file = self.lease.and_then(|_| self.gpu.pool())?;
        Some(InheritedFile { number: descriptors::POOL, file })
    }

    /// Returns the check of the worker's device, or `None` if the worker does not use the GPU. The
    /// worker's memory is reserved until the [`DeviceCheck`] is dropped.
    pub fn check(&mut self, pid: i32) -> Option<DeviceCheck> {
        self.lease?;
        let reservation = self.reservation.take();
        Some(DeviceCheck { gpu: Arc::clone(&self.gpu), wanted: self.wanted, pid, _reservation: reservation })
    }

    /// Ends the worker's GPU work before a kill, so that the kill does not interrupt a kernel.
    /// Returns a future to wait for.
    pub fn terminate(&self, pid: i32) -> Option<Wait> {
        self.lease.and_then(|_| self.gpu.terminate(pid))
    }

    /// Waits until the worker has certainly lost its GPU context.
    pub async fn lost(&self) {
        match self.lease.and_then(|lease| self.gpu.lost(lease)) {
            Some(lost) => lost.await,
            None => std::future::pending().await,
        }
    }

    /// Gives the grant back after the worker has exited. If the GPU does not notice the exit
    /// immediately, the grant counts until it does.
    pub fn give_back(self, pid: i32) {
        if let Some(departed) = self.lease.and_then(|_| self.gpu.departed(pid)) {
            tokio::spawn(async move {
                departed.await;
                drop(self);
            });
        }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if let Some(lease) = self.lease {
            self.gpu.leave(lease);
        }
    }
}

/// The check that a worker runs on the granted part of the GPU.
#[derive(Debug)]
pub struct DeviceCheck {
    gpu: Arc<dyn GpuBackend>,
    wanted: GrantRequest,
    pid: i32,
    _reservation: Option<Reservation>,
}

impl DeviceCheck {
    /// Checks the SMs that the worker found. This function may block.
    pub fn run(&self, found: Sms) -> Result<(), String> {
        self.gpu.admit(&self.wanted, self.pid, found)
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::units::Percent;

    use super::super::EmulatedBackend;
    use super::*;

    #[test]
    fn memory_is_kept_for_a_worker_until_it_is_warm() {
        let gpu: Arc<dyn GpuBackend> = Arc::new(EmulatedBackend::new(Sms(132)).unwrap());
        let grant = |needed, purpose| {
            let room = Some(Room { needed, free: 10 << 30 });
            Grant::of(
                &gpu,
                GrantRequest { share: Percent::WHOLE, priority: 1, memory_limit: None, room },
                purpose,
            )
        };
        let mut first = grant(6 << 30, WorkerPurpose::Serve).unwrap();
        let refused = grant(5 << 30, WorkerPurpose::Serve).unwrap_err();
        assert_eq!(refused, GrantError::NoMemory { needed: 5 << 30, free: 4 << 30 });
        assert!(
            refused.to_string().contains("needs 5.0 GiB of GPU memory, and 4.0 GiB are free"),
            "{refused}"
        );
        assert!(grant(5 << 30, WorkerPurpose::Reference).is_ok(), "it takes none of the GPU's");
        assert!(grant(4 << 30, WorkerPurpose::Serve).is_ok(), "a refusal keeps nothing");
        let check = first.check(1);
        assert!(grant(5 << 30, WorkerPurpose::Serve).is_err());
        // A warm worker has taken its memory, so the next reading of free memory shows that.
        drop(check);
        assert!(grant(5 << 30, WorkerPurpose::Serve).is_ok());
    }
}
