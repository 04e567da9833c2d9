//! The MPS control daemon, from its start to its end.

use std::io;
use std::os::fd::OwnedFd;
use std::process::{ExitStatus, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rustix::process::pidfd_send_signal;
use shadowslice_shared::errors;
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, ChildStdin};

use super::control::Control;
use super::directories::Directories;
use crate::backend::command;
use crate::process::watch;

/// The script of the guardian, which stops the daemon if this process is killed, because then the
/// guardian's input ends. The daemon itself continues without an input. The script uses `quit`,
/// because a signal could interrupt a client's kernel.
const GUARDIAN: &str = "while read -r _; do :; done; echo quit | \"$0\" >/dev/null 2>&1";

/// The option with which a server accepts clients of several users.
const SEVERAL_USERS: &str = "-multiuser-server";

#[derive(Debug)]
pub(super) struct Daemon {
    process: Process,
    group: Option<Pid>,
    _input: Option<ChildStdin>,
    guardian: Option<Child>,
}

#[derive(Debug)]
enum Process {
    Child(Child),
    /// The pidfd of a daemon that the previous supervisor started. It is readable after the exit.
    Adopted(AsyncFd<OwnedFd>),
}

impl Daemon {
    /// Starts a daemon, which accepts commands some time later.
    pub(super) fn start(control: &Control) -> io::Result<Self> {
        let mut command = command::command(&control.program, &control.environment)?;
        // The daemon writes important messages to its log.
        if control.several_users {
            command.arg(SEVERAL_USERS);
        }
        // Another supervisor may have taken the daemon over by the time this is dropped.
        let command = command.arg("-f").kill_on_drop(false);
        let mut child = command::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))?;
        let group = child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw);
        let input = child.stdin.take();
        Ok(Self { process: Process::Child(child), group, _input: input, guardian: guardian(control) })
    }

    /// Adopts a daemon of another supervisor, which keeps the daemon until [`Daemon::keep`].
    pub(super) fn adopt(pid: i32) -> io::Result<Self> {
        Ok(Self {
            process: Process::Adopted(watch(pid)?),
            group: Some(Pid::from_raw(pid)),
            _input: None,
            guardian: None,
        })
    }

    /// Starts a guardian, so that the daemon ends with this process.
    pub(super) fn keep(&mut self, control: &Control) {
        self.guardian = guardian(control);
    }

    /// Leaves the daemon to the supervisor that has adopted it.
    pub(super) async fn pass(&mut self) {
        if let Some(mut guardian) = self.guardian.take() {
            // An error means that the guardian has exited.
            guardian.kill().await.ok();
        }
    }

    pub(super) fn pid(&self) -> Option<i32> {
        self.group.map(Pid::as_raw)
    }

    /// Waits until the daemon exits. This function is cancel-safe.
    pub(super) async fn wait_exit(&mut self) -> io::Result<ExitStatus> {
        match &mut self.process {
            Process::Child(child) => child.wait().await,
            Process::Adopted(process) => {
                process.readable().await?.retain_ready();
                // Only the parent of a process can read its exit status.
                Ok(ExitStatus::default())
            }
        }
    }

    /// Stops the daemon with `quit`, unless `at_once` is set. Then kills the remaining processes.
    pub(super) async fn stop(mut self, control: &Control, directories: &Directories, at_once: bool) {
        if !at_once {
            let quit = async {
                control.quit().await.map_err(|error| errors::chain(&error))?;
                let exit = tokio::time::timeout(control.limits.quit, self.wait_exit()).await;
                exit.map(drop).map_err(|_| "the daemon accepted `quit` but did not exit in time".to_owned())
            };
            if let Err(why) = quit.await {
                tracing::warn!(
                    pid = self.pid(),
                    why,
                    "the MPS control daemon did not quit; killing the daemon and its servers"
                );
            }
        }
        self.kill(control, directories).await;
    }

    /// Kills the daemon and its servers.
    pub(super) async fn kill(mut self, control: &Control, directories: &Directories) {
        match &mut self.process {
            Process::Child(child) => {
                if let (Some(group), Ok(None)) = (self.group, child.try_wait()) {
                    // An error means that no process of the group is left.
                    killpg(group, Signal::SIGKILL).ok();
                }
            }
            // An error means that the daemon has exited. Its servers are killed below.
            Process::Adopted(process) => drop(pidfd_send_signal(process, rustix::process::Signal::KILL)),
        }
        // An error means that the daemon has exited.
        self.wait_exit().await.ok();
        // A server may have its own process group.
        directories.kill_users(&control.program).await;
        if let Some(mut guardian) = self.guardian {
            // An error means that the guardian has exited.
            guardian.kill().await.ok();
        }
    }
}

fn guardian(control: &Control) -> Option<Child> {
    let command = command::command(std::path::Path::new("/bin/sh"), &control.environment);
    let started = command.and_then(|mut command| {
        let command = command.args(["-c", GUARDIAN]).arg(&control.program);
        command::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))
    });
    match started {
        Ok(guardian) => Some(guardian),
        Err(error) => {
            tracing::warn!(
                %error,
                "cannot start the process that stops the MPS control daemon if the supervisor is killed; after a kill, the daemon runs until the supervisor starts again"
            );
            None
        }
    }
}
