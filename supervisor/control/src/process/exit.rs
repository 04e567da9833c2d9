//! The end of worker processes, and of a model's part of a shared worker.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::ids::WorkerId;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::pid_files::PidFile;
use super::shared::SharedProcess;
use super::spawn::Child;
use super::worker::{WorkerEvent, WorkerSaid};
use crate::backend::Grant;

/// The time within which a boot must notice that its worker has exited.
const BOOT_END_TIMEOUT: Duration = Duration::from_secs(1);

/// The reason why a process has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndCause {
    /// The process exited or crashed, or was killed by another program.
    Itself,
    /// The supervisor killed the process because of this worker.
    KilledFor(WorkerId),
    /// The process lost its GPU context, because the MPS server ended.
    GpuLost,
}

/// The end of a worker.
#[derive(Debug)]
pub struct WorkerEnd {
    pub status: io::Result<ExitStatus>,
    /// The reason why a shared worker has ended, with all its models. `None` if the process ran only
    /// this worker, or continues.
    pub shared: Option<EndCause>,
}

/// A running worker process.
pub(super) struct Process {
    /// The name of the model or of the shared worker, for the log.
    pub(super) name: String,
    pub(super) child: Child,
    pub(super) pid: i32,
    pub(super) grant: Arc<Grant>,
    pub(super) _entry: Option<PidFile>,
}

impl Process {
    /// Waits for the exit. Kills the process on request, or when it has lost its GPU context.
    pub(super) async fn wait_exit(
        &mut self,
        kill: impl Future<Output = EndCause>,
    ) -> (io::Result<ExitStatus>, EndCause) {
        let cause = tokio::select! {
            status = self.child.wait() => return (status, EndCause::Itself),
            cause = kill => cause,
            () = self.grant.lost() => {
                let (name, pid) = (&self.name, self.pid);
                tracing::warn!(name, pid, "killing and replacing a worker that lost its GPU context");
                return (self.kill().await, EndCause::GpuLost);
            }
        };
        // Interrupting a kernel could break all other workers on the GPU.
        if let Some(terminated) = self.grant.terminate(self.pid) {
            tokio::select! {
                status = self.child.wait() => return (status, cause),
                () = terminated => {}
            }
        }
        (self.kill().await, cause)
    }

    async fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait().await
    }
}

/// The tasks and channels of a worker whose end is awaited.
pub(super) struct EndWatch {
    pub(super) worker: WorkerId,
    pub(super) pid: i32,
    pub(super) boot: JoinHandle<()>,
    pub(super) kill_rx: mpsc::Receiver<Kill>,
    pub(super) events: mpsc::Sender<WorkerEvent>,
}

/// An order to kill a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kill {
    /// The worker has never served. In a shared worker, it only loses its sockets at first.
    Starting,
    Serving,
}

impl EndWatch {
    /// Reports the end of a process that runs only this worker.
    pub(super) async fn of_process(mut self, mut process: Process) {
        let worker = self.worker;
        let kill = async {
            match self.kill_rx.recv().await {
                Some(_) => EndCause::KilledFor(worker),
                None => std::future::pending().await,
            }
        };
        let (status, _) = process.wait_exit(kill).await;
        process.grant.give_back(process.pid);
        self.report(WorkerEnd { status, shared: None }).await;
    }

    /// Reports the end of a worker in a shared process. `grant` is the worker's part of the GPU.
    pub(super) async fn of_member(
        mut self,
        process: Arc<SharedProcess>,
        mut lifeline: pipe::Receiver,
        grant: Arc<Grant>,
    ) {
        let (mut code, mut kills) = ([0], 0);
        let end = loop {
            tokio::select! {
                read = lifeline.read(&mut code) => {
                    break match read {
                        // An exit code is in the second byte of a wait status.
                        Ok(1) => {
                            let status = ExitStatus::from_raw(i32::from(code[0]) << 8);
                            WorkerEnd { status: Ok(status), shared: None }
                        }
                        _ => process.ended().await,
                    };
                }
                Some(kill) = self.kill_rx.recv() => {
                    kills += 1;
                    // The boot task owns the boot socket, so this closes it.
                    self.boot.abort();
                    if kill == Kill::Serving || kills > 1 {
                        process.kill(self.worker);
                    }
                }
            }
        };
        drop((grant, process));
        self.report(end).await;
    }

    async fn report(mut self, end: WorkerEnd) {
        // The exit is reported after the last event of the boot, which the exit ends.
        if tokio::time::timeout(BOOT_END_TIMEOUT, &mut self.boot).await.is_err() {
            tracing::warn!(
                pid = self.pid,
                "aborting the start task of an exited worker, because the task hangs, which is a bug in shadowslice; please report it with the log"
            );
            self.boot.abort();
        }
        // The controller ends only with the supervisor.
        self.events.send(WorkerEvent { worker: self.worker, said: WorkerSaid::Exited(end) }).await.ok();
    }
}
