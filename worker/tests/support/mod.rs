//! A minimal supervisor for tests. It starts the real worker, boots it and sends it batches.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "only tests use it")]

pub mod onnx;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{self, Child, ExitStatus, Stdio};

use command_fds::{CommandFdExt, FdMapping};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use shadowslice_shared::batch::{
    Batch, BatchAnswer, BatchRequest, Command, Extent, IN_FLIGHT, MAX_MESSAGE_BYTES, RunFailure,
    WorkerMessage, decode, encode,
};
use shadowslice_shared::boot::{
    Assignment, BootCommand, BootRefusal, BootReply, DeviceSpec, EchoTensor, EngineSpec, LoadedModel,
    PROTOCOL, PartitionSpec, ProvenPartitions, ProviderSpec, SHARE_VARIABLE, WarmUp, WarmUpReport,
    WorkerPurpose, descriptors,
};
use shadowslice_shared::frame;
use shadowslice_shared::groups::Groups;
use shadowslice_shared::pool::Pool;
use shadowslice_shared::profile::Profile;
use shadowslice_shared::slab::{AnswerSlab, WritableSlab};
use shadowslice_shared::tensor::{Datatype, TensorSpec};
use shadowslice_shared::units::Sms;

pub const REQUEST_BYTES: u64 = 64 << 20;
pub const SLOT_BYTES: u64 = 1 << 18;

/// An output: its shape without the batch axis, and the bytes of each request's part.
pub type Tensor = (Vec<i64>, Vec<Vec<u8>>);

/// The parameters with which a test starts a worker.
pub struct Setup {
    pub engine: EngineSpec,
    pub purpose: WorkerPurpose,
    pub profile: Option<Profile>,
    pub share: Option<&'static str>,
    pub seat: u32,
    pub partition: Option<PartitionSpec>,
}

impl Setup {
    pub fn new(engine: EngineSpec) -> Self {
        Self { engine, purpose: WorkerPurpose::Serve, profile: None, share: None, seat: 0, partition: None }
    }
}

/// A started worker, and the supervisor's ends of the sockets and the memory that it shares with
/// the worker.
pub struct Worker {
    /// The process, or `None` for a member of a shared worker.
    pub child: Option<Child>,
    pub boot: UnixStream,
    pub socket: OwnedFd,
    pub requests: WritableSlab,
    pub responses: AnswerSlab,
    pub pool: Pool,
    assignment: Assignment,
}

/// Both ends of a worker's sockets, and its memory.
pub struct WorkerSockets {
    boot: (UnixStream, UnixStream),
    batches: (OwnedFd, OwnedFd),
    requests: WritableSlab,
    responses: AnswerSlab,
    pool: Pool,
}

impl WorkerSockets {
    pub fn new() -> Self {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let batches = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
        nix::fcntl::fcntl(&batches.0, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty())).unwrap();
        Self {
            boot: UnixStream::pair().unwrap(),
            batches,
            requests: WritableSlab::create("requests", REQUEST_BYTES).unwrap(),
            responses: AnswerSlab::create("responses", SLOT_BYTES * IN_FLIGHT as u64).unwrap(),
            pool: Pool::create().unwrap(),
        }
    }

    /// Returns copies of the descriptors that the worker gets, with their numbers.
    pub fn files(&self, reference: &File) -> Vec<(OwnedFd, i32)> {
        let copy = |file: &dyn AsFd| file.as_fd().try_clone_to_owned().unwrap();
        vec![
            (copy(&self.batches.1), descriptors::BATCHES),
            (copy(&self.boot.1), descriptors::BOOT),
            (copy(&self.requests), descriptors::REQUESTS),
            (copy(&self.responses), descriptors::RESPONSES),
            (copy(reference), descriptors::REFERENCE),
            (copy(&self.pool), descriptors::POOL),
        ]
    }
}

