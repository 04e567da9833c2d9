//! The previous supervisor, from the point of view of the next one.
#![allow(unsafe_code)] // adopting descriptors that this process was started with

use std::io::{self, BufRead, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use tokio::io::BufReader;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::messages::{
    DESCRIPTOR_VARIABLE, FinalState, HandoverState, Instruction, MAX_LINE, Progress, described, line,
    receive, send,
};
use shadowslice_control::backend::MpsHandover;
use shadowslice_control::models::{PersistedState, Registry};
use shadowslice_datapath::sockets::Inherited;

/// The time within which the predecessor must send its state.
const STATE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Predecessor {
    channel: UnixStream,
    pub run_dir: PathBuf,
    pub lock: Option<OwnedFd>,
    pub relay: Option<OwnedFd>,
    pub sockets: Inherited,
    pub mps: Vec<MpsHandover>,
}

impl Predecessor {
    /// Returns the predecessor, or `None` if this process was not started to take over. Must be called
    /// once, before any descriptor is opened.
    pub fn find() -> io::Result<Option<Self>> {
        let Some(number) = std::env::var(DESCRIPTOR_VARIABLE).ok() else { return Ok(None) };
        let number = number.parse().map_err(io::Error::other)?;
        let channel = UnixStream::from(own(number)?);
        channel.set_read_timeout(Some(STATE_TIMEOUT))?;
        let mut line = Vec::new();
        // The predecessor sends nothing else before this process replies, so the reader takes no more.
        io::BufReader::new(&channel).take(MAX_LINE).read_until(b'\n', &mut line)?;
        let HandoverState { run_dir, lock, relay, sockets, mps } = serde_json::from_slice(&line)?;
        let mut inherited = Inherited::default();
        for (address, number) in sockets {
            inherited.insert(address, own(number)?);
        }
        let (lock, relay) = (Some(own(lock)?), Some(own(relay)?));
        Ok(Some(Self { channel, run_dir, lock, relay, sockets: inherited, mps }))
    }

    /// Tells the predecessor that this supervisor fails.
    pub fn failed(&self, why: &str) {
        if let Ok(line) = line(&Progress::Failed(why.to_owned())) {
            // If this fails, the predecessor notices the exit.
            (&self.channel).write_all(&line).ok();
        }
    }

    /// Starts the conversation. Cancels `gone` when the predecessor has exited.
    pub fn converse(self, gone: CancellationToken, registry: Registry) -> io::Result<Conversation> {
        self.channel.set_nonblocking(true)?;
        let (read, write) = tokio::net::UnixStream::from_std(self.channel)?.into_split();
        let (instructions_tx, instructions_rx) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut read = BufReader::new(read);
            while let Some(instruction) = hear(&mut read).await {
                // The receiver may be gone, but the end of the socket must still be noticed.
                instructions_tx.send(instruction).await.ok();
            }
            gone.cancel();
        });
        Ok(Conversation { write, instructions_rx, registry })
    }
}

/// Returns the next instruction, or `None` if the predecessor has exited.
async fn hear(read: &mut BufReader<OwnedReadHalf>) -> Option<Instruction> {
    let unclear = |error: &io::Error| {
        if error.kind() == io::ErrorKind::InvalidData {
            tracing::error!(%error, "cannot understand a message of the previous supervisor, probably because its version is too old; this supervisor serves alone; check that the previous supervisor exits, and stop it if not");
        }
    };
    receive(read).await.inspect_err(unclear).ok().flatten()
}

/// The conversation with a predecessor that still serves.
#[derive(Debug)]
pub struct Conversation {
    write: OwnedWriteHalf,
    instructions_rx: mpsc::Receiver<Instruction>,
    registry: Registry,
}

impl Conversation {
    /// Takes over the models one by one. Returns when this supervisor should accept connections, with
    /// `None` if its predecessor has died.
    pub async fn take_over(&mut self, state: &PersistedState) -> Option<FinalState> {
        let (broken, whole): (Vec<_>, Vec<_>) =
            self.registry.not_started().into_iter().partition(|model| model.broken.is_some());
        // The predecessor hears of models that cannot start before any model moves.
        for model in &broken {
            if !self.reported(&model.name, Value::Null, model.broken.clone()).await {
                return self.alone();
            }
        }
        for name in state.upgrade_order(whole.iter().map(|model| &*model.name)) {
            let registry = self.registry.clone();
            let (served, outcome) = tokio::select! {
                begun = registry.begin(name) => begun,
                // The predecessor only speaks now if it takes models back.
                _ = self.instruction() => return self.alone(),
            };
            let described = served.as_ref().map(described).unwrap_or_default();
            if !self.reported(name, described, outcome.err()).await {
                return self.alone();
            }
        }
        self.registry.begin_all();
        send(&mut self.write, &Progress::Started).await.ok();
        match self.instruction().await {
            Some(Instruction::Go(go)) => Some(go),
            _ => self.alone(),
        }
    }

    /// Reports that a model serves or not. Returns true if the next model may start.
    async fn reported(&mut self, model: &str, described: Value, why: Option<String>) -> bool {
        let progress = Progress::Serves { model: model.to_owned(), described, why };
        // If nobody hears it, nobody answers.
        send(&mut self.write, &progress).await.ok();
        matches!(self.instruction().await, Some(Instruction::Next))
    }

    fn alone(&self) -> Option<FinalState> {
        self.registry.begin_all();
        tracing::warn!(
            "the previous supervisor exited without notice during the upgrade; this supervisor serves all models now"
        );
        None
    }

    /// Returns the next instruction, or `None` if the predecessor has exited. Executes the
    /// instructions to drop a model. Is cancel-safe.
    async fn instruction(&mut self) -> Option<Instruction> {
        loop {
            match self.instructions_rx.recv().await? {
                Instruction::Drop { model } => {
                    let registry = self.registry.clone();
                    // A model that is not in the configuration has nothing to give back.
                    tokio::spawn(async move { registry.give_back(&model).await.ok() });
                }
                instruction => return Some(instruction),
            }
        }
    }
}

/// Takes ownership of a descriptor. Returns an error if it is not open.
fn own(number: RawFd) -> io::Result<OwnedFd> {
    nix::fcntl::fcntl(
        // SAFETY: the descriptor is only inspected. If it is not open, the call returns an error.
        unsafe { std::os::fd::BorrowedFd::borrow_raw(number) },
        nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC),
    )?;
    // SAFETY: the descriptor is open, and the predecessor passed it to this process for this owner
    // alone. The process has opened no descriptor yet.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
