//! Partitioning: from a share to what a new worker's surroundings must say.
//!
//! Today the one backend is the emulated GPU, whose workers share its SMs through a
//! [pool](shadowslice_shared::pool) in memory.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use rustix::thread::futex;
use shadowslice_shared::boot::{DeviceSpec, SHARE_VARIABLE, descriptors};
use shadowslice_shared::pool::{Pool, SEATS};
use shadowslice_shared::slab::SlabError;
use shadowslice_shared::units::{Percent, Sms};

use crate::pipeline::Crowding;
use crate::process::Inherited;

/// Every seat of an emulated GPU is taken.
#[derive(Debug, thiserror::Error)]
#[error("the emulated GPU has {SEATS} workers already; stop some models")]
pub struct NoSeat;

/// An emulated GPU.
#[derive(Debug)]
pub struct EmulatedGpu {
    sms: Sms,
    pool: Pool,
    taken: Mutex<BTreeSet<u32>>,
    crowding: Crowding,
}

impl EmulatedGpu {
    /// A GPU of `sms` SMs that nobody uses.
    pub fn new(sms: Sms) -> Result<Arc<Self>, SlabError> {
        Ok(Arc::new(Self {
            sms,
            pool: Pool::create()?,
            taken: Mutex::default(),
            crowding: Crowding::default(),
        }))
    }

    /// The SMs that a worker with this share gets.
    pub fn sms(&self, share: Percent) -> Sms {
        share.sms_of(self.sms)
    }

    /// The shares of all its workers, added up.
    pub fn crowding(&self) -> Crowding {
        Arc::clone(&self.crowding)
    }

    /// Room for one more worker, with this share.
    pub fn grant(self: &Arc<Self>, share: Percent) -> Result<Grant, NoSeat> {
        let mut taken = self.taken.lock();
        let number = (0..SEATS).find(|seat| !taken.contains(seat)).ok_or(NoSeat)?;
        taken.insert(number);
        self.crowding.fetch_add(share.get(), Ordering::Relaxed);
        Ok(Grant { gpu: Arc::clone(self), seat: number, share })
    }
}

/// A worker's part of a GPU. To be dropped when the worker is dead and not before: what the worker
/// held then comes back.
#[derive(Debug)]
pub struct Grant {
    gpu: Arc<EmulatedGpu>,
    seat: u32,
    share: Percent,
}

impl Grant {
    /// What the worker's environment must say.
    pub fn environment(&self) -> [(&'static str, String); 1] {
        [(SHARE_VARIABLE, self.share.get().to_string())]
    }

    /// What the worker is told about its device.
    pub fn device(&self) -> DeviceSpec {
        DeviceSpec::Emulated { sms: self.gpu.sms, seat: self.seat }
    }

    /// The SMs that the worker must find.
    pub fn sms(&self) -> Sms {
        self.gpu.sms(self.share)
    }

    /// What the worker must inherit.
    pub fn inherited(&self) -> Inherited<'_> {
        Inherited { number: descriptors::POOL, file: self.gpu.pool.as_fd() }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.gpu.pool.occupy(self.seat, Sms(0));
        let everyone = i32::MAX.unsigned_abs();
        if let Err(error) = futex::wake(self.gpu.pool.generation(), futex::Flags::empty(), everyone) {
            tracing::warn!(%error, "workers were not told that SMs are free again; they find out when a batch ends");
        }
        self.gpu.crowding.fetch_sub(self.share.get(), Ordering::Relaxed);
        self.gpu.taken.lock().remove(&self.seat);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_workers_sms_and_seat_come_back() {
        let gpu = EmulatedGpu::new(Sms(132)).unwrap();
        let share = Percent::new(30).unwrap();
        let first = gpu.grant(share).unwrap();
        let second = gpu.grant(share).unwrap();
        assert_eq!(first.sms(), Sms(38));
        assert_ne!(first.device(), second.device());
        gpu.pool.occupy(first.seat, Sms(38));
        let device = first.device();
        drop(first);
        assert_eq!(gpu.pool.in_use(), 0);
        assert_eq!(gpu.grant(share).unwrap().device(), device);
    }
}
