//! The loop of a worker with a real GPU. While one batch executes, the worker copies the next
//! batch's inputs and queues its kernels.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};
use shadowslice_shared::batch::{
    Batch, BatchAnswer, BatchOutput, Command, IN_FLIGHT, MAX_MESSAGE_BYTES, RunFailure, SleepReply,
    WorkerMessage,
};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::slab::ReadableSlab;

use super::{
    ServeError, failed, failed_step, message_length, micros, micros_since, read_command, send_report,
};
use crate::answer::AnswerSlots;
use crate::clock::now_ns;
use crate::device::cuda::pinned::PinnedSlabs;
use crate::engine::{Engine, GpuEngine, Signature};
use crate::inputs::Inputs;

/// The state of the loop that serves batches on the GPU.
pub(super) struct GpuServeLoop {
    pub(super) engine: GpuEngine,
    pub(super) signature: Signature,
    pub(super) batched: bool,
    // This must be dropped after the engine and before the slabs.
    pub(super) _pinned: Option<PinnedSlabs>,
    pub(super) requests: ReadableSlab,
    pub(super) slots: AnswerSlots,
    /// The batches on the GPU, in the order in which they will end.
    pub(super) in_flight: VecDeque<PendingBatch>,
    /// True if the model's weights are not on the GPU.
    pub(super) is_asleep: bool,
}

/// A batch that the GPU has not finished yet.
pub(super) struct PendingBatch {
    id: u64,
    slot: u8,
    groups: Groups,
    outputs: Vec<BatchOutput>,
}

/// The result of a wait: the descriptors that are ready.
struct PollResult {
    message: bool,
    completed: bool,
}

