//! The supervisor after this one, as this one sees it.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use super::{Estate, Go, MAX_LINE, Order, Succession, VARIABLE, Word};
use shadowslice_control::process::{Child, Inherited, spawn};
use shadowslice_datapath::relay;
use shadowslice_datapath::sockets::{PassableSocket, SocketFile};
use shadowslice_shared::errors;

/// The first number that a successor gets; the ones before are standard streams.
const FIRST: RawFd = 3;

/// systemd's word on whose watchdog it is: the next one's, too.
const WATCHDOG_OWNER: &str = "WATCHDOG_PID";

/// How long it may take to end by itself once it has failed.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// A process that is to serve. Dropping it kills it, until it serves.
#[derive(Debug)]
pub(crate) struct Successor {
    child: Child,
    said: BufReader<OwnedReadHalf>,
    orders: OwnedWriteHalf,
    lives: bool,
    /// Where it gets requests from here. The file goes with this supervisor, or with the attempt.
    relay: SocketFile,
}

/// The path by which this program was started, under which the next version will lie: a link in it
/// is not followed yet.
pub(crate) fn program() -> io::Result<PathBuf> {
    let named = env::args_os().next().map(PathBuf::from).unwrap_or_default();
    if named.components().count() > 1 {
        return std::path::absolute(named);
    }
    let places = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&places).map(|place| place.join(&named)).find(|program| program.is_file());
    found.map_or_else(env::current_exe, std::path::absolute)
}

impl Successor {
    pub(crate) fn pid(&self) -> u32 {
        self.child.pid().unsigned_abs()
    }

    /// As far as is known.
    pub(super) fn lives(&self) -> bool {
        self.lives
    }

    pub(super) async fn start(succession: &Succession<'_>) -> Result<Self, String> {
        if std::process::id() == 1 {
            let why = "this supervisor is process 1, and the container would end with this process; \
                       start the supervisor under an init process, as `docker run --init` does";
            return Err(why.to_owned());
        }
        let started = Self::spawn(succession).await;
        started.map_err(|error| format!("cannot start the next supervisor: {}", errors::chain(&error)))
    }

    pub(super) fn relay(&self) -> Arc<Path> {
        self.relay.path().into()
    }

    async fn spawn(succession: &Succession<'_>) -> io::Result<Self> {
        let Succession { program, config, run_dir, sockets, gpus, .. } = succession;
        let (ours, theirs) = UnixStream::pair()?;
        let theirs = theirs.into_std()?;
        theirs.set_nonblocking(false)?;
        let copies: Vec<OwnedFd> = sockets.iter().map(PassableSocket::duplicate).collect::<Result<_, _>>()?;
        let (listener, relay) = listen(&run_dir.relay())?;
        let passed = [theirs.as_fd(), run_dir.lock(), listener.as_fd()]
            .into_iter()
            .chain(copies.iter().map(AsFd::as_fd));
        let files: Vec<_> = (FIRST..).zip(passed).map(|(number, file)| Inherited { number, file }).collect();
        let estate = Estate {
            run_dir: run_dir.path().to_owned(),
            lock: FIRST + 1,
            relay: FIRST + 2,
            sockets: sockets.iter().map(|socket| socket.address.clone()).zip(FIRST + 3..).collect(),
            mps: gpus.iter().filter_map(|gpu| gpu.estate()).collect(),
        };
        let mut environment: Vec<(OsString, OsString)> =
            env::vars_os().filter(|(name, _)| name != VARIABLE && name != WATCHDOG_OWNER).collect();
        environment.push((VARIABLE.into(), FIRST.to_string().into()));
        let config = std::path::absolute(config)?;
        let config = config.to_str().ok_or(io::ErrorKind::InvalidFilename)?;
        let child = spawn(program, &["serve", config], &environment, &files)?;
        let (said, mut orders) = ours.into_split();
        write(&mut orders, &estate).await?;
        Ok(Self { child, said: BufReader::new(said), orders, lives: true, relay })
    }

    pub(super) async fn say(&mut self, order: &Order) -> Result<(), String> {
        let said = write(&mut self.orders, order).await;
        said.map_err(|error| self.gone(&error))
    }

    /// What it says next; an error says why there is nothing within that time. If it `serves` it must
    /// answer meanwhile.
    pub(super) async fn hear(&mut self, within: Duration, serves: bool) -> Result<Word, String> {
        let socket = self.relay();
        let heard = tokio::select! {
            heard = timeout(within, self.read()) => heard,
            () = silence(&socket), if serves => return Err(self.silent()),
        };
        let heard =
            heard.map_err(|_| format!("a model of the next supervisor was not ready within {within:?}"))?;
        heard.map_err(|error| self.gone(&error))
    }

    /// Returns when it has ended, or does not answer any more; then it is killed.
    pub(super) async fn lost(&mut self) -> String {
        let socket = self.relay();
        tokio::select! {
            status = self.child.wait() => {
                let ended = status.map(|status| io::Error::other(status.to_string()));
                self.gone(&ended.unwrap_or_else(|error| error))
            }
            () = silence(&socket) => self.silent(),
        }
    }

    fn silent(&mut self) -> String {
        self.lives = false;
        // It may have ended by now.
        self.child.kill().ok();
        format!("the next supervisor did not answer for {ANSWERS_WITHIN:?}, and was killed")
    }

    fn gone(&mut self, error: &io::Error) -> String {
        self.lives = false;
        format!("the next supervisor exited: {}", errors::chain(error))
    }

    async fn read(&mut self) -> io::Result<Word> {
        let mut line = Vec::new();
        (&mut self.said).take(MAX_LINE).read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            let status = self.child.wait().await?;
            return Err(io::Error::other(format!("{status}; see the log")));
        }
        Ok(serde_json::from_slice(&line)?)
    }

    /// It has said that it fails: it ends by itself, if it can.
    pub(super) async fn ends(&mut self) {
        self.lives = false;
        timeout(ENDS_WITHIN, self.child.wait()).await.ok();
    }

    /// Kills it, and waits for its end.
    pub(super) async fn end(&mut self) {
        self.child.kill().ok();
        self.ends().await;
    }

    /// From now on it serves. It knows by this end of the socket when no more requests come from here.
    pub(super) async fn go(&mut self, go: Go) -> Result<(), String> {
        self.say(&Order::Go(go)).await?;
        self.child.set_free();
        Ok(())
    }
}

fn listen(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    // One that was killed may have left its own, with the same process number.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    Ok((UnixListener::bind(path)?, SocketFile::new(path)?))
}

/// How often a supervisor that serves models of this one is asked whether it lives, and how long it
/// may take to answer.
const ASKED_EVERY: Duration = Duration::from_secs(1);
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// Returns when the supervisor at that socket does not answer any more.
async fn silence(socket: &Path) {
    while relay::is_responding(socket, ANSWERS_WITHIN).await {
        tokio::time::sleep(ASKED_EVERY).await;
    }
}

async fn write(orders: &mut OwnedWriteHalf, what: &impl serde::Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    orders.write_all(&line).await
}
