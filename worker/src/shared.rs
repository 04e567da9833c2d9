//! A shared worker: one process for several models. Each model is a member, with a thread that does
//! what the main thread of a worker with one model does.
//!
//! Members have separate sockets, slabs, streams and memory. They share the process's sandbox, the
//! engine's library and the context on the GPU. If a member loses the GPU, all members have lost it, so
//! the process exits.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::process::setpriority_process;
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::errors::chain;
use shadowslice_shared::members::{JoinRequest, LIFELINE, MembersCommand, SharedSetup};
use shadowslice_shared::passing::{self, FileMessage};

use crate::boot::{ConnectedWorker, WorkerError, exit_code, log_unwatched, watch_parent};
use crate::descriptors::{adopt_from, adopt_members_socket};
use crate::device::cuda::CudaGpu;
use crate::engine::{Library, load_shared_library};
use crate::parent::ParentProcess;
use crate::serve::ServeError;
use crate::{log_line, sandbox};

/// The exit code of a member whose thread panicked, as for a process that panics.
const PANICKED: u8 = 101;

/// The lowest CPU priority, with which a member loads its model while other members serve.
const LOWEST_PRIORITY: i32 = 19;

/// The parts of the process that all members use.
#[derive(Debug)]
pub struct SharedResources {
    /// The engine's library, or the reason why it cannot be used. `None` if no member needs a library.
    pub(crate) library: Result<Option<Library>, BootRefusal>,
    /// The context on the GPU, which stays while the process runs. `None` without a real GPU.
    _gpu: Option<Arc<CudaGpu>>,
}

/// Runs a shared worker until the supervisor has closed its socket and all members have ended. Returns
/// the exit code. If `user` is given, the process first changes to that user.
pub fn run(user: Option<u32>) -> u8 {
    match try_run(user) {
        Ok(()) => 0,
        Err(error) => exit_code(&error),
    }
}

fn try_run(user: Option<u32>) -> Result<(), WorkerError> {
    sandbox::begin(user)?;
    let socket = adopt_members_socket().map_err(WorkerError::Connect)?;
    let parent = ParentProcess::find().unwrap_or_else(log_unwatched);
    let Some(FileMessage { content: MembersCommand::Setup(setup), .. }) = next(&socket)? else {
        return Err(WorkerError::SupervisorGone);
    };
    let resources = Arc::new(SharedResources::prepare(&setup, parent));
    let mut members: Vec<JoinHandle<()>> = Vec::new();
    while let Some(FileMessage { content, files }) = next(&socket)? {
        let MembersCommand::Join(request) = content else { continue };
        members.retain(|member| !member.is_finished());
        let resources = Arc::clone(&resources);
        let member = std::thread::Builder::new()
            .name(request.model.clone())
            .spawn(move || run_member(&request, files, resources));
        match member {
            Ok(member) => members.push(member),
            // The descriptors are closed, so the supervisor notices that the member has ended.
            Err(error) => log_line(&format!("error: cannot start a thread for another model: {error}")),
        }
    }
    for member in members {
        // A member catches its panics.
        member.join().ok();
    }
    Ok(())
}

/// Waits for the supervisor's next message. Returns `None` if the supervisor has closed the socket.
fn next(socket: &OwnedFd) -> Result<Option<FileMessage<MembersCommand>>, WorkerError> {
    let mut watched = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    while poll(&mut watched, PollTimeout::NONE) == Err(Errno::EINTR) {}
    passing::receive(socket).map_err(|error| {
        log_line(&format!("error: cannot read a message about a shared worker's models: {error}"));
        WorkerError::SupervisorGone
    })
}

impl SharedResources {
    /// Enters the sandbox, loads the engine's library and opens the GPU.
    fn prepare(setup: &SharedSetup, parent: Option<ParentProcess>) -> Self {
        let folders = sandbox::shared_folders(setup.engines.as_deref(), setup.on_gpu);
        for breach in sandbox::enter(&folders) {
            log_line(&chain(&breach));
        }
        watch_parent(parent);
        let library = setup.library.as_deref();
        let library = library.map(|library| load_shared_library(library, setup.on_gpu)).transpose();
        let opened = if setup.on_gpu { CudaGpu::open().map(Some) } else { Ok(None) };
        if let Err(breach) = sandbox::deny_connections() {
            log_line(&chain(&breach));
        }
        match opened {
            Ok(gpu) => Self { library, _gpu: gpu },
            Err(refusal) => Self { library: library.and(Err(refusal)), _gpu: None },
        }
    }
}

/// Runs a member until it ends, and then writes its exit code to its lifeline.
fn run_member(request: &JoinRequest, files: Vec<OwnedFd>, resources: Arc<SharedResources>) {
    let mut files = request.descriptors.iter().copied().zip(files).collect::<BTreeMap<_, _>>();
    let lifeline = files.remove(&LIFELINE);
    if request.low_priority {
        // If this fails, the load only takes more CPU time from serving members.
        setpriority_process(None, LOWEST_PRIORITY).ok();
    }
    let member = || {
        let (boot, descriptors) = adopt_from(files).map_err(WorkerError::Connect)?;
        ConnectedWorker::join(boot, descriptors, resources)?.run()
    };
    let code = match catch_unwind(AssertUnwindSafe(member)) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            let code = exit_code(&error);
            if let WorkerError::Serve(ServeError::Gpu(_)) = error {
                // SIGKILL is needed, because CUDA's exit handlers could hang. An error is ignored,
                // because no other call could end the process.
                kill(Pid::this(), Signal::SIGKILL).ok();
            }
            code
        }
        Err(_) => PANICKED,
    };
    if let Some(lifeline) = lifeline {
        // If the supervisor has exited, no process reads the code.
        File::from(lifeline).write_all(&[code]).ok();
    }
}
