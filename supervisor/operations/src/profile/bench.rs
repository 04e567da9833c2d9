//! Measures a model. Starts a worker like `serve`, and runs batches either on several partitions,
//! one after the other, or at a single share.

use shadowslice_shared::rounding;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};
use shadowslice_shared::batch::{
    Batch, BatchRequest, Command, Extent, MAX_MESSAGE_BYTES, MessageError, PartitionReply, StreamStep,
    WorkerMessage, decode, encode,
};
use shadowslice_shared::boot::{
    Assignment, BootRefusal, LoadedModel, PartitionSpec, WarmUp, WarmUpReport, WorkerPurpose,
};
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::profile::ProcessMemory;
use shadowslice_shared::slab::{ALIGNMENT, AnswerSlab, OutOfSlab, WritableSlab};
use shadowslice_shared::tensor::{Datatype, TensorSpec, elements};
use shadowslice_shared::units::{Percent, Sms};
use tokio::sync::mpsc;

use super::options::{advice, free_axes};
use shadowslice_config::{ModelConfig, Timeouts};
use shadowslice_control::backend::{GpuBackend, Grant, GrantError, GrantRequest, shown};
use shadowslice_control::controller::{engine_spec, reference, warm_up};
use shadowslice_control::process::{
    BootMs, KeptWeights, LaunchSpec, ReferenceFile, ReferenceFileError, SpawnError, Worker, WorkerEvent,
    WorkerSaid, WorkerSettings,
};
use shadowslice_datapath::clock::monotonic_ns;
use shadowslice_datapath::pipeline::BatchSocket;
use shadowslice_shared::ids::WorkerId;

/// The capacity of the channel for a worker's events. A worker sends fewer than eight events.
const EVENT_CAPACITY: usize = 16;

