//! The next supervisor, from the point of view of the previous one.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::BufReader;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use crate::messages::{DESCRIPTOR_VARIABLE, FinalState, HandoverState, Instruction, Progress, receive, send};
use crate::upgrade::Succession;
use shadowslice_control::process::{Child, InheritedFile, spawn};
use shadowslice_datapath::relay;
use shadowslice_datapath::sockets::{PassableSocket, SocketFile};
use shadowslice_shared::errors;

/// The number of the first descriptor that a successor gets, after the standard streams.
const FIRST_DESCRIPTOR: RawFd = 3;

/// The variable by which systemd names the process whose watchdog it is. The next supervisor feeds the
/// watchdog too.
const WATCHDOG_OWNER: &str = "WATCHDOG_PID";

/// The time within which a successor that has failed must exit by itself.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The process of the next supervisor. Dropping this value kills the process unless it serves.
#[derive(Debug)]
pub struct Successor {
    child: Child,
    progress: BufReader<OwnedReadHalf>,
    instructions: OwnedWriteHalf,
    lives: bool,
    /// The socket to which requests are relayed. Its file is removed with this value.
    relay: SocketFile,
}

/// Returns the path by which this program was started, where the next version will be. Links in the path
/// are not followed.
pub fn program() -> io::Result<PathBuf> {
    let named = env::args_os().next().map(PathBuf::from).unwrap_or_default();
    if named.components().count() > 1 {
        return std::path::absolute(named);
    }
    let places = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&places).map(|place| place.join(&named)).find(|program| program.is_file());
    found.map_or_else(env::current_exe, std::path::absolute)
}

impl Successor {
    pub fn pid(&self) -> u32 {
        self.child.pid().unsigned_abs()
    }

    /// Returns true unless the process is known to have exited.
    pub(crate) fn lives(&self) -> bool {
        self.lives
    }

    pub(crate) async fn start(succession: &Succession<'_>) -> Result<Self, String> {
        if std::process::id() == 1 {
            let why = "this supervisor is process 1, and the container would end with this process; \
                       start the supervisor under an init process, as `docker run --init` does";
            return Err(why.to_owned());
        }
        let started = Self::spawn(succession).await;
        started.map_err(|error| format!("cannot start the next supervisor: {}", errors::chain(&error)))
    }

    pub(crate) fn relay(&self) -> Arc<Path> {
        self.relay.path().into()
    }

    async fn spawn(succession: &Succession<'_>) -> io::Result<Self> {
        let Succession { program, config, run_dir, sockets, admin, .. } = succession;
        let (ours, theirs) = UnixStream::pair()?;
        let theirs = theirs.into_std()?;
        theirs.set_nonblocking(false)?;
        let copies: Vec<OwnedFd> = sockets.iter().map(PassableSocket::duplicate).collect::<Result<_, _>>()?;
        let (listener, relay) = listen(&run_dir.relay())?;
        let passed = [theirs.as_fd(), run_dir.lock(), listener.as_fd()]
            .into_iter()
            .chain(copies.iter().map(AsFd::as_fd));
        let files: Vec<_> =
            (FIRST_DESCRIPTOR..).zip(passed).map(|(number, file)| InheritedFile { number, file }).collect();
        let state = HandoverState {
            run_dir: run_dir.path().to_owned(),
            lock: FIRST_DESCRIPTOR + 1,
            relay: FIRST_DESCRIPTOR + 2,
            sockets: sockets
                .iter()
                .map(|socket| socket.address.clone())
                .zip(FIRST_DESCRIPTOR + 3..)
                .collect(),
            mps: admin.gpus.iter().filter_map(|gpu| gpu.handover()).collect(),
        };
        let mut environment: Vec<(OsString, OsString)> = env::vars_os()
            .filter(|(name, _)| name != DESCRIPTOR_VARIABLE && name != WATCHDOG_OWNER)
            .collect();
        environment.push((DESCRIPTOR_VARIABLE.into(), FIRST_DESCRIPTOR.to_string().into()));
        let config = std::path::absolute(config)?;
        let config = config.to_str().ok_or(io::ErrorKind::InvalidFilename)?;
        let child = spawn(program, &["serve", config], &environment, &files)?;
        let (progress, mut instructions) = ours.into_split();
        send(&mut instructions, &state).await?;
        Ok(Self { child, progress: BufReader::new(progress), instructions, lives: true, relay })
    }

    pub(crate) async fn say(&mut self, instruction: &Instruction) -> Result<(), String> {
        let said = send(&mut self.instructions, instruction).await;
        said.map_err(|error| self.gone(&error))
    }

    /// Returns the next message, or the reason why none arrived within that time. If the successor
    /// already `serves` models, it must respond meanwhile.
    pub(crate) async fn hear(&mut self, within: Duration, serves: bool) -> Result<Progress, String> {
        let socket = self.relay();
        let heard = tokio::select! {
            heard = timeout(within, self.read()) => heard,
            () = silence(&socket), if serves => return Err(self.silent()),
        };
        let heard =
            heard.map_err(|_| format!("a model of the next supervisor was not ready within {within:?}"))?;
        heard.map_err(|error| self.gone(&error))
    }

    /// Waits until the process has exited, or has stopped responding and was killed. Returns the reason.
    pub(crate) async fn lost(&mut self) -> String {
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
        // The process may have exited.
        self.child.kill().ok();
        format!("the next supervisor did not answer for {RESPONSE_TIMEOUT:?}, and was killed")
    }

    fn gone(&mut self, error: &io::Error) -> String {
        self.lives = false;
        format!("the next supervisor exited: {}", errors::chain(error))
    }

    async fn read(&mut self) -> io::Result<Progress> {
        if let Some(progress) = receive(&mut self.progress).await? {
            return Ok(progress);
        }
        let status = self.child.wait().await?;
        Err(io::Error::other(format!("{status}; see the log")))
    }

    /// Waits for the exit of a process that has reported its failure.
    pub(crate) async fn ends(&mut self) {
        self.lives = false;
        timeout(EXIT_TIMEOUT, self.child.wait()).await.ok();
    }

    /// Kills the process, and waits for its exit.
    pub(crate) async fn end(&mut self) {
        self.child.kill().ok();
        self.ends().await;
    }

    /// Makes the process accept connections. The process notices by the end of the socket when this
    /// supervisor relays no more requests.
    pub(crate) async fn go(&mut self, state: FinalState) -> Result<(), String> {
        self.say(&Instruction::Go(state)).await?;
        self.child.set_free();
        Ok(())
    }
}

fn listen(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    // A killed supervisor with the same process id may have left its socket.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    Ok((UnixListener::bind(path)?, SocketFile::new(path)?))
}

/// The time between two checks whether a supervisor that serves moved models responds.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The time within which it must respond.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits until the supervisor at this socket has stopped responding.
async fn silence(socket: &Path) {
    while relay::is_responding(socket, RESPONSE_TIMEOUT).await {
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}
