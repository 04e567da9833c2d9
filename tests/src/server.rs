//! A supervisor under test: the real binary, with its configuration in its own folder.

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

use crate::client::InferGrpcClient;
use crate::home::{HarnessError, Home, left_behind};
use crate::process::{ProcessHandle, descendants, zombies};
use crate::status::{HandoverJson, ModelStatusJson, ReloadJson, StatusJson};

/// The interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A running supervisor. Dropping this value kills the supervisor and all its workers.
#[derive(Debug)]
pub struct ServerUnderTest {
    home: Home,
    child: Child,
    process: ProcessHandle,
}

impl ServerUnderTest {
    /// Starts `shadowslice serve` with this configuration. `None` stands for `config.yaml` in the
    /// folder.
    pub fn start(home: Home, config: Option<&Path>) -> Result<Self, HarnessError> {
        let log = home.log_path();
        let stderr = File::create(log)
            .map_err(|source| HarnessError::Io { what: format!("create {}", log.display()), source })?;
        Self::start_with_stderr(home, config, stderr.into())
    }

    /// Starts `shadowslice serve`, and sends its standard error to `stderr` instead of the home's log
    /// file.
    pub fn start_with_stderr(home: Home, config: Option<&Path>, stderr: Stdio) -> Result<Self, HarnessError> {
        let own = home.path().join("config.yaml");
        let config = config.unwrap_or(&own).to_string_lossy().into_owned();
        let (child, process) = serve(&home, &config, stderr)?;
        Ok(Self { home, child, process })
    }

    /// Starts the supervisor with `config.yaml` of the folder, and waits until each model is ready
    /// or has failed.
    pub async fn start_ready(home: Home) -> Result<Self, HarnessError> {
        let mut server = Self::start(home, None)?;
        server.wait_ready().await?;
        Ok(server)
    }

    pub fn home(&self) -> &Home {
        &self.home
    }

    pub fn process(&self) -> ProcessHandle {
        self.process
    }

    /// Returns the workers and all other processes that the supervisor started.
    pub fn children(&self) -> Vec<ProcessHandle> {
        descendants(self.process.pid)
    }

    /// Creates a client with its own connection to the gRPC Unix socket.
    pub fn client(&self) -> InferGrpcClient {
        InferGrpcClient::new(&self.home.run_dir().join("grpc.sock"))
    }

    /// Creates a client for the gRPC TCP port. Reads the port from the log.
    pub async fn tcp_client(&self) -> Result<InferGrpcClient, HarnessError> {
        Ok(InferGrpcClient::at(self.tcp_address("gRPC").await?))
    }

    /// Returns the TCP address on which the supervisor listens for HTTP, gRPC or metrics.
    pub async fn tcp_address(&self, what: &str) -> Result<SocketAddr, HarnessError> {
        let line = self.wait_line(&[&format!("listening protocol=\"{what}\"")]).await?;
        let address = line.rsplit('=').next().and_then(|address| address.trim().parse().ok());
        address.ok_or_else(|| self.timed_out(&format!("an address in `{line}`")))
    }

    /// Returns the end of the supervisor's log.
    pub fn log(&self) -> String {
        self.home.log()
    }

    /// Waits until the supervisor accepts commands, which happens before its models are ready.
    pub async fn wait_up(&mut self) -> Result<(), HarnessError> {
        let socket = self.home.run_dir().join("control.sock");
        self.wait("its control socket", async move || UnixStream::connect(&socket).await.is_ok()).await
    }

    /// Waits until `ServerReady` returns true.
    pub async fn wait_ready(&mut self) -> Result<(), HarnessError> {
        let client = self.client();
        self.wait("ServerReady", async move || matches!(client.clone().server_ready().await, Ok(true))).await
    }

    /// Waits until `ModelReady` returns true for a model.
    pub async fn wait_model_ready(&mut self, model: &str) -> Result<(), HarnessError> {
        let client = self.client();
        let what = format!("ModelReady of {model}");
        self.wait(&what, async move || matches!(client.clone().model_ready(model).await, Ok(true))).await
    }

    /// Waits until the status of a model meets the condition `wanted`, and returns that status.
    pub async fn wait_status(
        &self,
        model: &str,
        what: &str,
        wanted: impl Fn(&ModelStatusJson) -> bool,
    ) -> Result<ModelStatusJson, HarnessError> {
        let deadline = Instant::now() + self.home.timeout();
        let mut tick = interval(POLL_INTERVAL);
        loop {
            tick.tick().await;
            let status = self.model(model).await?;
            if wanted(&status) {
                return Ok(status);
            }
            if Instant::now() > deadline {
                let log = format!("{}\nlast status: {status:?}", self.log());
                return Err(HarnessError::Timeout { within: self.home.timeout(), what: what.into(), log });
            }
        }
    }