#[derive(Debug, thiserror::Error)]
pub(super) enum BenchError {
    #[error("the GPU cannot take a worker for the measurement")]
    Grant(#[from] GrantError),
    #[error("cannot start a worker")]
    Spawn(#[from] SpawnError),
    #[error("cannot run the model: {0}")]
    Refused(String),
    /// The CPU has no kernels for some operators of the model, so it cannot compute the reference
    /// answers.
    #[error(
        "neither the CPU nor the GPU can run an operator of the model; export the model with another opset: {0}"
    )]
    NoOperator(String),
    #[error("cannot run the model on partitions: {0}")]
    NoPartitions(String),
    /// The worker found that the model must be loaded in another form. The next worker will load
    /// the model in this form.
    #[error("{0}")]
    OtherForm(String),
    #[error(
        "the worker exited during the measurement ({0}); see its lines above; if memory ran out, give a smaller --max-batch"
    )]
    Ended(String),
    #[error(
        "the worker was not ready within {0:?}; stop other programs on the GPU, or give a smaller --max-batch"
    )]
    Late(Duration),
    #[error(
        "the inputs of a batch of {0} rows do not fit into the shared memory; give a smaller --max-batch"
    )]
    TooLarge(u32, #[source] OutOfSlab),
    #[error("input '{0}' has dynamic axes; give --shape {0}=AXISxAXIS, without the batch axis")]
    Unknown(String),
    #[error("{0}")]
    FreeAxes(String),
    #[error("cannot store the reference answers")]
    Reference(#[from] ReferenceFileError),
    #[error("cannot send or read a message of the measurement")]
    Message(#[from] MessageError),
    #[error("cannot send batches to the worker, which has probably exited; see its lines above")]
    Send(#[source] Errno),
    #[error("cannot receive the worker's answers")]
    Receive(#[source] std::io::Error),
}

/// A model to measure, with all data that its workers need.
pub(super) struct Bench<'b> {
    pub(super) model: &'b ModelConfig,
    /// The command line. Advice on missing options shows it.
    pub(super) command: &'b str,
    pub(super) gpu: Arc<dyn GpuBackend>,
    pub(super) settings: &'b WorkerSettings,
    pub(super) library: &'b std::path::Path,
    /// The folder for engines that are built for a particular share.
    pub(super) engines: &'b std::path::Path,
    pub(super) timeouts: Timeouts,
    pub(super) response_bytes: u64,
    pub(super) reference: ReferenceFile,
    pub(super) requests: WritableSlab,
    /// The number of timed batches for each size. The same number of untimed batches runs first.
    pub(super) runs: u32,
    /// The time limit for each batch size. After this time, no further batch of the size starts.
    pub(super) time_limit: Duration,
    /// A function that returns the GPU memory of the process with this id, in bytes.
    pub(super) all_memory: &'b dyn Fn(i32) -> u64,
}

/// The measured times and memory at a single share.
#[derive(Debug)]
pub(super) struct ShareMeasurement {
    pub(super) sms: Sms,
    /// The median execution time of each batch size, in ms.
    pub(super) ms: Vec<(u32, f64)>,
    pub(super) boot: BootMs,
    pub(super) memory: ProcessMemory,
}

impl Bench<'_> {
    /// Computes the reference answers on the CPU. If the CPU cannot run the model, computes them on
    /// the GPU.
    pub(super) async fn prepare(&self) -> Result<(), BenchError> {
        match self.reference_by(reference(self.model, &*self.gpu)).await {
            Err(BenchError::NoOperator(why)) => {
                tracing::warn!(
                    why,
                    "the CPU cannot compute the reference answers; computing them on all SMs of the GPU"
                );
                self.reference_by(WorkerPurpose::DeviceReference).await?;
            }
            answered => answered?,
        }
        Ok(self.reference.seal()?)
    }

    async fn reference_by(&self, purpose: WorkerPurpose) -> Result<(), BenchError> {
        self.start(purpose, Percent::WHOLE, None).await?.end().await;
        Ok(())
    }

    pub(super) async fn measure(&self, share: Percent) -> Result<ShareMeasurement, BenchError> {
        let mut warm = self.start(WorkerPurpose::Serve, share, None).await?;
        let (socket, _answers) = warm.lane()?;
        let column = self.measure_groups(&warm, &socket, (warm.loaded.sms, Groups::WHOLE)).await?;
        warm.end().await;
        Ok(column)
    }

    /// Measures every batch size on the partitions for these shares. One worker runs all
    /// measurements.
    pub(super) async fn measure_inside(
        &self,
        division: &Division,
        shares: &[Percent],
    ) -> Result<Vec<ShareMeasurement>, BenchError> {
        let partition = PartitionSpec { division: division.clone(), groups: Groups::WHOLE };
        let mut warm = self.start(WorkerPurpose::Serve, Percent::WHOLE, Some(partition)).await?;
        let (socket, _answers) = warm.lane()?;
        let mut columns = Vec::with_capacity(shares.len());
        for &share in shares {
            let count = division.groups_of(share);
            if let Some(why) = warm.refusal(count) {
                tracing::warn!(%share, groups = count, why, "the model cannot run on this partition; skipping the share");
                continue;
            }
            let whole = count == division.count();
            let groups = if whole { Groups::WHOLE } else { Groups::first(count) };
            let place = (division.sms(groups), groups);
            if !whole {
                ready(&socket, groups).await?;
            }
            columns.push(self.measure_groups(&warm, &socket, place).await?);
            if !whole {
                command(&socket, &Command::Forget(groups))?;
            }
        }
        warm.end().await;
        Ok(columns)
    }

    /// Measures every batch size on these groups. The worker must have prepared the groups.
    async fn measure_groups(
        &self,
        WarmWorker { worker, loaded, warmed, .. }: &WarmWorker,
        socket: &BatchSocket,
        (sms, groups): (Sms, Groups),
    ) -> Result<ShareMeasurement, BenchError> {
        let plan = warm_up(self.model, None, loaded).map_err(|refusal| refused(&refusal))?;
        let mut ms = Vec::with_capacity(plan.sizes.len());
        for &size in &plan.sizes {
            ms.push((size, self.time(socket, loaded, &plan, (size, groups)).await?));
        }
        let shown = ms.iter().map(|&(size, ms)| (size, rounding::round(ms))).collect::<BTreeMap<_, _>>();
        tracing::info!(sms = sms.0, ms = ?shown, "measured the execution time of each batch size");
        let (all, weights, activations) = ((self.all_memory)(worker.pid), loaded.weights, warmed.activations);
        let context = all.saturating_sub(weights).saturating_sub(activations);
        Ok(ShareMeasurement {
            sms,
            ms,
            boot: worker.boot_ms,
            memory: ProcessMemory { context, weights, activations },
        })
    }

    async fn start(
        &self,
        purpose: WorkerPurpose,
        share: Percent,
        partition: Option<PartitionSpec>,
    ) -> Result<WarmWorker, BenchError> {
        let (events, mut event_rx) = mpsc::channel(EVENT_CAPACITY);
        let ModelConfig { priority, memory_limit, .. } = *self.model;
        let grant = Grant::of(
            &self.gpu,
            GrantRequest { share, priority, memory_limit, room: None, joins: false },
            purpose,
        )?;
        let assignment = Assignment {
            model: self.model.name.clone(),
            purpose,
            engine: engine_spec(self.model, self.library, self.engines, share),
            device: grant.device(),
            profile: self.model.profile.clone(),
            request_bytes: self.requests.bytes(),
            pinned_request_bytes: self.requests.bytes(),
            response_slot_bytes: self.response_bytes,
            partition,
        };
        let launch = LaunchSpec {
            id: WorkerId(0),
            settings: self.settings,
            assignment,
            grant: Arc::new(grant),
            share,
            requests: self.requests.as_fd(),
            weights: &KeptWeights::default(),
            reference: &self.reference,
            cpus: &self.model.cpus,
            files: None,
            user: None,
            shared: None,
            low_priority: false,
            permit: None,
            events,
        };
        let (model, command) = (self.model.clone(), self.command.to_owned());
        let mut worker = Worker::spawn(launch, move |loaded| {
            let plan = warm_up(&model, None, loaded)?;
            let free = free_axes(&loaded.inputs, plan.batched, &model.warmup, &command);
            free.map_or(Ok(plan), |which| Err(BootRefusal::FreeAxes(which)))
        })?;
        let patience = self.timeouts.spawn.saturating_add(self.timeouts.warm);
        let booted = tokio::time::timeout(patience, converse(&mut worker, &mut event_rx)).await;
        let booted = booted.unwrap_or_else(|_| {
            worker.kill();
            Err(BenchError::Late(patience))
        });
        let (loaded, warmed) = booted?;
        Ok(WarmWorker { worker, events: event_rx, loaded, warmed })
    }

    /// Measures the median execution time of a batch size, in ms. If streams advance together, the size is
    /// the number of streams in a step.
    async fn time(
        &self,
        socket: &BatchSocket,
        loaded: &LoadedModel,
        plan: &WarmUp,
        (size, groups): (u32, Groups),
    ) -> Result<f64, BenchError> {
        let begun = Instant::now();
        let mut times = Vec::with_capacity(self.runs as usize);
        for run in 0..self.runs * 2 {
            let steps = loaded.streams.is_some_and(|streams| streams.per_step > 1);
            let rows = if steps { 1 } else { size };
            let batch = Batch { groups, ..self.batch(&loaded.inputs, plan, rows, run)? };
            let execution_us = match steps {
                true => execute_step(socket, &batch, size).await?,
                false => execute(socket, &batch).await?,
            };
            if run >= self.runs || begun.elapsed() > self.time_limit / 2 {
                times.push(execution_us);
            }
            if begun.elapsed() > self.time_limit && !times.is_empty() {
                break;
            }
        }
        times.sort_unstable();
        // A profile cannot contain a time of 0, so the smallest time is one microsecond.
        Ok(times[times.len() / 2].max(1) as f64 / 1e3)
    }

    /// Writes the inputs of a batch with one request to the start of the slab, and returns the
    /// batch.
    fn batch(&self, inputs: &[TensorSpec], plan: &WarmUp, size: u32, run: u32) -> Result<Batch, BenchError> {
        let mut offset = 0_u64;
        let mut extents = Vec::with_capacity(inputs.len());
        for (input, shape) in inputs.iter().zip(&plan.shapes) {
            let count = elements(shape).and_then(|row| row.checked_mul(size as usize));
            let count = count.ok_or_else(|| BenchError::Unknown(input.name.clone()))?;
            let bytes = made_up(input.datatype, count);
            let len = bytes.len() as u64;
            self.requests.write(offset, &bytes).map_err(|outside| BenchError::TooLarge(size, outside))?;
            extents.push(Extent { offset, len });
            offset = (offset + len).next_multiple_of(ALIGNMENT);
        }
        Ok(Batch {
            id: u64::from(run),
            slot: 0,
            sent_ns: monotonic_ns(),
            groups: Groups::WHOLE,
            shapes: plan.shapes.clone(),
            requests: vec![BatchRequest { rows: size, inputs: extents }],
            optional: Vec::new(),
        })
    }
}

/// A worker that has completed its warm-up.
struct WarmWorker {
    worker: Worker,
    events: mpsc::Receiver<WorkerEvent>,
    loaded: LoadedModel,
    warmed: WarmUpReport,
}

impl WarmWorker {
    fn lane(&mut self) -> Result<(Arc<BatchSocket>, AnswerSlab), BenchError> {
        self.worker.lane().ok_or_else(|| BenchError::Ended("the worker has no lane".to_owned()))
    }

    fn refusal(&self, count: usize) -> Option<&str> {
        let proven = self.warmed.partitions.as_ref()?;
        let proof = proven.counts.iter().find(|proof| proof.groups == count)?;
        proof.result.as_ref().err().map(String::as_str)
    }

    async fn end(mut self) {
        self.worker.stop();
        while let Some(event) = self.events.recv().await {
            if matches!(event.said, WorkerSaid::Exited(_)) {
                return;
            }
        }
    }
}

async fn converse(
    worker: &mut Worker,
    events: &mut mpsc::Receiver<WorkerEvent>,
) -> Result<(LoadedModel, WarmUpReport), BenchError> {
    let mut found = None;
    while let Some(WorkerEvent { said, .. }) = events.recv().await {
        worker.note(&said);
        match said {
            WorkerSaid::Warming { .. } => {}
            WorkerSaid::Connected { .. } => worker.warm(),
            WorkerSaid::Loaded(loaded) => found = Some(loaded),
            WorkerSaid::Warmed(warmed) => {
                let early = || BenchError::Ended("the worker was warm before it was loaded".to_owned());
                return Ok((found.ok_or_else(early)?, warmed));
            }
            WorkerSaid::Refused(refusal) => {
                let why = advice(&refusal.to_string());
                return Err(match refusal {
                    BootRefusal::NoOperator(_) => BenchError::NoOperator(why),
                    BootRefusal::NoPartitions(_) => BenchError::NoPartitions(why),
                    BootRefusal::OtherForm(_) => BenchError::OtherForm(why),
                    BootRefusal::FreeAxes(_) => BenchError::FreeAxes(refusal.to_string()),
                    _ => BenchError::Refused(why),
                });
            }
            WorkerSaid::Lost(why) => return Err(BenchError::Ended(why)),
            WorkerSaid::Exited(end) => return Err(BenchError::Ended(shown(&end.status))),
        }
    }
    Err(BenchError::Ended("no cause is known".to_owned()))
}

/// Returns the error for a refusal by a worker. Replaces configuration keys in the worker's advice
/// with command-line options.
fn refused(why: &impl std::fmt::Display) -> BenchError {
    BenchError::Refused(advice(&why.to_string()))
}

fn command(socket: &BatchSocket, command: &Command) -> Result<(), BenchError> {
    let mut message = vec![0; MAX_MESSAGE_BYTES];
    let bytes = encode(command, &mut message)?;
    send(socket.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL).map_err(BenchError::Send).map(drop)
}

async fn report(socket: &BatchSocket) -> Result<WorkerMessage, BenchError> {
    let mut message = vec![0; MAX_MESSAGE_BYTES];
    let len = socket.receive(&mut message).await.map_err(BenchError::Receive)?;
    if len == 0 {
        return Err(BenchError::Ended("the worker closed its socket during a command".to_owned()));
    }
    Ok(decode(message.get(..len).unwrap_or_default())?)
}

async fn ready(socket: &BatchSocket, groups: Groups) -> Result<(), BenchError> {
    command(socket, &Command::Prepare(groups))?;
    match report(socket).await? {
        WorkerMessage::Prepared(PartitionReply { result, .. }) => result.map_err(BenchError::NoPartitions),
        _ => Err(unexpected()),
    }
}

/// Runs a batch and returns its execution time in µs.
async fn execute(socket: &BatchSocket, batch: &Batch) -> Result<u64, BenchError> {
    command(socket, &Command::Run(batch.clone()))?;
    let WorkerMessage::Answer(answer) = report(socket).await? else { return Err(unexpected()) };
    answer.result.map_err(|failure| refused(&failure))?;
    if answer.more {
        command(socket, &Command::Close(batch.id))?;
    }
    Ok(answer.execution_us)
}

/// Opens `streams` streams with the inputs of a batch, advances all of them in a step, and closes them.
/// Returns the execution time of the step in µs.
async fn execute_step(socket: &BatchSocket, batch: &Batch, streams: u32) -> Result<u64, BenchError> {
    let ids: Vec<u64> = (0..u64::from(streams)).collect();
    for &id in &ids {
        command(socket, &Command::Run(Batch { id, ..batch.clone() }))?;
        let WorkerMessage::Answer(answer) = report(socket).await? else { return Err(unexpected()) };
        answer.result.map_err(|failure| refused(&failure))?;
    }
    let Batch { slot, sent_ns, groups, .. } = *batch;
    command(socket, &Command::Next(StreamStep { id: 0, slot, sent_ns, groups, streams: ids.clone() }))?;
    let WorkerMessage::Stepped(stepped) = report(socket).await? else { return Err(unexpected()) };
    for (id, answer) in ids.into_iter().zip(stepped.streams) {
        answer.result.map_err(|failure| refused(&failure))?;
        command(socket, &Command::Close(id))?;
    }
    Ok(stepped.execution_us)
}

fn unexpected() -> BenchError {
    BenchError::Ended("the worker sent an unexpected answer".to_owned())
}

/// Generates `count` elements that any model accepts: different values for FP32 and FP64, and ones
/// for all other types.
fn made_up(datatype: Datatype, count: usize) -> Vec<u8> {
    // The values only need to differ from each other, so they need not be random.
    let unit = |index: usize| ((index * 7919) % 1009) as f32 / 1009.0 - 0.5;
    match datatype {
        Datatype::Fp32 => (0..count).flat_map(|index| unit(index).to_le_bytes()).collect(),
        Datatype::Fp64 => (0..count).flat_map(|index| f64::from(unit(index)).to_le_bytes()).collect(),
        Datatype::Fp16 => [0x00, 0x3c].repeat(count),
        Datatype::Bf16 => [0x80, 0x3f].repeat(count),
        Datatype::Bytes => [1, 0, 0, 0, b'1'].repeat(count),
        _ => {
            let size = datatype.size().unwrap_or(1);
            let mut one = vec![0; size];
            one[0] = 1;
            one.repeat(count)
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::recv;

    use super::*;

    #[tokio::test]
    async fn a_worker_that_dies_on_a_batch_is_reported_as_exited() {
        let (ours, theirs) = BatchSocket::pair().unwrap();
        let dying =
            std::thread::spawn(move || recv(theirs.as_raw_fd(), &mut [0; 64], MsgFlags::empty()).unwrap());
        let batch = Batch {
            id: 0,
            slot: 0,
            sent_ns: 0,
            groups: Groups::WHOLE,
            shapes: Vec::new(),
            requests: Vec::new(),
            optional: Vec::new(),
        };
        let ended = execute(&ours, &batch).await.unwrap_err();
        assert!(matches!(ended, BenchError::Ended(_)), "{ended}");
        dying.join().unwrap();
    }
}
