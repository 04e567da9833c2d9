//! Serving on a GPU: while one batch executes, the next batch's inputs travel and its kernels are
//! queued.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use rustix::event::{PollFd, PollFlags, poll};
use shadowslice_shared::batch::{
    Batch, BatchAnswer, BatchOutput, Command, IN_FLIGHT, MAX_MESSAGE_BYTES, RunFailure, WorkerMessage,
};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::slab::ReadableSlab;

use super::{ServeFault, failed, length, micros, read, say};
use crate::answer::AnswerSlots;
use crate::engine::{OnGpu as Engine, Signature, no_stream};
use crate::inputs::Inputs;

pub(super) struct OnGpu {
    engine: Engine,
    signature: Signature,
    batched: bool,
    requests: ReadableSlab,
    slots: AnswerSlots,
    /// Batches on the GPU, in the order in which they end.
    flying: VecDeque<Flying>,
}

struct Flying {
    id: u64,
    slot: u8,
    groups: Groups,
    outputs: Vec<BatchOutput>,
}

struct Ready {
    message: bool,
    through: bool,
}

impl OnGpu {
    pub(super) fn new(
        engine: Engine,
        signature: Signature,
        batched: bool,
        requests: ReadableSlab,
        slots: AnswerSlots,
    ) -> Self {
        Self { engine, signature, batched, requests, slots, flying: VecDeque::with_capacity(IN_FLIGHT) }
    }

    /// Answers all that it began.
    pub(super) fn serve(mut self, socket: &OwnedFd) -> Result<(), ServeFault> {
        let mut message = vec![0; MAX_MESSAGE_BYTES];
        let mut more = true;
        while more || !self.flying.is_empty() {
            let ready = self.wait(socket, more)?;
            if ready.through && !self.report_those_through(socket, &mut message)? {
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
            match length(received)? {
                None => more = false,
                Some(len) => {
                    if let Some(report) = self.obey(read(&message, len))?
                        && !say(socket, &report, &mut message)?
                    {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns a report only if the command is done already.
    fn obey(&mut self, command: Result<Command, BatchAnswer>) -> Result<Option<WorkerMessage>, ServeFault> {
        match command {
            Ok(Command::Run(batch)) => Ok(self.begin(&batch)?.map(WorkerMessage::Answer)),
            Ok(Command::Next(step)) => Ok(Some(WorkerMessage::Answer(failed(step.id, no_stream())))),
            Ok(Command::Close(_)) => Ok(None),
            Ok(Command::Prepare(groups)) => Ok(self.engine.prepare(groups).map(WorkerMessage::Prepared)),
            Ok(Command::Forget(groups)) => {
                let in_use = self.flying.iter().any(|batch| batch.groups == groups);
                self.engine.forget(groups, in_use);
                Ok(None)
            }
            Err(unreadable) => Ok(Some(WorkerMessage::Answer(unreadable))),
        }
    }

    fn wait(&self, socket: &OwnedFd, more: bool) -> Result<Ready, ServeFault> {
        let through = self.engine.gpu().through();
        let mut watched = [PollFd::new(&through, PollFlags::IN), PollFd::new(socket, PollFlags::IN)];
        // After its end a socket is always ready, which would end every wait at once.
        let count = if more { 2 } else { 1 };
        match poll(&mut watched[..count], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(ServeFault::Wait(errno)),
        }
        let ready = |polled: &PollFd<'_>| !polled.revents().is_empty();
        Ok(Ready { through: ready(&watched[0]), message: more && ready(&watched[1]) })
    }

    /// An answer comes back at once only if the launch failed.
    fn begin(&mut self, batch: &Batch) -> Result<Option<BatchAnswer>, ServeFault> {
        if self.flying.len() >= IN_FLIGHT {
            let why = format!("{IN_FLIGHT} batches are under way, and there is no place for a further one");
            return Ok(Some(failed(batch.id, RunFailure::BadBatch(why))));
        }
        match self.launch(batch) {
            Ok(outputs) => {
                self.flying.push_back(Flying {
                    id: batch.id,
                    slot: batch.slot,
                    groups: batch.groups,
                    outputs,
                });
                Ok(None)
            }
            Err(failure) => {
                // Any part of the batch on the GPU must be through before the slot is used again.
                self.engine.gpu().synchronize().map_err(ServeFault::Gpu)?;
                Ok(Some(failed(batch.id, failure)))
            }
        }
    }

    fn launch(&mut self, batch: &Batch) -> Result<Vec<BatchOutput>, RunFailure> {
        let inputs = Inputs::check(batch, &self.requests, self.signature.all_inputs(), self.batched)?;
        self.engine.begin(&inputs, &mut self.slots.slot(batch.slot))
    }

    /// `false` if the supervisor is gone.
    fn report_those_through(&mut self, socket: &OwnedFd, message: &mut [u8]) -> Result<bool, ServeFault> {
        self.engine.gpu().look();
        while let Some(prepared) = self.engine.made() {
            if !say(socket, &WorkerMessage::Prepared(prepared), message)? {
                return Ok(false);
            }
        }
        while let Some(first) = self.flying.front() {
            let executed = self.engine.gpu().executed(first.slot).map_err(ServeFault::Gpu)?;
            let Some(execution) = executed else { break };
            let Some(Flying { id, outputs, .. }) = self.flying.pop_front() else { break };
            if !say(socket, &WorkerMessage::Answer(answered(id, execution, outputs)), message)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn answered(id: u64, execution: Duration, outputs: Vec<BatchOutput>) -> BatchAnswer {
    BatchAnswer { id, execution_us: micros(execution), result: Ok(outputs), more: false }
}
