//! The supervisor before this one, as this one sees it.
#![allow(unsafe_code)] // adopting descriptors that this process was started with

use std::io::{self, BufRead, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};

use super::{Estate, Go, MAX_LINE, Order, VARIABLE, Word, described};
use shadowslice_control::backend::MpsEstate;
use shadowslice_control::models::{PersistedState, Registry};
use shadowslice_datapath::sockets::Inherited;

/// How long the estate may take to come.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Predecessor {
    channel: UnixStream,
    pub(crate) run_dir: PathBuf,
    pub(crate) lock: Option<OwnedFd>,
    pub(crate) relay: Option<OwnedFd>,
    pub(crate) sockets: Inherited,
    pub(crate) mps: Vec<MpsEstate>,
}

impl Predecessor {
    /// `None` if this process was not started to take over. To be called once, and before any
    /// descriptor is opened.
    pub(crate) fn find() -> io::Result<Option<Self>> {
        let Some(number) = std::env::var(VARIABLE).ok() else { return Ok(None) };
        let number = number.parse().map_err(io::Error::other)?;
        let channel = UnixStream::from(own(number)?);
        channel.set_read_timeout(Some(PATIENCE))?;
        let mut line = Vec::new();
        // Nothing is said after it for a while, so that nothing is read too early.
        io::BufReader::new(&channel).take(MAX_LINE).read_until(b'\n', &mut line)?;
        let Estate { run_dir, lock, relay, sockets, mps } = serde_json::from_slice(&line)?;
        let mut inherited = Inherited::default();
        for (address, number) in sockets {
            inherited.insert(address, own(number)?);
        }
        let (lock, relay) = (Some(own(lock)?), Some(own(relay)?));
        Ok(Some(Self { channel, run_dir, lock, relay, sockets: inherited, mps }))
    }

    pub(crate) fn failed(&self, why: &str) {
        // It finds out by itself if this cannot be said.
        self.say(&Word::Failed(why.to_owned())).ok();
    }

    fn say(&self, word: &Word) -> io::Result<()> {
        let mut line = serde_json::to_vec(word)?;
        line.push(b'\n');
        (&self.channel).write_all(&line)
    }

    /// The conversation from now on. `lives` goes with the predecessor.
    pub(crate) fn converse(
        self,
        lives: Option<watch::Sender<()>>,
        registry: Registry,
    ) -> io::Result<Conversation> {
        self.channel.set_nonblocking(true)?;
        let (orders, words) = tokio::net::UnixStream::from_std(self.channel)?.into_split();
        let (hear, heard) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut orders = BufReader::new(orders);
            while let Some(order) = read(&mut orders).await {
                // Nobody may listen any more, and the end is still to be heard.
                hear.send(order).await.ok();
            }
            drop(lives);
        });
        Ok(Conversation { words, heard, registry })
    }
}

async fn read(orders: &mut BufReader<OwnedReadHalf>) -> Option<Order> {
    let mut line = Vec::new();
    if orders.take(MAX_LINE).read_until(b'\n', &mut line).await.is_err() || line.is_empty() {
        return None;
    }
    let order = serde_json::from_slice(&line);
    let unknown = |error: &_| {
        tracing::error!(%error, "cannot understand a message of the previous supervisor, probably because its version is too old; this supervisor serves alone; check that the previous supervisor exits, and stop it if not");
    };
    order.inspect_err(unknown).ok()
}

/// With a predecessor that still serves.
#[derive(Debug)]
pub(crate) struct Conversation {
    words: OwnedWriteHalf,
    heard: mpsc::Receiver<Order>,
    registry: Registry,
}

impl Conversation {
    /// Takes over the models one by one. Returns when this supervisor should accept connections, with
    /// `None` if its predecessor has died.
    pub(crate) async fn take_over(&mut self, state: &PersistedState) -> Option<Go> {
        let (broken, whole): (Vec<_>, Vec<_>) =
            self.registry.not_started().into_iter().partition(|model| model.broken.is_some());
        // The predecessor hears of models that cannot start before any model moves.
        for model in &broken {
            let (name, why) = (model.name.clone(), model.broken.clone());
            self.say(&Word::Serves { model: name, described: Value::Null, why }).await.ok();
            if !matches!(self.order().await, Some(Order::Next)) {
                return self.alone();
            }
        }
        for name in state.upgrade_order(whole.iter().map(|model| &*model.name)) {
            let registry = self.registry.clone();
            let (served, outcome) = tokio::select! {
                begun = registry.begin(name) => begun,
                // The predecessor only speaks now if it takes models back.
                _ = self.order() => return self.alone(),
            };
            let described = served.as_ref().map(described).unwrap_or_default();
            let (model, why) = (name.to_owned(), outcome.err());
            // If nobody hears it, nobody answers.
            self.say(&Word::Serves { model, described, why }).await.ok();
            if !matches!(self.order().await, Some(Order::Next)) {
                return self.alone();
            }
        }
        self.registry.begin_all();
        self.say(&Word::Started).await.ok();
        match self.order().await {
            Some(Order::Go(go)) => Some(go),
            _ => self.alone(),
        }
    }

    fn alone(&self) -> Option<Go> {
        self.registry.begin_all();
        tracing::warn!(
            "the previous supervisor exited without notice during the upgrade; this supervisor serves all models now"
        );
        None
    }

    async fn say(&mut self, word: &Word) -> io::Result<()> {
        let mut line = serde_json::to_vec(word)?;
        line.push(b'\n');
        self.words.write_all(&line).await
    }

    /// Returns the next order, or `None` if the predecessor has exited. Executes the orders to drop a
    /// model. Is cancel-safe.
    async fn order(&mut self) -> Option<Order> {
        loop {
            match self.heard.recv().await? {
                Order::Drop { model } => {
                    let registry = self.registry.clone();
                    // A model that is not in the configuration has nothing to give back.
                    tokio::spawn(async move { registry.give_back(&model).await.ok() });
                }
                order => return Some(order),
            }
        }
    }
}

fn own(number: RawFd) -> io::Result<OwnedFd> {
    // An error means that there is no such descriptor.
    nix::fcntl::fcntl(
        // SAFETY: only looked at; if it is not open, the call says so.
        unsafe { std::os::fd::BorrowedFd::borrow_raw(number) },
        nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC),
    )?;
    // SAFETY: it is open, and the predecessor gave it to this process, which has opened nothing yet,
    // for this one owner.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
