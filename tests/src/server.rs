//! A supervisor under test: the real binary on a configuration in a folder of its own.

use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::time::{Instant, interval, timeout};

use crate::client::Client;
use crate::home::{Error, Home, left_behind};
use crate::process::{Process, descendants, zombies};
use crate::status::{Handover, Model, Reloaded, Status};

/// How often a condition is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A running supervisor. Dropping it kills it and all its workers.
#[derive(Debug)]
pub struct Server {
    home: Home,
    child: Child,
    process: Process,
}

impl Server {
    /// Starts `shadowslice serve` on a configuration; `None` stands for the folder's `config.yaml`.
    pub fn start(home: Home, config: Option<&Path>) -> Result<Self, Error> {
        let log = home.log_path();
        let stderr = File::create(log)
            .map_err(|source| Error::Io { what: format!("make {}", log.display()), source })?;
        Self::start_saying_to(home, config, stderr.into())
    }

    /// The same with another standard error; the log then stays empty.
    pub fn start_saying_to(home: Home, config: Option<&Path>, stderr: Stdio) -> Result<Self, Error> {
        let own = home.path().join("config.yaml");
        let config = config.unwrap_or(&own).to_string_lossy().into_owned();
        let (child, process) = serve(&home, &config, stderr)?;
        Ok(Self { home, child, process })
    }

    /// Starts on `config.yaml` of the folder, and waits until all models are ready or given up.
    pub async fn ready(home: Home) -> Result<Self, Error> {
        let mut server = Self::start(home, None)?;
        server.wait_ready().await?;
        Ok(server)
    }

    /// Its folder.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// The supervisor's process.
    pub fn process(&self) -> Process {
        self.process
    }

    /// Its workers, and all other processes that it started.
    pub fn children(&self) -> Vec<Process> {
        descendants(self.process.pid)
    }

    /// A client on its gRPC Unix socket, with a connection of its own.
    pub fn client(&self) -> Client {
        Client::new(&self.home.run_dir().join("grpc.sock"))
    }

    /// A client on the TCP port that its log names for gRPC.
    pub async fn tcp_client(&self) -> Result<Client, Error> {
        Ok(Client::at(self.tcp_address("gRPC").await?))
    }

    /// The address with a free port on which it listens for HTTP, gRPC or metrics.
    pub async fn tcp_address(&self, what: &str) -> Result<SocketAddr, Error> {
        let line = self.wait_line(&[&format!("listening protocol=\"{what}\"")]).await?;
        let address = line.rsplit('=').next().and_then(|address| address.trim().parse().ok());
        address.ok_or_else(|| self.too_late(&format!("an address in `{line}`")))
    }

    /// The end of its log.
    pub fn log(&self) -> String {
        self.home.log()
    }

    /// Waits until it answers commands, which is before its models are ready.
    pub async fn wait_up(&mut self) -> Result<(), Error> {
        let socket = self.home.run_dir().join("control.sock");
        self.wait("its control socket", async move || UnixStream::connect(&socket).await.is_ok()).await
    }

    /// Waits until it says that it is ready.
    pub async fn wait_ready(&mut self) -> Result<(), Error> {
        let client = self.client();
        self.wait("ServerReady", async move || matches!(client.clone().server_ready().await, Ok(true))).await
    }

    /// Waits until one model is ready.
    pub async fn wait_model_ready(&mut self, model: &str) -> Result<(), Error> {
        let client = self.client();
        let what = format!("ModelReady of {model}");
        self.wait(&what, async move || matches!(client.clone().model_ready(model).await, Ok(true))).await
    }

    /// Waits until the status of a model is as wanted, and returns it.
    pub async fn wait_status(
        &self,
        model: &str,
        what: &str,
        wanted: impl Fn(&Model) -> bool,
    ) -> Result<Model, Error> {
        let deadline = Instant::now() + self.home.patience();
        let mut look = interval(LOOK_EVERY);
        loop {
            look.tick().await;
            let status = self.model(model).await?;
            if wanted(&status) {
                return Ok(status);
            }
            if Instant::now() > deadline {
                let log = format!("{}\nlast status: {status:?}", self.log());
                return Err(Error::TooLate { within: self.home.patience(), what: what.into(), log });
            }
        }
    }

