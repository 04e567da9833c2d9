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
    /// The memory in bytes that is reserved until the worker has allocated it.
    reserved: AtomicU64,
}

impl Grant {
    /// Grants a worker its part of the GPU. A worker that computes the reference answers on the CPU
    /// gets no part.
    pub fn of(
        gpu: &Arc<dyn GpuBackend>,
        wanted: GrantRequest,
        purpose: WorkerPurpose,
    ) -> Result<Self, GrantError> {
        let mut grant = Self { gpu: Arc::clone(gpu), wanted, lease: None, reserved: AtomicU64::new(0) };
        if purpose == WorkerPurpose::Reference {
            return Ok(grant);
        }
        if let Some(room) = wanted.room {
            grant.reserve(room)?;
        }
        grant.lease = Some(gpu.enter(wanted.joins)?);
        Ok(grant)
    }

    /// Reserves memory. Returns an error if too little is free after all other reservations.
    fn reserve(&mut self, Room { needed, free }: Room) -> Result<(), GrantError> {
        self.reserved = AtomicU64::new(needed);
        let others = self.gpu.facts().reserved.fetch_add(needed, Ordering::Relaxed);
        let free = free.saturating_sub(others);
        if needed <= free { Ok(()) } else { Err(GrantError::NoMemory { needed, free }) }
    }

    /// Ends the reservation of memory, because the worker has allocated its memory or needs none.
    pub fn end_reservation(&self) {
        let reserved = self.reserved.swap(0, Ordering::Relaxed);
        self.gpu.facts().reserved.fetch_sub(reserved, Ordering::Relaxed);
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

    /// Checks that the worker runs on the granted part, with the SMs that it found. May block.
    pub fn check(&self, pid: i32, found: Sms) -> Result<(), String> {
        if self.lease.is_none() { Ok(()) } else { self.gpu.admit(&self.wanted, pid, found) }
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
    pub fn give_back(self: Arc<Self>, pid: i32) {
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
        self.end_reservation();
        if let Some(lease) = self.lease {
            self.gpu.leave(lease, self.wanted.joins);
        }
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
                GrantRequest { share: Percent::WHOLE, priority: 1, memory_limit: None, room, joins: false },
                purpose,
            )
        };
        let first = grant(6 << 30, WorkerPurpose::Serve).unwrap();
        let refused = grant(5 << 30, WorkerPurpose::Serve).unwrap_err();
        assert_eq!(refused, GrantError::NoMemory { needed: 5 << 30, free: 4 << 30 });
        assert!(
            refused.to_string().contains("needs 5.0 GiB of GPU memory, and 4.0 GiB are free"),
            "{refused}"
        );
        assert!(grant(5 << 30, WorkerPurpose::Reference).is_ok(), "it takes none of the GPU's");
        assert!(grant(4 << 30, WorkerPurpose::Serve).is_ok(), "a refusal keeps nothing");
        assert!(grant(5 << 30, WorkerPurpose::Serve).is_err());
        // A warm worker has taken its memory, so the next reading of free memory shows that.
        first.end_reservation();
        assert!(grant(5 << 30, WorkerPurpose::Serve).is_ok());
    }
}
