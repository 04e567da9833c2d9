//! The boot channel to the supervisor.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use shadowslice_shared::boot::{BootCommand, BootRefusal, BootReply, PROTOCOL};
use shadowslice_shared::frame;

use crate::clock::HungUp;
use crate::serve::ServeFault;

#[derive(Debug, thiserror::Error)]
pub enum Fault {
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

impl From<HungUp> for Fault {
    fn from(_: HungUp) -> Self {
        Self::SupervisorGone
    }
}

#[derive(Debug)]
pub struct Link(UnixStream);

impl Link {
    pub(super) fn open(socket: OwnedFd) -> Result<Self, Fault> {
        let link = Self(socket.into());
        link.say(BootReply::Hello { protocol: PROTOCOL })?;
        Ok(link)
    }

    pub(crate) fn say(&self, word: BootReply) -> Result<(), Fault> {
        frame::send(&self.0, &word).map_err(|_| Fault::SupervisorGone)
    }

    pub(super) fn refuse(&self, refusal: BootRefusal) -> Fault {
        match self.say(BootReply::Refused(refusal.clone())) {
            Ok(()) => Fault::Refused(refusal),
            Err(gone) => gone,
        }
    }

    pub(super) fn order(&self) -> Result<BootCommand, Fault> {
        frame::receive(&self.0).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => self.out_of_step(),
            _ => Fault::SupervisorGone,
        })
    }

    pub(super) fn out_of_step(&self) -> Fault {
        let why = "an order was not the one expected; are supervisor and worker of the same version?";
        self.refuse(BootRefusal::Setup(why.to_owned()))
    }
}
