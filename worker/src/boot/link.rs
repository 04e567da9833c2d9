//! The boot channel to the supervisor.

use ipc_channel::IpcError;
use ipc_channel::ipc::{self, IpcReceiver, IpcSender};
use shadowslice_shared::boot::{BootRefusal, Order, PROTOCOL, WorkerSays};

use crate::clock::HungUp;
use crate::serve::ServeFault;

#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error("the supervisor cannot be reached")]
    Connect(#[source] std::io::Error),
    #[error("a channel for the supervisor's orders cannot be made")]
    Channel(#[source] std::io::Error),
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
pub(super) struct Link {
    supervisor: IpcSender<WorkerSays>,
    orders: IpcReceiver<Order>,
}

impl Link {
    pub(super) fn connect(server: String) -> Result<Self, Fault> {
        let supervisor = IpcSender::connect(server).map_err(Fault::Connect)?;
        let (order_here, orders) = ipc::channel().map_err(Fault::Channel)?;
        let link = Self { supervisor, orders };
        link.say(WorkerSays::Hello { protocol: PROTOCOL, orders: order_here })?;
        Ok(link)
    }

    pub(super) fn say(&self, word: WorkerSays) -> Result<(), Fault> {
        self.supervisor.send(word).map_err(|_| Fault::SupervisorGone)
    }

    pub(super) fn refuse(&self, refusal: BootRefusal) -> Fault {
        match self.say(WorkerSays::Refused(refusal.clone())) {
            Ok(()) => Fault::Refused(refusal),
            Err(gone) => gone,
        }
    }

    pub(super) fn order(&self) -> Result<Order, Fault> {
        self.orders.recv().map_err(|fault| match fault {
            IpcError::Disconnected | IpcError::Io(_) => Fault::SupervisorGone,
            IpcError::SerializationError(_) => self.out_of_step(),
        })
    }

    pub(super) fn out_of_step(&self) -> Fault {
        let why = "an order was not the one expected; are supervisor and worker of the same version?";
        self.refuse(BootRefusal::Setup(why.to_owned()))
    }
}
