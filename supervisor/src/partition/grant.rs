//! A worker's part of a GPU.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use shadowslice_shared::boot::{DeviceSpec, Purpose, descriptors};
use shadowslice_shared::units::Sms;

use super::{Environment, GrantError, Partition, Ticket, VISIBLE, Wait, Wanted};
use crate::process::Inherited;

/// A worker's part of a GPU, to be [given back](Grant::give_back) when it is dead and not before.
#[derive(Debug)]
pub struct Grant {
    gpu: Arc<dyn Partition>,
    wanted: Wanted,
    /// None for a worker that must not touch the GPU.
    ticket: Option<Ticket>,
}

impl Grant {
    /// Room for one more worker. One that computes the reference answers does so on the CPU, and gets
    /// nothing of the GPU.
    pub fn of(gpu: &Arc<dyn Partition>, wanted: Wanted, purpose: Purpose) -> Result<Self, GrantError> {
        let ticket = match purpose {
            Purpose::Reference => None,
            Purpose::Serve => Some(gpu.enter()?),
        };
        let grant = Self { gpu: Arc::clone(gpu), wanted, ticket };
        gpu.crowding().fetch_add(grant.claim(), Ordering::Relaxed);
        Ok(grant)
    }

    fn claim(&self) -> u32 {
        self.ticket.map_or(0, |_| self.gpu.claim(self.wanted.share).get())
    }

    /// What the worker's environment must say.
    pub fn environment(&self) -> Environment {
        match self.ticket {
            Some(_) => self.gpu.environment(&self.wanted),
            None => vec![(VISIBLE, String::new())],
        }
    }

    /// What the worker is told about its device.
    pub fn device(&self) -> DeviceSpec {
        self.gpu.device(self.ticket.unwrap_or(Ticket(0)))
    }

    /// The SMs that come with its share.
    pub fn sms(&self) -> Sms {
        self.gpu.sms(self.wanted.share)
    }

    /// What the worker must inherit.
    pub fn inherited(&self) -> Option<Inherited<'_>> {
        let file = self.ticket.and_then(|_| self.gpu.pool())?;
        Some(Inherited { number: descriptors::POOL, file })
    }

    /// What the worker must prove before it serves; nothing if it does not touch the GPU.
    pub fn admission(&self, pid: i32) -> Option<Admission> {
        self.ticket?;
        Some(Admission { gpu: Arc::clone(&self.gpu), wanted: self.wanted, pid })
    }

    /// Before a kill: something to wait for, so that no kernel is cut.
    pub fn terminate(&self, pid: i32) -> Option<Wait> {
        self.ticket.and_then(|_| self.gpu.terminate(pid))
    }

    /// Ends when the worker has surely lost its context.
    pub async fn lost(&self) {
        match self.ticket.and_then(|ticket| self.gpu.lost(ticket)) {
            Some(lost) => lost.await,
            None => std::future::pending().await,
        }
    }

    /// The worker has exited. Where the GPU takes a while to notice, the grant counts until then.
    pub fn give_back(self, pid: i32) {
        if let Some(departed) = self.ticket.and_then(|_| self.gpu.departed(pid)) {
            tokio::spawn(async move {
                departed.await;
                drop(self);
            });
        }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.gpu.crowding().fetch_sub(self.claim(), Ordering::Relaxed);
        if let Some(ticket) = self.ticket {
            self.gpu.leave(ticket);
        }
    }
}

/// What is asked of a worker before it serves.
#[derive(Debug)]
pub struct Admission {
    gpu: Arc<dyn Partition>,
    wanted: Wanted,
    pid: i32,
}

impl Admission {
    /// Whether a worker that has found `found` SMs may serve; else why not. May block.
    pub fn check(&self, found: Sms) -> Result<(), String> {
        self.gpu.admit(&self.wanted, self.pid, found)
    }
}
