//! The emulated GPU. Workers share its SMs through a pool in shared memory.

use parking_lot::Mutex;
use rustix::thread::futex;
use shadowslice_shared::boot::{DeviceSpec, PRIORITY_VARIABLE, SHARE_VARIABLE};
use shadowslice_shared::contention::ClientPriority;
use shadowslice_shared::groups::Division;
use shadowslice_shared::pool::{Pool, SEATS};
use shadowslice_shared::slab::SlabError;
use shadowslice_shared::units::{Percent, Sms};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::{BackendFacts, BackendKind, GpuBackend, GrantError, GrantRequest, Lease, Variables};

/// An emulated GPU, whose leases are seats.
#[derive(Debug)]
pub struct EmulatedBackend {
    facts: BackendFacts,
    pool: Pool,
    taken: Mutex<BTreeSet<u32>>,
}

impl EmulatedBackend {
    pub fn new(sms: Sms) -> Result<Self, SlabError> {
        let division = Division::of(sms).map(Arc::new);
        let division = division.ok_or_else(|| {
            "the emulated GPU has too few or too many SMs to be divided into groups".to_owned()
        });
        let device = "emulated".to_owned();
        let facts = BackendFacts::new(device, None, BackendKind::Emulated, sms, division);
        Ok(Self { facts, pool: Pool::create()?, taken: Mutex::default() })
    }
}

fn seat(lease: Lease) -> u32 {
    u32::try_from(lease.0).unwrap_or(u32::MAX)
}

impl GpuBackend for EmulatedBackend {
    fn facts(&self) -> &BackendFacts {
        &self.facts
    }

    fn sms(&self, share: Percent) -> Sms {
        share.sms_of(self.facts.sms)
    }

    fn enter(&self, _joins: bool) -> Result<Lease, GrantError> {
        let mut taken = self.taken.lock();
        let number = (0..SEATS).find(|seat| !taken.contains(seat)).ok_or(GrantError::NoSeat)?;
        taken.insert(number);
        Ok(Lease(u64::from(number)))
    }

    fn leave(&self, lease: Lease, _joins: bool) {
        let seat = seat(lease);
        self.pool.occupy(seat, None);
        let everyone = i32::MAX.unsigned_abs();
        if let Err(error) = futex::wake(self.pool.generation(), futex::Flags::empty(), everyone) {
            tracing::warn!(
                %error,
                "cannot wake emulated workers that wait for SMs; they continue when the next batch ends"
            );
        }
        self.taken.lock().remove(&seat);
    }

    fn environment(&self, wanted: &GrantRequest) -> Variables {
        let priority = ClientPriority::of(wanted.priority) as u32;
        vec![(SHARE_VARIABLE, wanted.share.get().to_string()), (PRIORITY_VARIABLE, priority.to_string())]
    }

    fn device(&self, lease: Lease) -> DeviceSpec {
        DeviceSpec::Emulated { sms: self.facts.sms, seat: seat(lease) }
    }

    fn pool(&self) -> Option<BorrowedFd<'_>> {
        Some(self.pool.as_fd())
    }

    fn admit(&self, wanted: &GrantRequest, _pid: i32, found: Sms) -> Result<(), String> {
        let expected = self.sms(wanted.share);
        if found == expected {
            Ok(())
        } else {
            Err(format!("the worker found {found} instead of {expected}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::boot::WorkerPurpose;
    use shadowslice_shared::contention::Occupant;

    use super::super::Grant;
    use super::*;

    #[test]
    fn a_dead_workers_sms_and_seat_come_back() {
        let emulated = Arc::new(EmulatedBackend::new(Sms(132)).unwrap());
        let gpu: Arc<dyn GpuBackend> = emulated.clone();
        let wanted = GrantRequest {
            share: Percent::new(30).unwrap(),
            priority: 1,
            memory_limit: None,
            room: None,
            joins: false,
        };
        let grant = || Grant::of(&gpu, wanted, WorkerPurpose::Serve).unwrap();
        let (first, second) = (grant(), grant());
        assert_eq!(first.sms(), Sms(38));
        assert_ne!(first.device(), second.device());
        let DeviceSpec::Emulated { seat, .. } = first.device() else { panic!("an emulated device") };
        emulated.pool.occupy(seat, Some(Occupant::anywhere(Sms(38))));
        let device = first.device();
        drop(first);
        assert_eq!(emulated.pool.sms_in_use(), 0);
        assert_eq!(grant().device(), device);
    }
}