/// Creates an empty file for reference answers.
pub fn reference_file() -> File {
    File::from(memfd_create("reference", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap())
}

impl Worker {
    /// Starts a worker, and receives its hello.
    pub fn start(setup: Setup, reference: &File) -> Self {
        let sockets = WorkerSockets::new();
        let mut command = process::Command::new(env!("CARGO_BIN_EXE_shadowslice-worker"));
        command.arg("--boot").env_remove(SHARE_VARIABLE).stderr(Stdio::piped());
        // As in the supervisor, this variable must be set before ONNX Runtime is loaded, because
        // the library sends telemetry from that moment.
        command.env("ORT_DISABLE_TELEMETRY", "1");
        if let Some(share) = setup.share {
            command.env(SHARE_VARIABLE, share);
        }
        let mapping = |(parent_fd, child_fd)| FdMapping { parent_fd, child_fd };
        command.fd_mappings(sockets.files(reference).into_iter().map(mapping).collect()).unwrap();
        let child = command.spawn().unwrap();
        Self::connect(setup, sockets, Some(child))
    }

    /// Receives the hello of a worker that has the descriptors of these sockets.
    pub fn connect(setup: Setup, sockets: WorkerSockets, child: Option<Child>) -> Self {
        // The worker's ends are dropped, so that the test detects when the worker closes its own.
        let WorkerSockets { boot: (boot, _), batches: (socket, _), requests, responses, pool } = sockets;
        let hello = frame::receive(&boot).unwrap();
        let BootReply::Hello { protocol: PROTOCOL, .. } = hello else { panic!("{hello:?}") };
        let assignment = Assignment {
            model: "test".into(),
            purpose: setup.purpose,
            engine: setup.engine,
            device: if on_gpu() {
                DeviceSpec::Cuda
            } else {
                DeviceSpec::Emulated { sms: Sms(132), seat: setup.seat }
            },
            profile: setup.profile,
            request_bytes: REQUEST_BYTES,
            pinned_request_bytes: REQUEST_BYTES,
            response_slot_bytes: SLOT_BYTES,
            partition: setup.partition,
        };
        Self { child, boot, socket, requests, responses, pool, assignment }
    }

    pub fn order(&self, order: BootCommand) {
        frame::send(&self.boot, &order).unwrap();
    }

    /// Returns the next message from the worker. Skips messages about the progress of the warm-up.
    pub fn says(&self) -> io::Result<BootReply> {
        loop {
            match frame::receive(&self.boot)? {
                BootReply::Warming { .. } => {}
                message => return Ok(message),
            }
        }
    }

    /// Orders the worker to load its model.
    pub fn order_load(&self) {
        self.order(BootCommand::Load(Box::new(self.assignment.clone())));
    }

    /// Makes the worker load its model. Returns the loaded model, or the worker's reason for
    /// refusing it.
    pub fn load(&self) -> Result<LoadedModel, BootRefusal> {
        self.order_load();
        match self.says().unwrap() {
            BootReply::Loaded(loaded) => Ok(loaded),
            BootReply::Refused(refusal) => Err(refusal),
            other => panic!("{other:?}"),
        }
    }

    /// Makes the worker warm up and run the proof, and returns the proven partitions.
    pub fn warm(&self, warm_up: WarmUp) -> Result<Option<ProvenPartitions>, BootRefusal> {
        self.order(BootCommand::Warm(warm_up));
        match self.says().unwrap() {
            BootReply::Warmed(WarmUpReport { times, partitions, .. }) => {
                assert!(!times.is_empty());
                Ok(partitions)
            }
            BootReply::Refused(refusal) => Err(refusal),
            other => panic!("{other:?}"),
        }
    }

    /// Sends arbitrary bytes as a message.
    pub fn send_bytes(&self, bytes: &[u8]) {
        send(self.socket.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL).unwrap();
    }

    pub fn command(&self, command: &Command) {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        self.send_bytes(encode(command, &mut buffer).unwrap());
    }

    pub fn send(&self, batch: &Batch) {
        self.command(&Command::Run(batch.clone()));
    }

    pub fn report(&self) -> WorkerMessage {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let len = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty()).unwrap();
        assert_ne!(len, 0, "the worker has ended");
        decode(&buffer[..len]).unwrap()
    }

    pub fn receive(&self) -> BatchAnswer {
        match self.report() {
            WorkerMessage::Answer(answer) => answer,
            other => panic!("{other:?}"),
        }
    }

    /// Makes the worker prepare a partition. Returns the reason if the worker cannot prepare it.
    pub fn prepare(&self, groups: Groups) -> Result<(), String> {
        self.command(&Command::Prepare(groups));
        match self.report() {
            WorkerMessage::Prepared(prepared) => {
                assert_eq!(prepared.groups, groups);
                prepared.result
            }
            other => panic!("{other:?}"),
        }
    }

    /// Writes requests into the slab, one input after the other. A request is its number of rows
    /// and the bytes of each of its inputs. Returns the batch of these requests.
    pub fn batch(&self, shapes: &[&[i64]], requests: &[(u32, Vec<Vec<u8>>)]) -> Batch {
        let mut end = 0_u64;
        let mut put = |bytes: &Vec<u8>| {
            let extent = Extent { offset: end, len: bytes.len() as u64 };
            self.requests.write(extent.offset, bytes).unwrap();
            end = (end + extent.len).next_multiple_of(64);
            extent
        };
        let requests = requests.iter().map(|(rows, inputs)| BatchRequest {
            rows: *rows,
            inputs: inputs.iter().map(&mut put).collect(),
        });
        let requests = requests.collect();
        Batch {
            id: 7,
            slot: 0,
            sent_ns: 0,
            groups: Groups::WHOLE,
            shapes: shapes.iter().map(|shape| shape.to_vec()).collect(),
            requests,
            optional: Vec::new(),
        }
    }

    /// Runs a batch, and returns its outputs.
    pub fn run(&self, batch: &Batch) -> Result<Vec<Tensor>, RunFailure> {
        self.send(batch);
        let answer = self.receive();
        assert_eq!(answer.id, batch.id);
        self.read(answer)
    }

    /// Reads the outputs of an answer from the slab, or returns the answer's failure.
    pub fn read(&self, answer: BatchAnswer) -> Result<Vec<Tensor>, RunFailure> {
        let part = |part: &Extent| {
            assert_eq!(part.offset % 64, 0, "parts are aligned");
            self.responses.copy(part.offset, part.len).unwrap()
        };
        let outputs = answer.result?;
        Ok(outputs
            .into_iter()
            .map(|output| (output.shape, output.parts.iter().map(part).collect()))
            .collect())
    }

    /// Closes the worker's socket, and waits for the worker to exit.
    pub fn stop(self) -> ExitStatus {
        let Self { child, socket, .. } = self;
        drop(socket);
        child.unwrap().wait().unwrap()
    }

    /// Closes everything that the kernel closes when a supervisor dies, and waits until the worker
    /// exits. Returns the exit status and stderr of the worker.
    pub fn abandon(self) -> (ExitStatus, String) {
        let Self { child, boot, socket, .. } = self;
        drop((boot, socket));
        ended(child.unwrap())
    }

    /// Waits until the worker exits on its own. Returns its exit status and its stderr.
    pub fn end(self) -> (ExitStatus, String) {
        let Self { child, socket: _socket, .. } = self;
        ended(child.unwrap())
    }
}