    /// Waits until it has so many child processes, workers and others.
    pub async fn wait_children(&self, wanted: usize) -> Result<(), Error> {
        let mut look = interval(LOOK_EVERY);
        let happening = async {
            while self.children().len() != wanted {
                look.tick().await;
            }
        };
        timeout(self.home.patience(), happening).await.map_err(|_| self.too_late("its workers' number"))
    }

    /// Waits until it has reaped all child processes that have ended.
    pub async fn wait_reaped(&self) -> Result<(), Error> {
        let mut look = interval(LOOK_EVERY);
        let happening = async {
            while zombies(self.process().pid) > 0 {
                look.tick().await;
            }
        };
        timeout(self.home.patience(), happening).await.map_err(|_| self.too_late("the end of its zombies"))
    }

    /// Waits until its log has a line with all these words, and returns the line.
    pub async fn wait_line(&self, words: &[&str]) -> Result<String, Error> {
        let mut look = interval(LOOK_EVERY);
        let happening = async {
            loop {
                let log = fs::read_to_string(self.home.log_path()).unwrap_or_default();
                let mut lines = log.lines();
                if let Some(line) = lines.find(|line| words.iter().all(|word| line.contains(word))) {
                    return line.to_owned();
                }
                look.tick().await;
            }
        };
        let found = timeout(self.home.patience(), happening).await;
        found.map_err(|_| self.too_late(&format!("a line with {words:?}")))
    }

    async fn wait(&mut self, what: &str, happened: impl AsyncFn() -> bool) -> Result<(), Error> {
        let mut look = interval(LOOK_EVERY);
        let happening = async {
            while !happened().await {
                look.tick().await;
            }
        };
        let followed = self.child.id() != u32::try_from(self.process.pid).ok();
        tokio::select! {
            result = timeout(self.home.patience(), happening) => {
                result.map_err(|_| self.too_late(what))
            }
            ended = self.child.wait(), if !followed => match ended {
                Ok(status) => Err(Error::Ended { status, log: self.home.log() }),
                Err(source) => Err(Error::Io { what: "wait for the supervisor".into(), source }),
            },
        }
    }

    /// Waits until a process has ended.
    pub async fn wait_gone(&mut self, process: Process) -> Result<(), Error> {
        let mut look = interval(LOOK_EVERY);
        let gone = async {
            while process.alive() {
                look.tick().await;
            }
        };
        timeout(self.home.patience(), gone).await.map_err(|_| self.too_late("the end of a process"))
    }

    fn too_late(&self, what: &str) -> Error {
        Error::TooLate { within: self.home.patience(), what: what.into(), log: self.log() }
    }

    /// The output of `shadowslice status --json`.
    pub async fn status(&self) -> Result<Status, Error> {
        self.json(&["status", "--json"]).await
    }

    /// The status of one model.
    pub async fn model(&self, name: &str) -> Result<Model, Error> {
        let status = self.status().await?;
        status.model(name).cloned().ok_or_else(|| Error::NoModel(name.into()))
    }

    /// Sets a model's share by hand, and waits for the end of the hand-over.
    pub async fn resize(&self, model: &str, percent: u32) -> Result<Handover, Error> {
        self.json(&["resize", model, &format!("{percent}%"), "--json"]).await
    }

    /// Like the command, but over the control socket: without the processor time that a command
    /// takes.
    pub async fn resize_by_socket(&self, model: &str, percent: u32) -> Result<Handover, Error> {
        #[derive(serde::Deserialize)]
        #[serde(rename_all = "snake_case")]
        enum Answer {
            Handover { report: Handover },
        }
        let ask = serde_json::json!({"resize": {"model": model, "share_percent": percent}}).to_string();
        let answered = timeout(self.home.patience(), self.asked(&ask)).await;
        let printed = answered.map_err(|_| self.too_late("the end of a hand-over"))?;
        let printed = printed.map_err(|source| Error::Io {
            what: "order a hand-over over the control socket".into(),
            source,
        })?;
        let Answer::Handover { report } = serde_json::from_str(&printed)
            .map_err(|source| Error::Printed { command: ask, printed, source })?;
        Ok(report)
    }

    /// The answer of the control socket, a line.
    async fn asked(&self, ask: &str) -> io::Result<String> {
        let mut socket = UnixStream::connect(self.home.run_dir().join("control.sock")).await?;
        socket.write_all(format!("{ask}\n").as_bytes()).await?;
        let mut answer = String::new();
        BufReader::new(socket).read_line(&mut answer).await?;
        Ok(answer)
    }