impl GpuServeLoop {
    /// Serves until the supervisor closes the socket. Then answers all batches that have started.
    pub(super) fn serve(mut self, socket: &OwnedFd) -> Result<(), ServeError> {
        let mut message = vec![0; MAX_MESSAGE_BYTES];
        let mut more = true;
        while more || !self.in_flight.is_empty() {
            let ready = self.wait(socket, more)?;
            if ready.completed && !self.report_finished(socket, &mut message)? {
                return Ok(());
            }
            if !ready.message {
                continue;
            }
            let received =
                recv(socket.as_raw_fd(), &mut message, MsgFlags::MSG_TRUNC | MsgFlags::MSG_DONTWAIT);
            if matches!(received, Err(Errno::EAGAIN | Errno::EINTR)) {
                continue;
            }
            match message_length(received)? {
                None => more = false,
                Some(len) => {
                    if let Some(report) = self.execute(read_command(&message, len))?
                        && !send_report(socket, &report, &mut message)?
                    {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// Executes a command. Returns a report if the command is already complete.
    fn execute(
        &mut self,
        command: Result<Command, BatchAnswer>,
    ) -> Result<Option<WorkerMessage>, ServeError> {
        match command {
            Ok(Command::Run(batch)) => Ok(self.begin(&batch)?.map(WorkerMessage::Answer)),
            Ok(Command::Next(step)) => {
                let why = RunFailure::BadBatch("the model has no streams".to_owned());
                Ok(Some(WorkerMessage::Stepped(failed_step(step.id, step.streams.len(), &why))))
            }
            Ok(Command::Close(_)) => Ok(None),
            Ok(Command::Prepare(groups)) => Ok(self.engine.prepare(groups).map(WorkerMessage::Prepared)),
            Ok(Command::Forget(groups)) => {
                let in_use = self.in_flight.iter().any(|batch| batch.groups == groups);
                self.engine.forget(groups, in_use);
                Ok(None)
            }
            Ok(Command::Sleep { pin }) => Ok(Some(WorkerMessage::Asleep(self.sleep(pin)))),
            Ok(Command::Wake) => Ok(Some(WorkerMessage::Awake(self.wake()))),
            Err(unreadable) => Ok(Some(WorkerMessage::Answer(unreadable))),
        }
    }

    fn sleep(&mut self, pin: bool) -> Result<SleepReply, String> {
        if !self.in_flight.is_empty() || self.is_asleep {
            return Err("the worker is not idle".to_owned());
        }
        let begun_ns = now_ns();
        // After an error, a part of the memory may be released, and no batch may use it.
        self.is_asleep = true;
        let slept = self.engine.sleep(pin).inspect_err(|_| self.is_asleep = self.engine.wake().is_err())?;
        Ok(SleepReply { took_us: micros_since(begun_ns), ..slept })
    }

    /// Wakes the model. Returns the time that this took, in us.
    fn wake(&mut self) -> Result<u64, String> {
        let begun_ns = now_ns();
        if self.is_asleep {
            self.engine.wake()?;
            self.is_asleep = false;
        }
        Ok(micros_since(begun_ns))
    }

    fn wait(&self, socket: &OwnedFd, more: bool) -> Result<PollResult, ServeError> {
        let completed = self.engine.gpu().completions();
        let input = |file| PollFd::new(file, PollFlags::POLLIN);
        let mut watched = [input(completed), input(socket.as_fd())];
        // A closed socket is always ready. Watching it would end every wait immediately.
        let count = if more { 2 } else { 1 };
        let gpu = self.engine.gpu();
        let timeout = if self.in_flight.is_empty() { PollTimeout::NONE } else { gpu.pause_look() };
        match poll(&mut watched[..count], timeout) {
            Ok(0) => gpu.end_long_pause(),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(ServeError::Socket("wait for the next batch", errno)),
        }
        let ready = |polled: &PollFd<'_>| polled.any() != Some(false);
        Ok(PollResult { completed: ready(&watched[0]), message: more && ready(&watched[1]) })
    }

    /// Starts a batch. Returns an answer only if the batch cannot be started.
    fn begin(&mut self, batch: &Batch) -> Result<Option<BatchAnswer>, ServeError> {
        if self.in_flight.len() >= IN_FLIGHT {
            let why = format!("{IN_FLIGHT} batches are in flight already");
            return Ok(Some(failed(batch.id, RunFailure::BadBatch(why))));
        }
        match self.launch(batch) {
            Ok(outputs) => {
                self.in_flight.push_back(PendingBatch {
                    id: batch.id,
                    slot: batch.slot,
                    groups: batch.groups,
                    outputs,
                });
                Ok(None)
            }
            Err(failure) => {
                // The slot can be used again only after all work of the failed batch has ended on
                // the GPU.
                self.engine.gpu().synchronize().map_err(ServeError::Gpu)?;
                Ok(Some(failed(batch.id, failure)))
            }
        }
    }

    fn launch(&mut self, batch: &Batch) -> Result<Vec<BatchOutput>, RunFailure> {
        if self.is_asleep {
            return Err(RunFailure::Asleep);
        }
        let inputs = Inputs::check(batch, &self.requests, self.signature.all_inputs(), self.batched)?;
        self.engine.begin(&inputs, &mut self.slots.slot(batch.slot))
    }

    /// Reports the partitions that are ready and the batches that have ended. Returns false if the
    /// supervisor has exited.
    fn report_finished(&mut self, socket: &OwnedFd, message: &mut [u8]) -> Result<bool, ServeError> {
        self.engine.gpu().clear_completions();
        while let Some(prepared) = self.engine.next_prepared() {
            if !send_report(socket, &WorkerMessage::Prepared(prepared), message)? {
                return Ok(false);
            }
        }
        while let Some(first) = self.in_flight.front() {
            let executed = self.engine.gpu().execution_time(first.slot).map_err(ServeError::Gpu)?;
            let Some(execution) = executed else { break };
            let Some(PendingBatch { id, outputs, .. }) = self.in_flight.pop_front() else { break };
            if !send_report(socket, &WorkerMessage::Answer(answered(id, execution, outputs)), message)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn answered(id: u64, execution: Duration, outputs: Vec<BatchOutput>) -> BatchAnswer {
    BatchAnswer { id, execution_us: micros(execution), result: Ok(outputs), more: false }
}
