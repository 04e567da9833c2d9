//! The loop of a warm worker. It receives batches, runs them and answers them until the supervisor
//! closes the socket.

mod on_gpu;

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use shadowslice_shared::batch::{
    Batch, BatchAnswer, Command, IN_FLIGHT, MAX_MESSAGE_BYTES, PartitionReply, RunFailure, SleepReply,
    StepAnswer, StreamAnswer, StreamStep, UNREADABLE, WorkerMessage, decode, encode,
};
use shadowslice_shared::slab::ReadableSlab;

use crate::answer::AnswerSlots;
use crate::clock::{HungUp, after, now_ns, wait_until};
use crate::device::ComputeDevice;
use crate::device::cuda::CudaError;
use crate::device::cuda::pinned::PinnedSlabs;
use crate::engine::{EngineAnswer, ModelEngine, Signature, StreamResult};
use crate::inputs::Inputs;
use on_gpu::GpuServeLoop;
use shadowslice_shared::errors::chain;

/// The maximum length of an engine's error text, in bytes. Longer texts are truncated, so that
/// every answer fits into a message.
const MAX_REASON_BYTES: usize = 4096;

/// The maximum total length of the error texts of a step, in bytes. It is half of a message.
const MAX_STEP_REASON_BYTES: usize = MAX_MESSAGE_BYTES / 2;

/// A worker that has passed the proof and is ready to serve.
#[derive(Debug)]
pub struct WarmWorker {
    pub(crate) engine: ModelEngine,
    pub(crate) signature: Signature,
    /// True if the first axis of every tensor is the batch axis.
    pub(crate) batched: bool,
    pub(crate) device: ComputeDevice,
    // This must be dropped after the engine and before the slabs.
    pub(crate) pinned: Option<PinnedSlabs>,
    pub(crate) requests: ReadableSlab,
    pub(crate) slots: AnswerSlots,
    pub(crate) socket: OwnedFd,
    /// True if the model's weights are not on the device.
    pub(crate) is_asleep: bool,
}

/// The reasons why a worker stops serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ServeError {
    #[error("cannot {0}; this worker exits, and the supervisor starts another one")]
    Socket(&'static str, #[source] Errno),
    /// The GPU is unusable for this process; another process may still use it.
    #[error(
        "a CUDA error made the GPU unusable for this worker; this worker exits, and the supervisor starts another one"
    )]
    Gpu(#[source] CudaError),
}

impl WarmWorker {
    pub fn serve(self) -> Result<(), ServeError> {
        match self.engine {
            ModelEngine::OnGpu(engine) => {
                let Self { signature, batched, pinned, requests, slots, socket, .. } = self;
                let in_flight = VecDeque::with_capacity(IN_FLIGHT);
                GpuServeLoop {
                    engine: *engine,
                    signature,
                    batched,
                    _pinned: pinned,
                    requests,
                    slots,
                    in_flight,
                    is_asleep: false,
                }
                .serve(&socket)
            }
            _ => self.one_by_one(),
        }
    }