fn ended(child: Child) -> (ExitStatus, String) {
    let output = child.wait_with_output().unwrap();
    (output.status, String::from_utf8(output.stderr).unwrap())
}

/// Computes the reference answers with a reference worker, as the supervisor does.
pub fn reference(engine: &EngineSpec, warm_up: &WarmUp) -> File {
    let file = reference_file();
    let worker =
        Worker::start(Setup { purpose: WorkerPurpose::Reference, ..Setup::new(engine.clone()) }, &file);
    worker.load().unwrap();
    worker.warm(warm_up.clone()).unwrap();
    assert!(worker.end().0.success(), "a reference worker ends by itself");
    assert_ne!(file.metadata().unwrap().len(), 0);
    file
}

/// Returns a worker that has passed the proof and is ready to serve.
pub fn serving(setup: Setup, warm_up: &WarmUp) -> Worker {
    let reference = reference(&setup.engine, warm_up);
    let worker = Worker::start(setup, &reference);
    worker.load().unwrap();
    worker.warm(warm_up.clone()).unwrap();
    worker
}

/// Flips the last byte of a file, so that its content is wrong.
pub fn corrupt(file: &File) {
    let last = file.metadata().unwrap().len() - 1;
    let mut byte = [0];
    file.read_exact_at(&mut byte, last).unwrap();
    file.write_all_at(&[!byte[0]], last).unwrap();
}

/// Returns the emulated engine with two inputs: an FP32 tensor of four elements, and a string.
pub fn echo() -> EngineSpec {
    let tensor = |input: &str, output: &str, datatype, shape: &[i64]| EchoTensor {
        input: TensorSpec { name: input.into(), datatype, shape: shape.to_vec() },
        output: output.into(),
    };
    let tensors = vec![tensor("x", "y", Datatype::Fp32, &[4]), tensor("s", "t", Datatype::Bytes, &[-1])];
    EngineSpec::Emulated { tensors, batched: true }
}

/// Returns the warm-up of [`echo`].
pub fn echo_warm_up() -> WarmUp {
    WarmUp {
        batched: true,
        sizes: vec![1, 2, 8],
        shapes: vec![vec![4], vec![1]],
        values: vec![None, None],
        ..WarmUp::default()
    }
}

/// Returns true if the tests run on a real GPU. The variable `SHADOWSLICE_TEST_DEVICE=cuda` selects
/// it.
pub fn on_gpu() -> bool {
    std::env::var_os("SHADOWSLICE_TEST_DEVICE").is_some_and(|device| device == "cuda")
}

/// Returns the ONNX Runtime engine for a model's file, with the CUDA provider if the tests run on a
/// real GPU.
pub fn onnxruntime(path: PathBuf) -> EngineSpec {
    let providers = if on_gpu() { vec![ProviderSpec::Cuda] } else { vec![] };
    EngineSpec::OnnxRuntime { library: library(), path, threads: 1, providers, optimised: None }
}

/// Returns the path of ONNX Runtime's library: the value of `ORT_DYLIB_PATH`, or the library that
/// `make` installs if that variable is not set.
pub fn library() -> PathBuf {
    let path = match std::env::var_os("ORT_DYLIB_PATH") {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/onnxruntime/libonnxruntime.so"),
    };
    let found = path.try_exists().unwrap();
    assert!(found, "ONNX Runtime's library is not at {}; run `make` or set ORT_DYLIB_PATH", path.display());
    path
}

/// Returns the little-endian bytes of floats.
pub fn fp32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns a tensor of strings in the protocol's encoding.
pub fn strings(values: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        shadowslice_shared::tensor::push_byte_string(&mut bytes, value);
    }
    bytes
}
