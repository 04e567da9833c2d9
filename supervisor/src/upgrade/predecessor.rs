//! The supervisor before this one, as this one sees it.
#![allow(unsafe_code)] // adopting descriptors that this process was started with

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt};

use super::{Estate, Go, MAX_LINE, VARIABLE, Word};
use shadowslice_control::backend::MpsEstate;
use shadowslice_datapath::sockets::Inherited;

/// How long the estate may take to come.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Predecessor {
    channel: UnixStream,
    pub(crate) run_dir: PathBuf,
    pub(crate) lock: Option<OwnedFd>,
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
        BufReader::new(&channel).take(MAX_LINE).read_until(b'\n', &mut line)?;
        let Estate { run_dir, lock, sockets, mps } = serde_json::from_slice(&line)?;
        let mut inherited = Inherited::default();
        for (address, number) in sockets {
            inherited.put(address, own(number)?);
        }
        Ok(Some(Self { channel, run_dir, lock: Some(own(lock)?), sockets: inherited, mps }))
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

    /// Says how the models are, and waits until this supervisor is to serve. One whose predecessor
    /// has died meanwhile serves at once.
    pub(crate) async fn succeed(self, models: BTreeMap<String, Option<String>>) -> io::Result<Option<Go>> {
        self.say(&Word::Started(models)).ok();
        self.channel.set_nonblocking(true)?;
        let channel = tokio::net::UnixStream::from_std(self.channel)?;
        let mut line = Vec::new();
        let mut reader = tokio::io::BufReader::new(channel.take(MAX_LINE));
        reader.read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            tracing::warn!("the supervisor before this one has ended without a word; this one serves");
            return Ok(None);
        }
        Ok(Some(serde_json::from_slice(&line)?))
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
