//! The boot channel to the supervisor.

use ipc_channel::IpcError;
use ipc_channel::ipc::{self, IpcReceiver, IpcSender};
use shadowslice_shared::boot::{BootRefusal, Order, PROTOCOL, WorkerSays};

use crate::clock::HungUp;
use crate::serve::ServeFault;

/// Why a worker ended early.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The server name leads nowhere.
    #[error("the supervisor cannot be reached")]
    Connect(#[source] std::io::Error),
    /// The channel for its orders could not be made.
    #[error("a channel for the supervisor's orders cannot be made")]
    Channel(#[source] std::io::Error),
    /// The supervisor closed its end, or died.
    #[error("the supervisor is gone")]
    SupervisorGone,
    /// The worker cannot do what it was ordered to, and has said so.
    #[error("the worker cannot go on")]
    Refused(#[source] BootRefusal),
    /// Serving failed.
    #[error(transparent)]
    Serve(#[from] ServeFault),
}

impl From<HungUp> for Fault {
    fn from(_: HungUp) -> Self {
        Self::SupervisorGone
    }
}

/// Messages to the supervisor, and its orders.
#[derive(Debug)]
pub(super) struct Link {
    supervisor: IpcSender<WorkerSays>,
    orders: IpcReceiver<Order>,
}

impl Link {
    /// Says hello to a one-shot server.
    pub(super) fn connect(server: String) -> Result<Self, Fault> {
        let supervisor = IpcSender::connect(server).map_err(Fault::Connect)?;
        let (order_here, orders) = ipc::channel().map_err(Fault::Channel)?;
        let link = Self { supervisor, orders };
        link.say(WorkerSays::Hello { protocol: PROTOCOL, orders: order_here })?;
        Ok(link)
    }

    /// Sends a message.
    pub(super) fn say(&self, word: WorkerSays) -> Result<(), Fault> {
        self.supervisor.send(word).map_err(|_| Fault::SupervisorGone)
    }

    /// Says why the worker cannot go on.
    pub(super) fn refuse(&self, refusal: BootRefusal) -> Fault {
        match self.say(WorkerSays::Refused(refusal.clone())) {
            Ok(()) => Fault::Refused(refusal),
            Err(gone) => gone,
        }
    }

    /// Waits for the next order; the wait ends if the supervisor ends.
    pub(super) fn order(&self) -> Result<Order, Fault> {
        self.orders.recv().map_err(|fault| match fault {
            IpcError::Disconnected | IpcError::Io(_) => Fault::SupervisorGone,
            IpcError::SerializationError(_) => self.out_of_step(),
        })
    }

    /// Refuses an order that makes no sense now.
    pub(super) fn out_of_step(&self) -> Fault {
        let why = "an order was not the one expected; are supervisor and worker of the same version?";
        self.refuse(BootRefusal::Setup(why.to_owned()))
    }
}