    fn one_by_one(mut self) -> Result<(), ServeError> {
        let mut message = vec![0; MAX_MESSAGE_BYTES];
        while let Some(len) = self.receive(&mut message)? {
            let report = match read_command(&message, len) {
                Ok(Command::Run(batch)) => {
                    let ran = self.run(&batch);
                    if ran.is_err() {
                        // The model may have opened a stream before the worker found that the
                        // answer does not fit. The supervisor does not know about that stream.
                        self.engine.close(batch.id);
                    }
                    WorkerMessage::Answer(self.answered(batch.id, ran)?)
                }
                Ok(Command::Next(step)) => WorkerMessage::Stepped(self.step(&step)?),
                Ok(Command::Close(stream)) => {
                    self.engine.close(stream);
                    continue;
                }
                Ok(Command::Prepare(groups)) => match self.engine.prepare(groups) {
                    Some(PartitionReply { groups, result }) => {
                        let result = result.and_then(|()| self.engine.try_on(groups));
                        WorkerMessage::Prepared(PartitionReply { groups, result })
                    }
                    None => continue,
                },
                Ok(Command::Forget(groups)) => {
                    self.engine.forget(groups, false);
                    continue;
                }
                Ok(Command::Sleep { pin }) => WorkerMessage::Asleep(self.sleep(pin)),
                Ok(Command::Wake) => match self.wake() {
                    Ok(awake) => WorkerMessage::Awake(awake),
                    Err(HungUp) => return Ok(()),
                },
                Err(unreadable) => WorkerMessage::Answer(unreadable),
            };
            if !send_report(&self.socket, &report, &mut message)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Waits for the next message and returns its length. If the message did not fit into the
    /// buffer, the length exceeds that of the buffer. Returns `None` if the supervisor has closed
    /// the socket. Frees the device for other workers only if no batch is already waiting.
    fn receive(&mut self, message: &mut [u8]) -> Result<Option<usize>, ServeError> {
        let socket = self.socket.as_raw_fd();
        let mut received = recv(socket, message, MsgFlags::MSG_TRUNC | MsgFlags::MSG_DONTWAIT);
        if received == Err(Errno::EAGAIN) {
            self.device.idle();
            received = Err(Errno::EINTR);
        }
        while received == Err(Errno::EINTR) {
            received = recv(socket, message, MsgFlags::MSG_TRUNC);
        }
        message_length(received)
    }

    /// Converts the result of a run to an answer. If this process has lost the GPU, the worker
    /// exits without an answer, and the supervisor gives the batch to another worker.
    fn answered(
        &self,
        id: u64,
        ran: Result<(Duration, EngineAnswer), RunFailure>,
    ) -> Result<BatchAnswer, ServeError> {
        let failure = match ran {
            Ok((execution, EngineAnswer { outputs, more })) => {
                return Ok(BatchAnswer { id, execution_us: micros(execution), result: Ok(outputs), more });
            }
            Err(failure) => failure,
        };
        self.check_gpu()?;
        Ok(failed(id, failure))
    }

    /// Returns an error if this process has lost the GPU.
    fn check_gpu(&self) -> Result<(), ServeError> {
        self.device.gpu().map_or(Ok(()), |gpu| gpu.synchronize().map_err(ServeError::Gpu))
    }

    fn sleep(&mut self, pin: bool) -> Result<SleepReply, String> {
        let begun_ns = now_ns();
        let slept = match self.device.emulated() {
            Some(gpu) => {
                let released = gpu.weights();
                SleepReply { released, pinned: if pin { released } else { 0 }, ..SleepReply::default() }
            }
            None => self.engine.sleep(pin)?,
        };
        self.is_asleep = true;
        Ok(SleepReply { took_us: micros_since(begun_ns), ..slept })
    }

    fn wake(&mut self) -> Result<Result<u64, String>, HungUp> {
        let begun_ns = now_ns();
        let woken = match self.device.emulated() {
            Some(gpu) => gpu.wake().map_err(|error| error.to_string()),
            None => self.engine.wake().map(|()| Duration::ZERO),
        };
        let took = match woken {
            Ok(took) => took,
            Err(why) => return Ok(Err(why)),
        };
        wait_until(after(begun_ns, took), &self.socket)?;
        self.is_asleep = false;
        Ok(Ok(micros_since(begun_ns)))
    }

    /// Runs a batch. If the batch fails, it takes no time on the device.
    fn run(&mut self, batch: &Batch) -> Result<(Duration, EngineAnswer), RunFailure> {
        if self.is_asleep {
            return Err(RunFailure::Asleep);
        }
        let inputs = Inputs::check(batch, &self.requests, self.signature.all_inputs(), self.batched)?;
        let started = self.device.start(inputs.rows().unwrap_or(1), batch.groups, batch.sent_ns);
        let ran = self.engine.run(&inputs, &mut self.slots.slot(batch.slot))?;
        Ok((self.device.finish(started), ran))
    }

    /// Advances the streams of a step. A step in which every stream fails takes no time on the device.
    fn step(&mut self, step: &StreamStep) -> Result<StepAnswer, ServeError> {
        let StreamStep { id, slot, groups, sent_ns, ref streams } = *step;
        if usize::from(slot) >= IN_FLIGHT {
            let why = RunFailure::BadBatch(format!("slot {slot} does not exist"));
            return Ok(failed_step(id, streams.len(), &why));
        }
        let rows = u32::try_from(streams.len()).unwrap_or(u32::MAX);
        let started = self.device.start(rows, groups, sent_ns);
        let results = self.engine.step(step, &mut self.slots.slot(slot));
        let execution_us = match results.iter().any(Result::is_ok) {
            true => micros(self.device.finish(started)),
            false => 0,
        };
        if results.iter().any(Result::is_err) {
            self.check_gpu()?;
        }
        let answers = results.into_iter().map(|result| stream_answer(result, streams.len()));
        Ok(StepAnswer { id, execution_us, streams: answers.collect() })
    }
}

/// Returns the answer of one stream in a step of `streams` streams, whose reasons share one message.
fn stream_answer(result: StreamResult, streams: usize) -> StreamAnswer {
    let limit = (MAX_STEP_REASON_BYTES / streams.max(1)).min(MAX_REASON_BYTES);
    match result {
        Ok(EngineAnswer { outputs, more }) => StreamAnswer { result: Ok(outputs), more },
        Err(failure) => StreamAnswer { result: Err(shortened(failure, limit)), more: false },
    }
}

/// Returns the answer to a step in which every stream fails. A message must have room for this reason
/// once for each stream.
fn failed_step(id: u64, streams: usize, why: &RunFailure) -> StepAnswer {
    let streams = (0..streams).map(|_| stream_answer(Err(why.clone()), streams)).collect();
    StepAnswer { id, execution_us: 0, streams }
}

fn message_length(received: nix::Result<usize>) -> Result<Option<usize>, ServeError> {
    match received {
        Ok(0) | Err(Errno::ECONNRESET) => Ok(None),
        Ok(len) => Ok(Some(len)),
        Err(errno) => Err(ServeError::Socket("receive batches from the supervisor", errno)),
    }
}

fn read_command(message: &[u8], len: usize) -> Result<Command, BatchAnswer> {
    match message.get(..len).map(decode::<Command>) {
        Some(Ok(command)) => Ok(command),
        Some(Err(fault)) => Err(unreadable(&chain(&fault))),
        None => Err(unreadable("the message is too long")),
    }
}

/// Sends a report. Returns false if the supervisor has exited.
fn send_report(socket: &OwnedFd, report: &WorkerMessage, message: &mut [u8]) -> Result<bool, ServeError> {
    let bytes = match encode(report, message) {
        Ok(bytes) => bytes.len(),
        Err(_) => encode(&too_long(report), message).expect("a short reason fits into a message").len(),
    };
    match send(socket.as_raw_fd(), &message[..bytes], MsgFlags::MSG_NOSIGNAL) {
        Ok(_) => Ok(true),
        Err(Errno::EPIPE | Errno::ECONNRESET) => Ok(false),
        Err(errno) => Err(ServeError::Socket("send answers to the supervisor", errno)),
    }
}

fn micros_since(begun_ns: u64) -> u64 {
    now_ns().saturating_sub(begun_ns) / 1_000
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

fn unreadable(why: &str) -> BatchAnswer {
    failed(UNREADABLE, RunFailure::BadBatch(why.to_owned()))
}

fn failed(id: u64, failure: RunFailure) -> BatchAnswer {
    BatchAnswer { id, execution_us: 0, result: Err(shortened(failure, MAX_REASON_BYTES)), more: false }
}

fn too_long(report: &WorkerMessage) -> WorkerMessage {
    match report {
        WorkerMessage::Answer(answer) => {
            let why = "the answer has too many parts for one message; set a smaller batch.max".to_owned();
            WorkerMessage::Answer(failed(answer.id, RunFailure::Engine(why)))
        }
        WorkerMessage::Stepped(StepAnswer { id, streams, .. }) => {
            let why = RunFailure::Engine("too many parts; set fewer `streams`".to_owned());
            WorkerMessage::Stepped(failed_step(*id, streams.len(), &why))
        }
        WorkerMessage::Prepared(prepared) => {
            let why = "the reason is too long for one message".to_owned();
            WorkerMessage::Prepared(PartitionReply { result: Err(why), ..prepared.clone() })
        }
        WorkerMessage::Asleep(slept) => {
            let slept = slept.clone().map(|reply| SleepReply { unpinned: None, ..reply });
            WorkerMessage::Asleep(slept.map_err(|_| "the reason is too long for one message".to_owned()))
        }
        WorkerMessage::Awake(_) => {
            WorkerMessage::Awake(Err("the reason is too long for one message".to_owned()))
        }
    }
}

fn shortened(failure: RunFailure, limit: usize) -> RunFailure {
    let short = |mut why: String| {
        why.truncate(why.floor_char_boundary(limit));
        why
    };
    match failure {
        RunFailure::Engine(why) => RunFailure::Engine(short(why)),
        RunFailure::NotBatched(why) => RunFailure::NotBatched(short(why)),
        RunFailure::Input(why) => RunFailure::Input(short(why)),
        other => other,
    }
}