    /// The output of `shadowslice reload --json`.
    pub async fn reload(&self) -> Result<Reloaded, Error> {
        self.json(&["reload", "--json"]).await
    }

    /// The output of `shadowslice plan --json`.
    pub async fn plan(&self) -> Result<serde_json::Value, Error> {
        self.json(&["plan", "--json"]).await
    }

    /// The output of a `shadowslice` command that succeeds.
    pub async fn said(&self, arguments: &[&str]) -> Result<String, Error> {
        let Output { status, stdout, stderr } = self.home.run(arguments).await?;
        if !status.success() {
            let stderr = String::from_utf8_lossy(&stderr).into_owned();
            return Err(Error::Command { command: arguments.join(" "), status, stderr });
        }
        Ok(String::from_utf8_lossy(&stdout).into_owned())
    }

    async fn json<T: serde::de::DeserializeOwned>(&self, arguments: &[&str]) -> Result<T, Error> {
        let printed = self.said(arguments).await?;
        let command = arguments.join(" ");
        serde_json::from_str(&printed).map_err(|source| Error::Printed { command, printed, source })
    }

    /// Starts it once more after its end.
    pub fn again(&mut self) -> Result<(), Error> {
        let config = self.home.path().join("config.yaml").to_string_lossy().into_owned();
        let (child, process) = serve(&self.home, &config, Stdio::inherit())?;
        (self.child, self.process) = (child, process);
        Ok(())
    }

    /// Has the next supervisor take over. Returns the one before, which may go on for a while.
    pub async fn upgrade(&mut self) -> Result<Process, Error> {
        let said = self.said(&["upgrade"]).await?;
        self.follow(&said)
    }

    /// From now on this is the process that a word of the program names.
    pub fn follow(&mut self, said: &str) -> Result<Process, Error> {
        let next = said.split_whitespace().find_map(|word| word.parse().ok()).and_then(Process::of);
        let next = next.ok_or_else(|| self.too_late(&format!("a process in `{said}`")))?;
        Ok(std::mem::replace(&mut self.process, next))
    }

    /// Waits for its end, however it comes. How a successor ended is not known.
    pub async fn ended(&mut self) -> Result<ExitStatus, Error> {
        if self.child.id() != u32::try_from(self.process.pid).ok() {
            let process = self.process;
            self.wait_gone(process).await?;
            return Ok(ExitStatus::default());
        }
        let ended = timeout(self.home.patience(), self.child.wait()).await;
        let ended = ended.map_err(|_| self.too_late("its end"))?;
        ended.map_err(|source| Error::Io { what: "wait for the supervisor".into(), source })
    }

    /// Stops it with SIGTERM: it must exit 0 and leave no process, socket or temporary file behind.
    pub async fn stop(mut self) -> Result<(), Error> {
        let children = self.children();
        self.signal(Signal::SIGTERM)?;
        let status = self.ended().await?;
        if !status.success() {
            return Err(Error::Ended { status, log: self.log() });
        }
        let left = left_behind(&self.home, &children);
        if left.is_empty() { Ok(()) } else { Err(Error::Left(left)) }
    }

    /// Sends the supervisor a signal.
    pub fn signal(&self, signal: Signal) -> Result<(), Error> {
        let what = || format!("send {signal} to the supervisor");
        self.process.signal(signal).map_err(|errno| Error::Io { what: what(), source: errno.into() })
    }
}

fn serve(home: &Home, config: &str, stderr: Stdio) -> Result<(Child, Process), Error> {
    let failed = |source| Error::Io { what: "start `shadowslice serve`".into(), source };
    let mut command = home.command(&["serve", config])?;
    let child = command.stdout(Stdio::null()).stderr(stderr).process_group(0).spawn().map_err(failed)?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    let process = pid.and_then(Process::of).ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
    Ok((child, process))
}

impl Drop for Server {
    fn drop(&mut self) {
        let children = self.children();
        // Both fail only for processes that are gone, which need no signal.
        let _ = self.child.start_kill();
        let _ = self.process.signal(Signal::SIGKILL);
        for child in children {
            let _ = child.signal(Signal::SIGKILL);
        }
    }
}