    /// Waits until the supervisor has this number of child processes, including its workers.
    pub async fn wait_children(&self, wanted: usize) -> Result<(), HarnessError> {
        let mut tick = interval(POLL_INTERVAL);
        let happening = async {
            while self.children().len() != wanted {
                tick.tick().await;
            }
        };
        timeout(self.home.timeout(), happening)
            .await
            .map_err(|_| self.timed_out(&format!("{wanted} child processes")))
    }

    /// Waits until the supervisor has reaped all child processes that have exited.
    pub async fn wait_reaped(&self) -> Result<(), HarnessError> {
        let mut tick = interval(POLL_INTERVAL);
        let happening = async {
            while zombies(self.process().pid) > 0 {
                tick.tick().await;
            }
        };
        timeout(self.home.timeout(), happening)
            .await
            .map_err(|_| self.timed_out("the reaping of all zombies"))
    }

    /// Waits until the log has a line that contains all these words, and returns that line.
    pub async fn wait_line(&self, words: &[&str]) -> Result<String, HarnessError> {
        let mut tick = interval(POLL_INTERVAL);
        let happening = async {
            loop {
                let log = fs::read_to_string(self.home.log_path()).unwrap_or_default();
                let mut lines = log.lines();
                if let Some(line) = lines.find(|line| words.iter().all(|word| line.contains(word))) {
                    return line.to_owned();
                }
                tick.tick().await;
            }
        };
        let found = timeout(self.home.timeout(), happening).await;
        found.map_err(|_| self.timed_out(&format!("a line with {words:?}")))
    }

    async fn wait(&mut self, what: &str, happened: impl AsyncFn() -> bool) -> Result<(), HarnessError> {
        let mut tick = interval(POLL_INTERVAL);
        let happening = async {
            while !happened().await {
                tick.tick().await;
            }
        };
        let is_successor = self.child.id() != u32::try_from(self.process.pid).ok();
        tokio::select! {
            result = timeout(self.home.timeout(), happening) => {
                result.map_err(|_| self.timed_out(what))
            }
            exited = self.child.wait(), if !is_successor => match exited {
                Ok(status) => Err(HarnessError::Exited { status, log: self.home.log() }),
                Err(source) => Err(HarnessError::Io { what: "wait for the supervisor".into(), source }),
            },
        }
    }

    pub async fn wait_gone(&mut self, process: ProcessHandle) -> Result<(), HarnessError> {
        let mut tick = interval(POLL_INTERVAL);
        let gone = async {
            while process.is_alive() {
                tick.tick().await;
            }
        };
        timeout(self.home.timeout(), gone)
            .await
            .map_err(|_| self.timed_out(&format!("the exit of process {}", process.pid)))
    }

    fn timed_out(&self, what: &str) -> HarnessError {
        HarnessError::Timeout { within: self.home.timeout(), what: what.into(), log: self.log() }
    }

    /// Returns the output of `shadowslice status --json`.
    pub async fn status(&self) -> Result<StatusJson, HarnessError> {
        self.json(&["status", "--json"]).await
    }

    /// Returns the status of one model.
    pub async fn model(&self, name: &str) -> Result<ModelStatusJson, HarnessError> {
        let status = self.status().await?;
        status.model(name).cloned().ok_or_else(|| HarnessError::UnknownModel(name.into()))
    }

    /// Sets a model's share with `shadowslice resize`, and waits for the end of the hand-over.
    /// Returns an error if the model already has this share.
    pub async fn resize(&self, model: &str, percent: u32) -> Result<HandoverJson, HarnessError> {
        self.json(&["resize", model, &format!("{percent}%"), "--json"]).await
    }

    /// Sets a model's share over the control socket, which uses less CPU time than a command.
    pub async fn resize_by_socket(&self, model: &str, percent: u32) -> Result<HandoverJson, HarnessError> {
        #[derive(serde::Deserialize)]
        #[serde(rename_all = "snake_case")]
        enum Reply {
            Handover { report: HandoverJson },
        }
        let request = serde_json::json!({"resize": {"model": model, "share_percent": percent}}).to_string();
        let answered = timeout(self.home.timeout(), self.control_request(&request)).await;
        let printed = answered.map_err(|_| self.timed_out("the end of a hand-over"))?;
        let printed = printed.map_err(|source| HarnessError::Io {
            what: "request a hand-over over the control socket".into(),
            source,
        })?;
        let Reply::Handover { report } = serde_json::from_str(&printed)
            .map_err(|source| HarnessError::UnexpectedOutput { command: request, printed, source })?;
        Ok(report)
    }

    /// Sends a line to the control socket, and returns the line of the reply.
    async fn control_request(&self, request: &str) -> io::Result<String> {
        let mut socket = UnixStream::connect(self.home.run_dir().join("control.sock")).await?;
        socket.write_all(format!("{request}\n").as_bytes()).await?;
        let mut answer = String::new();
        BufReader::new(socket).read_line(&mut answer).await?;
        Ok(answer)
    }

