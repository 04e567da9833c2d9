//! The supervisor after this one, as this one sees it.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::{Estate, Go, MAX_LINE, Succession, VARIABLE, Word};
use shadowslice_control::models::ModelSet;
use shadowslice_control::process::{Child, Inherited, spawn};
use shadowslice_datapath::sockets::Passable;
use shadowslice_shared::errors;

/// The first number that a successor gets; the ones before are standard streams.
const FIRST: RawFd = 3;

/// systemd's word on whose watchdog it is: the next one's, too.
const WATCHDOG_OWNER: &str = "WATCHDOG_PID";

/// How long it may take to end by itself once it has failed.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// A process that is to serve. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Successor {
    child: Child,
    channel: UnixStream,
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
    /// Returns when its models serve as well as the ones here. An error says why they do not; then
    /// the process has ended.
    pub(crate) async fn raise(succession: &Succession<'_>, models: &ModelSet) -> Result<Self, String> {
        if std::process::id() == 1 {
            let why = "this supervisor is process 1, with which a container ends; start it under an init, as \
                       `docker run --init` does";
            return Err(why.to_owned());
        }
        let failed = |what: &str, error: &io::Error| format!("{what}: {}", errors::chain(error));
        let mut successor = Self::start(succession)
            .await
            .map_err(|error| failed("the next supervisor cannot be started", &error))?;
        let within = succession.within;
        let said = timeout(within, successor.hear()).await;
        let said =
            said.map_err(|_| format!("the next supervisor's models do not serve within {within:?}"))?;
        match said.map_err(|error| failed("the next supervisor has ended", &error))? {
            Word::Failed(why) => {
                // It is killed if it does not.
                timeout(ENDS_WITHIN, successor.child.wait()).await.ok();
                Err(format!("the next supervisor does not start: {why}"))
            }
            Word::Started(there) => {
                let worse = models.served.iter().filter(|served| served.pipeline.ready().is_ok());
                let worse = worse.filter_map(|served| {
                    let name = &served.model.name;
                    Some(format!("model '{name}' serves here and not there: {}", there.get(name)?.as_ref()?))
                });
                let worse: Vec<_> = worse.collect();
                if worse.is_empty() { Ok(successor) } else { Err(worse.join("\n")) }
            }
        }
    }

    async fn start(succession: &Succession<'_>) -> io::Result<Self> {
        let Succession { program, config, run_dir, sockets, gpus, .. } = succession;
        let (ours, theirs) = UnixStream::pair()?;
        let theirs = theirs.into_std()?;
        theirs.set_nonblocking(false)?;
        let copies: Vec<OwnedFd> = sockets.iter().map(Passable::duplicate).collect::<Result<_, _>>()?;
        let passed = [theirs.as_fd(), run_dir.lock()].into_iter().chain(copies.iter().map(AsFd::as_fd));
        let files: Vec<_> = (FIRST..).zip(passed).map(|(number, file)| Inherited { number, file }).collect();
        let estate = Estate {
            run_dir: run_dir.path().to_owned(),
            lock: FIRST + 1,
            sockets: sockets.iter().map(|socket| socket.address.clone()).zip(FIRST + 2..).collect(),
            mps: gpus.iter().filter_map(|gpu| gpu.estate()).collect(),
        };
        let mut environment: Vec<(OsString, OsString)> =
            env::vars_os().filter(|(name, _)| name != VARIABLE && name != WATCHDOG_OWNER).collect();
        environment.push((VARIABLE.into(), FIRST.to_string().into()));
        let config = std::path::absolute(config)?;
        let config = config.to_str().ok_or(io::ErrorKind::InvalidFilename)?;
        let child = spawn(program, &["serve", config], &environment, &files)?;
        let mut successor = Self { child, channel: ours };
        successor.say(&estate).await?;
        Ok(successor)
    }

    async fn say(&mut self, what: &impl serde::Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        self.channel.write_all(&line).await
    }

    async fn hear(&mut self) -> io::Result<Word> {
        let mut line = Vec::new();
        BufReader::new((&mut self.channel).take(MAX_LINE)).read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            let status = self.child.wait().await?;
            return Err(io::Error::other(format!("{status}; the log says why")));
        }
        Ok(serde_json::from_slice(&line)?)
    }

    /// From now on it serves. Returns its number.
    pub(crate) async fn go(mut self, go: &Go) -> Result<u32, String> {
        let said = self.say(go).await;
        said.map_err(|error| format!("the next supervisor has ended: {}", errors::chain(&error)))?;
        let pid = self.child.pid().unsigned_abs();
        self.child.set_free();
        Ok(pid)
    }
}
