//! How a warm worker serves: batches in, answers out, until there is no more work.

mod on_gpu;

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use shadowslice_shared::batch::{
    Batch, BatchAnswer, Command, IN_FLIGHT, MAX_MESSAGE_BYTES, PartitionReply, RunFailure, StreamStep,
    UNREADABLE, WorkerMessage, decode, encode,
};
use shadowslice_shared::slab::ReadableSlab;

use crate::answer::AnswerSlots;
use crate::device::Device;
use crate::device::cuda::CudaFault;
use crate::engine::{Engine, Ran, Signature};
use crate::inputs::Inputs;
use on_gpu::OnGpu;
use shadowslice_shared::errors::chain;

/// An engine's error text is cut to this, so that an answer always fits into its message.
const MAX_REASON_BYTES: usize = 4096;

#[derive(Debug)]
pub struct Warm {
    pub(crate) engine: Engine,
    pub(crate) signature: Signature,
    /// Whether the first axis of every tensor is the batch.
    pub(crate) batched: bool,
    pub(crate) device: Device,
    pub(crate) requests: ReadableSlab,
    pub(crate) slots: AnswerSlots,
    pub(crate) socket: OwnedFd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ServeFault {
    #[error("batches cannot be received")]
    Receive(#[source] Errno),
    #[error("answers cannot be sent")]
    Send(#[source] Errno),
    #[error("the next batch cannot be waited for")]
    Wait(#[source] rustix::io::Errno),
    /// The GPU is of no use to this process any more; another process may still use it.
    #[error("the GPU is lost to this process")]
    Gpu(#[source] CudaFault),
}

impl Warm {
    pub fn serve(self) -> Result<(), ServeFault> {
        match self.engine {
            Engine::OnGpu(engine) => {
                OnGpu::new(*engine, self.signature, self.batched, self.requests, self.slots)
                    .serve(&self.socket)
            }
            _ => self.one_by_one(),
        }
    }

    fn one_by_one(mut self) -> Result<(), ServeFault> {
        let mut message = vec![0; MAX_MESSAGE_BYTES];
        while let Some(len) = self.receive(&mut message)? {
            let report = match read(&message, len) {
                Ok(Command::Run(batch)) => {
                    let ran = self.run(&batch);
                    if ran.is_err() {
                        // Its answer may not have fitted; the supervisor knows of no stream.
                        self.engine.close(batch.id);
                    }
                    WorkerMessage::Answer(self.answered(batch.id, ran)?)
                }
                Ok(Command::Next(step)) => {
                    let ran = self.step(&step);
                    WorkerMessage::Answer(self.answered(step.id, ran)?)
                }
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
                    self.engine.forget(groups);
                    continue;
                }
                Err(unreadable) => WorkerMessage::Answer(unreadable),
            };
            if !say(&self.socket, &report, &mut message)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// More than the buffer's length if the message did not fit; `None` if no more will come. The
    /// device is left to other workers only if no batch is there yet.
    fn receive(&mut self, message: &mut [u8]) -> Result<Option<usize>, ServeFault> {
        let socket = self.socket.as_raw_fd();
        let mut received = recv(socket, message, MsgFlags::MSG_TRUNC | MsgFlags::MSG_DONTWAIT);
        if received == Err(Errno::EAGAIN) {
            self.device.idle();
            received = Err(Errno::EINTR);
        }
        while received == Err(Errno::EINTR) {
            received = recv(socket, message, MsgFlags::MSG_TRUNC);
        }
        length(received)
    }

    /// After a failure on a GPU that is lost to this process there is no answer, but this process's
    /// end: another worker can run the batch.
    fn answered(&self, id: u64, ran: Result<(Duration, Ran), RunFailure>) -> Result<BatchAnswer, ServeFault> {
        let failure = match ran {
            Ok((execution, Ran { outputs, more })) => {
                return Ok(BatchAnswer { id, execution_us: micros(execution), result: Ok(outputs), more });
            }
            Err(failure) => failure,
        };
        if let Some(gpu) = self.device.gpu() {
            gpu.synchronize().map_err(ServeFault::Gpu)?;
        }
        Ok(failed(id, failure))
    }

    /// A batch that fails takes none of the device's time.
    fn run(&mut self, batch: &Batch) -> Result<(Duration, Ran), RunFailure> {
        let inputs = Inputs::check(batch, &self.requests, self.signature.all_inputs(), self.batched)?;
        let started = self.device.start(inputs.rows().unwrap_or(1), batch.groups, batch.sent_ns);
        let ran = self.engine.run(&inputs, &mut self.slots.slot(batch.slot))?;
        Ok((self.device.finish(started), ran))
    }

    fn step(&mut self, step: &StreamStep) -> Result<(Duration, Ran), RunFailure> {
        if usize::from(step.slot) >= IN_FLIGHT {
            return Err(RunFailure::BadBatch(format!("there is no slot {}", step.slot)));
        }
        let started = self.device.start(1, step.groups, step.sent_ns);
        let ran = self.engine.step(step, &mut self.slots.slot(step.slot))?;
        Ok((self.device.finish(started), ran))
    }
}

fn length(received: nix::Result<usize>) -> Result<Option<usize>, ServeFault> {
    match received {
        Ok(0) | Err(Errno::ECONNRESET) => Ok(None),
        Ok(len) => Ok(Some(len)),
        Err(errno) => Err(ServeFault::Receive(errno)),
    }
}

fn read(message: &[u8], len: usize) -> Result<Command, BatchAnswer> {
    match message.get(..len).map(decode::<Command>) {
        Some(Ok(command)) => Ok(command),
        Some(Err(fault)) => Err(unreadable(&chain(&fault))),
        None => Err(unreadable("it is longer than a message may be")),
    }
}

/// `false` if the supervisor is gone.
fn say(socket: &OwnedFd, report: &WorkerMessage, message: &mut [u8]) -> Result<bool, ServeFault> {
    let bytes = match encode(report, message) {
        Ok(bytes) => bytes.len(),
        Err(_) => encode(&too_long(report), message).expect("a short reason fits").len(),
    };
    match send(socket.as_raw_fd(), &message[..bytes], MsgFlags::MSG_NOSIGNAL) {
        Ok(_) => Ok(true),
        Err(Errno::EPIPE | Errno::ECONNRESET) => Ok(false),
        Err(errno) => Err(ServeFault::Send(errno)),
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

fn unreadable(why: &str) -> BatchAnswer {
    failed(UNREADABLE, RunFailure::BadBatch(why.to_owned()))
}

fn failed(id: u64, failure: RunFailure) -> BatchAnswer {
    BatchAnswer { id, execution_us: 0, result: Err(shortened(failure)), more: false }
}

fn too_long(report: &WorkerMessage) -> WorkerMessage {
    match report {
        WorkerMessage::Answer(answer) => {
            let why = "its answer has more parts than fit into a message; use a smaller batch.max".to_owned();
            WorkerMessage::Answer(failed(answer.id, RunFailure::BadBatch(why)))
        }
        WorkerMessage::Prepared(prepared) => {
            let why = "the reason is longer than a message may be".to_owned();
            WorkerMessage::Prepared(PartitionReply { result: Err(why), ..prepared.clone() })
        }
    }
}

fn shortened(failure: RunFailure) -> RunFailure {
    let short = |mut why: String| {
        why.truncate(why.floor_char_boundary(MAX_REASON_BYTES));
        why
    };
    match failure {
        RunFailure::Engine(why) => RunFailure::Engine(short(why)),
        RunFailure::NotBatched(why) => RunFailure::NotBatched(short(why)),
        RunFailure::Input(why) => RunFailure::Input(short(why)),
        other => other,
    }
}