    /// Returns the output of `shadowslice reload --json`.
    pub async fn reload(&self) -> Result<ReloadJson, HarnessError> {
        self.json(&["reload", "--json"]).await
    }

    /// Returns the output of `shadowslice plan --json`.
    pub async fn plan(&self) -> Result<serde_json::Value, HarnessError> {
        self.json(&["plan", "--json"]).await
    }

    /// Runs a `shadowslice` command. Returns the output, or an error if the command fails.
    pub async fn command_output(&self, arguments: &[&str]) -> Result<String, HarnessError> {
        let Output { status, stdout, stderr } = self.home.run(arguments).await?;
        if !status.success() {
            let stderr = String::from_utf8_lossy(&stderr).into_owned();
            return Err(HarnessError::Command { command: arguments.join(" "), status, stderr });
        }
        Ok(String::from_utf8_lossy(&stdout).into_owned())
    }

    async fn json<T: serde::de::DeserializeOwned>(&self, arguments: &[&str]) -> Result<T, HarnessError> {
        let printed = self.command_output(arguments).await?;
        let command = arguments.join(" ");
        serde_json::from_str(&printed).map_err(|source| HarnessError::UnexpectedOutput {
            command,
            printed,
            source,
        })
    }

    /// Starts the supervisor again after it has exited.
    pub fn restart(&mut self) -> Result<(), HarnessError> {
        let config = self.home.path().join("config.yaml").to_string_lossy().into_owned();
        let (child, process) = serve(&self.home, &config, Stdio::inherit())?;
        (self.child, self.process) = (child, process);
        Ok(())
    }

    /// Runs `shadowslice upgrade`. Returns the previous supervisor, which may still run for a
    /// while.
    pub async fn upgrade(&mut self) -> Result<ProcessHandle, HarnessError> {
        let output = self.command_output(&["upgrade"]).await?;
        self.follow(&output)
    }

    /// Continues with the supervisor whose PID is in `output`. Returns the previous supervisor.
    pub fn follow(&mut self, output: &str) -> Result<ProcessHandle, HarnessError> {
        let next = output.split_whitespace().find_map(|word| word.parse().ok()).and_then(ProcessHandle::of);
        let next = next.ok_or_else(|| self.timed_out(&format!("a process in `{output}`")))?;
        Ok(std::mem::replace(&mut self.process, next))
    }

    /// Waits until the supervisor exits, and returns its exit status. After an upgrade, the
    /// returned status is always 0, because only the parent of the process can read the real
    /// status.
    pub async fn wait_exit(&mut self) -> Result<ExitStatus, HarnessError> {
        if self.child.id() != u32::try_from(self.process.pid).ok() {
            let process = self.process;
            self.wait_gone(process).await?;
            return Ok(ExitStatus::default());
        }
        let ended = timeout(self.home.timeout(), self.child.wait()).await;
        let ended = ended.map_err(|_| self.timed_out("the exit of the supervisor"))?;
        ended.map_err(|source| HarnessError::Io { what: "wait for the supervisor".into(), source })
    }

    /// Stops the supervisor with SIGTERM. Returns an error unless the supervisor exits with 0 and
    /// leaves no process, socket or temporary file behind.
    pub async fn stop(mut self) -> Result<(), HarnessError> {
        let children = self.children();
        self.signal(Signal::SIGTERM)?;
        let status = self.wait_exit().await?;
        if !status.success() {
            return Err(HarnessError::Exited { status, log: self.log() });
        }
        let left = left_behind(&self.home, &children);
        if left.is_empty() { Ok(()) } else { Err(HarnessError::LeftBehind(left)) }
    }

    pub fn signal(&self, signal: Signal) -> Result<(), HarnessError> {
        let what = || format!("send {signal} to the supervisor");
        self.process.signal(signal).map_err(|errno| HarnessError::Io { what: what(), source: errno.into() })
    }
}

fn serve(home: &Home, config: &str, stderr: Stdio) -> Result<(Child, ProcessHandle), HarnessError> {
    let failed = |source| HarnessError::Io { what: "start `shadowslice serve`".into(), source };
    let mut command = home.command(&["serve", config])?;
    let child = command.stdout(Stdio::null()).stderr(stderr).process_group(0).spawn().map_err(failed)?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    let process = pid.and_then(ProcessHandle::of).ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
    Ok((child, process))
}

impl Drop for ServerUnderTest {
    fn drop(&mut self) {
        let children = self.children();
        // Signals fail only if the process has exited, so the errors are ignored.
        let _ = self.child.start_kill();
        let _ = self.process.signal(Signal::SIGKILL);
        for child in children {
            let _ = child.signal(Signal::SIGKILL);
        }
    }
}
