//! The channel between supervisor and worker during the boot. The supervisor sends orders on it,
//! and the worker sends reports.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use nix::unistd::gettid;
use shadowslice_shared::boot::{BootCommand, BootRefusal, BootReply, PROTOCOL};
use shadowslice_shared::frame;

use crate::clock::HungUp;
use crate::serve::ServeError;

/// The reasons why a worker exits before it has finished its work.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(
        "cannot take over the supervisor's descriptors; install both programs from one build; do not \
         start this program yourself"
    )]
    Connect(#[source] crate::descriptors::AdoptError),
    #[error(
        "cannot run this worker as its model's user; give the supervisor CAP_SETUID and CAP_SETGID, or remove \
         workers.users"
    )]
    User(#[source] std::io::Error),
    #[error("the supervisor has exited, so this worker exits")]
    SupervisorGone,
    #[error("this worker exits before it serves")]
    Refused(#[source] BootRefusal),
    #[error(transparent)]
    Serve(#[from] ServeError),
}

impl From<HungUp> for WorkerError {
    fn from(_: HungUp) -> Self {
        Self::SupervisorGone
    }
}

/// The socket between supervisor and worker during the boot.
#[derive(Debug)]
pub struct BootChannel(UnixStream);

impl BootChannel {
    pub(super) fn open(socket: OwnedFd) -> Result<Self, WorkerError> {
        let channel = Self(socket.into());
        let thread = gettid().as_raw();
        channel.send(BootReply::Hello { protocol: PROTOCOL, thread })?;
        Ok(channel)
    }

    pub(crate) fn send(&self, message: BootReply) -> Result<(), WorkerError> {
        frame::send(&self.0, &message).map_err(|_| WorkerError::SupervisorGone)
    }

    pub(super) fn refuse(&self, refusal: BootRefusal) -> WorkerError {
        match self.send(BootReply::Refused(refusal.clone())) {
            Ok(()) => WorkerError::Refused(refusal),
            Err(error) => error,
        }
    }

    pub(super) fn receive_order(&self) -> Result<BootCommand, WorkerError> {
        frame::receive(&self.0).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => self.refuse_unexpected_order(),
            _ => WorkerError::SupervisorGone,
        })
    }

    pub(super) fn refuse_unexpected_order(&self) -> WorkerError {
        let why =
            "unexpected order from the supervisor; install a supervisor and a worker of the same version";
        self.refuse(BootRefusal::Setup(why.to_owned()))
    }
}
