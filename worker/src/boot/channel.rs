//! The boot channel to the supervisor.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use shadowslice_shared::boot::{BootRefusal, Order, PROTOCOL, WorkerSays};
use shadowslice_shared::frame;

use crate::clock::HungUp;
use crate::serve::ServeFault;

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error("no supervisor has given this program what it needs; `shadowslice serve` starts it")]
    Connect(#[source] crate::descriptors::AdoptError),
    #[error("it cannot run as its model's user")]
    User(#[source] std::io::Error),
    #[error("the supervisor is gone")]
    SupervisorGone,
    #[error("the worker cannot go on")]
    Refused(#[source] BootRefusal),
    #[error(transparent)]
    Serve(#[from] ServeFault),
}

impl From<HungUp> for WorkerError {
    fn from(_: HungUp) -> Self {
        Self::SupervisorGone
    }
}

#[derive(Debug)]
pub struct BootChannel(UnixStream);

impl BootChannel {
    pub(super) fn open(socket: OwnedFd) -> Result<Self, WorkerError> {
        let channel = Self(socket.into());
        channel.say(WorkerSays::Hello { protocol: PROTOCOL })?;
        Ok(channel)
    }

    pub(crate) fn say(&self, word: WorkerSays) -> Result<(), WorkerError> {
        frame::send(&self.0, &word).map_err(|_| WorkerError::SupervisorGone)
    }

    pub(super) fn refuse(&self, refusal: BootRefusal) -> WorkerError {
        match self.say(WorkerSays::Refused(refusal.clone())) {
            Ok(()) => WorkerError::Refused(refusal),
            Err(gone) => gone,
        }
    }

    pub(super) fn order(&self) -> Result<Order, WorkerError> {
        frame::receive(&self.0).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => self.out_of_step(),
            _ => WorkerError::SupervisorGone,
        })
    }

    pub(super) fn out_of_step(&self) -> WorkerError {
        let why = "an order was not the one expected; are supervisor and worker of the same version?";
        self.refuse(BootRefusal::Setup(why.to_owned()))
    }
}
