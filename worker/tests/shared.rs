//! Tests of a shared worker: members that join, serve, fail and leave.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use command_fds::{CommandFdExt, FdMapping};
use shadowslice_shared::boot::descriptors;
use shadowslice_shared::members::{JoinRequest, LIFELINE, MEMBERS, MembersCommand, SharedSetup};
use shadowslice_shared::passing;
use support::{Setup, Worker, WorkerSockets, echo, echo_warm_up, fp32, reference, strings};

struct SharedWorker {
    process: Child,
    socket: OwnedFd,
}

impl SharedWorker {
    fn start() -> Self {
        let (socket, theirs) = passing::socket_pair().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_shadowslice-worker"));
        command.arg("--shared").stderr(Stdio::piped());
        command.fd_mappings(vec![FdMapping { parent_fd: theirs, child_fd: MEMBERS }]).unwrap();
        let process = command.spawn().unwrap();
        let shared = Self { process, socket };
        let setup = SharedSetup { library: None, engines: None, on_gpu: false };
        shared.send(&MembersCommand::Setup(setup), &[]);
        shared
    }

    fn send(&self, command: &MembersCommand, files: &[BorrowedFd<'_>]) {
        passing::send(&self.socket, command, files).unwrap();
    }

    /// Adds a member with these descriptors, and returns its lifeline.
    fn join(&self, files: &[(i32, BorrowedFd<'_>)]) -> std::io::PipeReader {
        let (lifeline, theirs) = std::io::pipe().unwrap();
        let files: Vec<_> = files.iter().copied().chain([(LIFELINE, theirs.as_fd())]).collect();
        let request = JoinRequest {
            model: "member".to_owned(),
            descriptors: files.iter().map(|(number, _)| *number).collect(),
            low_priority: false,
        };
        self.send(&MembersCommand::Join(request), &files.iter().map(|(_, file)| *file).collect::<Vec<_>>());
        lifeline
    }

    /// Adds a member that is ready to serve the echo model.
    fn serving_member(&self) -> (Worker, std::io::PipeReader) {
        let reference = reference(&echo(), &echo_warm_up());
        let sockets = WorkerSockets::new();
        let files = sockets.files(&reference);
        let files: Vec<_> = files.iter().map(|(file, number)| (*number, file.as_fd())).collect();
        let lifeline = self.join(&files);
        let worker = Worker::connect(Setup::new(echo()), sockets, None);
        worker.load().unwrap();
        worker.warm(echo_warm_up()).unwrap();
        (worker, lifeline)
    }

    /// Closes the socket, and waits for the exit.
    fn end(self) -> (Option<i32>, String) {
        drop(self.socket);
        let output = self.process.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }
}

/// Waits until a member has ended, and returns its exit code. `None` means that its process has died.
fn ended(mut lifeline: std::io::PipeReader) -> Option<u8> {
    let mut code = Vec::new();
    lifeline.read_to_end(&mut code).unwrap();
    code.first().copied()
}

fn answers(worker: &Worker) {
    let batch = worker.batch(&[&[4], &[1]], &[(1, vec![fp32(&[1.0, 2.0, 3.0, 4.0]), strings(&[b"a"])])]);
    assert_eq!(worker.run(&batch).unwrap()[0].1[0], fp32(&[1.0, 2.0, 3.0, 4.0]));
}

#[test]
fn members_serve_side_by_side_and_leave_one_by_one() {
    let shared = SharedWorker::start();
    let (first, first_lifeline) = shared.serving_member();
    let (second, second_lifeline) = shared.serving_member();
    answers(&first);
    answers(&second);
    drop(first);
    assert_eq!(ended(first_lifeline), Some(0));
    answers(&second);
    let (third, third_lifeline) = shared.serving_member();
    answers(&third);
    drop((second, third));
    assert_eq!((ended(second_lifeline), ended(third_lifeline)), (Some(0), Some(0)));
    assert_eq!(shared.end(), (Some(0), String::new()));
}

#[test]
fn a_member_without_its_descriptors_ends_alone() {
    let shared = SharedWorker::start();
    let (serving, lifeline) = shared.serving_member();
    let (boot, theirs) = UnixStream::pair().unwrap();
    assert_eq!(ended(shared.join(&[(descriptors::BOOT, theirs.as_fd())])), Some(1));
    assert_eq!(ended(shared.join(&[])), Some(1));
    drop((boot, theirs));
    answers(&serving);
    drop(serving);
    assert_eq!(ended(lifeline), Some(0));
    let (code, stderr) = shared.end();
    assert_eq!((code, stderr.matches("did not pass descriptor").count()), (Some(0), 2), "{stderr}");
}

#[test]
fn the_process_waits_for_its_members_and_dies_with_all_of_them() {
    let shared = SharedWorker::start();
    let (serving, lifeline) = shared.serving_member();
    let SharedWorker { mut process, socket } = shared;
    drop(socket);
    answers(&serving);
    process.kill().unwrap();
    process.wait().unwrap();
    assert_eq!(ended(lifeline), None);
    drop(serving);
}

#[test]
fn an_invalid_message_ends_the_process() {
    let shared = SharedWorker::start();
    passing::send(&shared.socket, &[u64::MAX; 40].to_vec(), &[]).unwrap();
    let output = shared.process.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("cannot read a message about a shared worker's models"), "{stderr}");
}
