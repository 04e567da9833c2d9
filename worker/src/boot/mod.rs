//! The boot of a worker in three phases: [`ConnectedWorker`], [`LoadedWorker`] and [`WarmWorker`].
//! Each phase consumes the result of the previous phase. If a phase fails, the worker reports the
//! reason to the supervisor. A member of a [shared worker](crate::shared) has the same phases.

mod channel;
mod partitions;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::batch::IN_FLIGHT;
use shadowslice_shared::boot::{
    Assignment, BootCommand, BootRefusal, BootReply, DeviceMemory, DeviceSpec, EngineSpec, LoadTimes,
    LoadedModel, PartitionSpec, SHARE_VARIABLE, WarmUp, WarmUpReport, WorkerPurpose,
};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::slab::{AnswerWriter, ReadableSlab, SlabError};

use crate::answer::AnswerSlots;
use crate::clock::{after, now_ns, wait_until};
use crate::descriptors::{Descriptors, adopt};
use crate::device::ComputeDevice;
use crate::device::cuda::pinned::PinnedSlabs;
use crate::engine::{EngineResources, Library, ModelEngine, ModelHost, Signature, load_library};
use crate::parent::ParentProcess;
use crate::proof::{self, InputSettings, ProofError, Prover};
use crate::serve::WarmWorker;
use crate::shared::SharedResources;
use crate::{log_line, sandbox};
pub use channel::BootChannel;
pub use channel::WorkerError;
use shadowslice_shared::errors::chain;

/// Runs a worker until the supervisor closes its socket, and returns the exit code. If `user` is
/// given, the process first changes to that user. `host` runs the models that no engine of this
/// library can run.
pub fn run(user: Option<u32>, host: Option<Box<dyn ModelHost>>) -> u8 {
    let run = || {
        sandbox::begin(user)?;
        ConnectedWorker::new(host)?.run()
    };
    match run() {
        Ok(()) => 0,
        Err(error) => exit_code(&error),
    }
}

/// Returns the exit code of a worker that ended with this error. Logs the error, unless the supervisor
/// knows it already.
pub(crate) fn exit_code(error: &WorkerError) -> u8 {
    match error {
        // If the supervisor has exited, no process reads the log.
        WorkerError::SupervisorGone => 0,
        // The worker has already sent the reason to the supervisor.
        WorkerError::Refused(_) => 1,
        fault => {
            log_line(&format!("error: {}", chain(fault)));
            1
        }
    }
}

/// A worker that has taken ownership of its descriptors and has sent its hello.
#[derive(Debug)]
pub struct ConnectedWorker {
    channel: BootChannel,
    descriptors: Descriptors,
    surroundings: Surroundings,
}

/// The process around a worker.
#[derive(Debug)]
enum Surroundings {
    /// A process for this worker alone, which the worker prepares when it knows its model.
    Own { host: Option<Box<dyn ModelHost>>, parent: Option<ParentProcess> },
    /// A process for several models, which is prepared already.
    Shared(Arc<SharedResources>),
}

impl ConnectedWorker {
    /// Takes ownership of the descriptors that the supervisor has passed to this process. `host`
    /// runs the models that no engine of this library can run.
    pub fn new(host: Option<Box<dyn ModelHost>>) -> Result<Self, WorkerError> {
        let (boot, descriptors) = adopt().map_err(WorkerError::Connect)?;
        // The worker looks up its parent before the first order arrives. The arrival of that order
        // then proves that the supervisor was alive at the lookup.
        let parent = ParentProcess::find().unwrap_or_else(log_unwatched);
        let surroundings = Surroundings::Own { host, parent };
        Ok(Self { channel: BootChannel::open(boot)?, descriptors, surroundings })
    }

    /// Connects a member of a shared worker, on the thread that will run the model.
    pub(crate) fn join(
        boot: OwnedFd,
        descriptors: Descriptors,
        resources: Arc<SharedResources>,
    ) -> Result<Self, WorkerError> {
        let surroundings = Surroundings::Shared(resources);
        Ok(Self { channel: BootChannel::open(boot)?, descriptors, surroundings })
    }

    /// Boots the worker and serves until the supervisor closes the socket.
    pub(crate) fn run(self) -> Result<(), WorkerError> {
        match self.load()?.warm()? {
            Some(warm) => Ok(warm.serve()?),
            None => Ok(()),
        }
    }

    /// Loads the model that the supervisor assigns. On an emulated device, this takes at least the
    /// profile's time for the load. In a process of its own, it also takes the profile's time for the
    /// process start.
    pub fn load(self) -> Result<LoadedWorker, WorkerError> {
        let Self { channel, descriptors, surroundings } = self;
        let BootCommand::Load(assignment) = channel.receive_order()? else {
            return Err(channel.refuse_unexpected_order());
        };
        let begun_ns = now_ns();
        let is_member = matches!(surroundings, Surroundings::Shared(_));
        let loaded = surroundings
            .prepare(&assignment)
            .and_then(|prepared| Parts::load(descriptors, prepared, &assignment, begun_ns));
        let LoadedParts { parts, times: took, weights } =
            loaded.map_err(|refusal| channel.refuse(refusal))?;
        let mut times = parts.device.start_times(assignment.profile.as_ref());
        if is_member {
            times.process = Duration::ZERO;
        }
        wait_until(after(begun_ns, times.process.saturating_add(times.load)), &parts.socket)?;
        let took = with_waits(took, times.process, between(begun_ns, now_ns()));
        let Signature { inputs, optional, outputs, streams } = parts.signature.clone();
        channel.send(BootReply::Loaded(LoadedModel {
            inputs,
            optional,
            outputs,
            streams,
            sms: parts.device.sms(),
            took,
            weights,
        }))?;
        let Assignment { purpose, partition, .. } = *assignment;
        Ok(LoadedWorker { channel, purpose, partition, warm: times.warm, parts })
    }
}

/// A process that is ready to load a model, except for its device.
struct PreparedProcess {
    host: Option<Box<dyn ModelHost>>,
    library: Option<Library>,
    is_shared: bool,
}

impl Surroundings {
    /// Enters the sandbox and loads the engine's library, unless the process has done so already.
    fn prepare(self, assignment: &Assignment) -> Result<PreparedProcess, BootRefusal> {
        match self {
            Self::Own { host, parent } => {
                let folders = sandbox::writable_folders(&assignment.engine, assignment.on_gpu());
                let breaches = sandbox::enter(&folders);
                if assignment.purpose.is_reference() {
                    // If the kernel does not support a restriction, that restriction fails in all
                    // workers of the model. Only the reference worker therefore logs the failures.
                    breaches.iter().for_each(|breach| log_line(&chain(breach)));
                }
                watch_parent(parent);
                let library = load_library(&assignment.engine, assignment.on_gpu())?;
                Ok(PreparedProcess { host, library, is_shared: false })
            }
            Self::Shared(resources) => {
                // This only creates the folders. The sandbox already permits them.
                sandbox::writable_folders(&assignment.engine, assignment.on_gpu());
                let library = resources.library.clone()?;
                Ok(PreparedProcess { host: None, library, is_shared: true })
            }
        }
    }
}

pub(crate) fn watch_parent(parent: Option<ParentProcess>) {
    parent.map_or(Ok(()), ParentProcess::exit_with_parent).unwrap_or_else(log_unwatched);
}

/// A worker whose model is loaded.
#[derive(Debug)]
pub struct LoadedWorker {
    channel: BootChannel,
    purpose: WorkerPurpose,
    partition: Option<PartitionSpec>,
    /// The minimum time that the warm-up takes on the emulated device.
    warm: Duration,
    parts: Parts,
}

impl LoadedWorker {
    /// Warms up the model and runs the proof. A reference worker computes the reference answers
    /// instead. It then has no more work, so the result is `None`.
    ///
    /// Warm-up runs occupy no SMs of the emulated GPU and take no time on it.
    pub fn warm(mut self) -> Result<Option<WarmWorker>, WorkerError> {
        let BootCommand::Warm(warm_up) = self.channel.receive_order()? else {
            return Err(self.channel.refuse_unexpected_order());
        };
        let deadline_ns = after(now_ns(), self.warm);
        let proven = self.parts.prove(self.purpose, self.partition.as_ref(), &warm_up, &self.channel);
        let warmed = proven.map_err(|unproven| match unproven {
            ProofError::Refused(refusal) => self.channel.refuse(self.parts.with_other_layout(refusal)),
            ProofError::HungUp => WorkerError::SupervisorGone,
        })?;
        self.parts.engine.finish_warm_up().map_err(|refusal| self.channel.refuse(refusal))?;
        wait_until(deadline_ns, &self.parts.socket)?;
        let proof = warmed.proof.max(self.warm);
        self.channel.send(BootReply::Warmed(WarmUpReport { proof, ..warmed }))?;
        Ok((!self.purpose.is_reference()).then(|| self.parts.into_warm(warm_up.batched)))
    }
}

pub(crate) fn log_unwatched<T: Default>(error: io::Error) -> T {
    log_line(&format!(
        "cannot watch the supervisor, so this worker would outlive the supervisor if the model hangs: {error}"
    ));
    T::default()
}

/// Adds the emulated waits to the measured load times. `all` is the time since the load began, and
/// includes `process`, the emulated time of the process start.
fn with_waits(took: LoadTimes, process: Duration, all: Duration) -> LoadTimes {
    let context = took.context.max(process);
    let before = took.libraries.saturating_add(context);
    LoadTimes { context, session: took.session.max(all.saturating_sub(before)), ..took }
}

fn between(begun_ns: u64, ended_ns: u64) -> Duration {
    Duration::from_nanos(ended_ns.saturating_sub(begun_ns))
}

/// The parts of a worker that are still needed after the boot.
#[derive(Debug)]
struct Parts {
    engine: ModelEngine,
    signature: Signature,
    device: ComputeDevice,
    pinned: Option<PinnedSlabs>,
    requests: ReadableSlab,
    slots: AnswerSlots,
    /// The response slab, from which the proof reads answers.
    answers: ReadableSlab,
    reference: File,
    socket: OwnedFd,
    /// The model's file, if it is an ONNX model.
    model_file: Option<PathBuf>,
    /// The memory that this worker occupies on an emulated GPU.
    memory: DeviceMemory,
}

/// The memory that worker and supervisor share.
struct Slabs {
    pinned: Option<PinnedSlabs>,
    requests: ReadableSlab,
    slots: AnswerSlots,
    answers: ReadableSlab,
}

impl Slabs {
    /// Maps the slabs, and lets the GPU access them directly.
    fn map(
        requests: &OwnedFd,
        responses: &OwnedFd,
        assignment: &Assignment,
        device: &ComputeDevice,
        is_shared: bool,
    ) -> Result<Self, BootRefusal> {
        let setup = |fault: SlabError| BootRefusal::Setup(chain(&fault));
        let requests = ReadableSlab::map(requests.as_fd(), assignment.request_bytes).map_err(setup)?;
        let slot_bytes = assignment.response_slot_bytes;
        let response_bytes = slot_bytes.checked_mul(IN_FLIGHT as u64).ok_or_else(|| {
            BootRefusal::Setup(format!(
                "response slots of {slot_bytes} bytes are too large; lower limits.response_bytes"
            ))
        })?;
        let writer = AnswerWriter::map(responses.as_fd(), response_bytes).map_err(setup)?;
        let answers = ReadableSlab::map(responses.as_fd(), response_bytes).map_err(setup)?;
        let pinned = device
            .gpu()
            // The streams of a process share a few queues, in which a batch that is held would delay others.
            .map(|gpu| {
                PinnedSlabs::pin(gpu, &requests, assignment.pinned_request_bytes, &writer, !is_shared)
            });
        Ok(Self { pinned, requests, slots: AnswerSlots::new(writer, slot_bytes), answers })
    }
}

/// The result of a load.
struct LoadedParts {
    parts: Parts,
    times: LoadTimes,
    /// The GPU memory that the load of the model took, in bytes; 0 without a real GPU.
    weights: u64,
}

impl Parts {
    /// Opens the device, and loads the model. The process was prepared in the time since `begun_ns`.
    fn load(
        descriptors: Descriptors,
        prepared: PreparedProcess,
        assignment: &Assignment,
        begun_ns: u64,
    ) -> Result<LoadedParts, BootRefusal> {
        let Descriptors { batches, requests, responses, reference, pool, weights } = descriptors;
        let PreparedProcess { host, library, is_shared } = prepared;
        let loaded_ns = now_ns();
        let mut device = ComputeDevice::open(assignment, pool)?;
        let opened_ns = now_ns();
        if !is_shared
            && let Err(breach) = sandbox::deny_connections()
            && assignment.purpose.is_reference()
        {
            log_line(&chain(&breach));
        }
        let Slabs { pinned, requests, slots, answers } =
            Slabs::map(&requests, &responses, assignment, &device, is_shared)?;
        if let Some(gpu) = device.emulated().filter(|_| !is_shared) {
            gpu.obey(slots.pause_word());
        }
        let memory = device.take_memory(assignment.profile.as_ref(), weights.as_ref())?;
        let free = device.free_memory();
        let means = EngineResources {
            gpu: device.gpu().cloned(),
            weights,
            host,
            partitioned: assignment.partition.is_some(),
            is_shared,
            model: &assignment.model,
        };
        let (engine, mut signature) = ModelEngine::load(&assignment.engine, library.as_ref(), means)?;
        if assignment.device == DeviceSpec::Cuda {
            // A reference worker computes on the CPU, which supports optional inputs. The workers
            // that serve this model compute on a GPU, where optional inputs are not supported.
            signature.optional.clear();
        }
        let weights = free.saturating_sub(device.free_memory());
        let times = LoadTimes {
            libraries: between(begun_ns, loaded_ns),
            context: between(loaded_ns, opened_ns),
            session: between(opened_ns, now_ns()),
        };
        let (reference, socket) = (File::from(reference), batches);
        let model_file = match &assignment.engine {
            EngineSpec::OnnxRuntime { path, .. } => Some(path.clone()),
            EngineSpec::Python { .. } | EngineSpec::Emulated { .. } => None,
        };
        let parts = Self {
            engine,
            signature,
            device,
            pinned,
            requests,
            slots,
            answers,
            reference,
            socket,
            model_file,
            memory,
        };
        Ok(LoadedParts { parts, times, weights })
    }

    fn prove(
        &mut self,
        purpose: WorkerPurpose,
        partition: Option<&PartitionSpec>,
        warm_up: &WarmUp,
        channel: &BootChannel,
    ) -> Result<WarmUpReport, ProofError> {
        let on_gpu = self.device.gpu().is_some();
        let (engine, signature, slots) = (&mut self.engine, &self.signature, &self.slots);
        let mut prover = Prover {
            engine,
            signature,
            slots,
            answers: &self.answers,
            warm_up,
            socket: self.socket.as_fd(),
            channel,
            on_gpu,
            inputs: BTreeMap::new(),
            file: self.model_file.as_deref(),
            settings: InputSettings::first(warm_up.values.clone()),
            given: None,
        };
        let begun_ns = now_ns();
        let free = self.device.free_memory();
        match purpose {
            WorkerPurpose::Serve if on_gpu => proof::warm(&mut prover, &self.reference)?,
            WorkerPurpose::Serve | WorkerPurpose::Reference => {}
            // The reference answers must not depend on recordings. This call ends the warm-up,
            // after which the engine records no CUDA graphs.
            WorkerPurpose::DeviceReference => prover.engine.finish_warm_up()?,
        }
        let warm_ns = now_ns();
        let mut warmed = WarmUpReport { warmup: between(begun_ns, warm_ns), ..WarmUpReport::default() };
        match purpose {
            WorkerPurpose::Reference | WorkerPurpose::DeviceReference => {
                warmed.times = proof::write_reference(&mut prover, &self.reference)?;
            }
            WorkerPurpose::Serve => warmed.times = proof::prove(&mut prover, &self.reference, Groups::WHOLE)?,
        }
        if let Some(partition) = partition {
            let proven = partitions::prove(&mut prover, &self.reference, partition, &warmed.times)?;
            let mut failures = proven.counts.iter().filter_map(|proof| proof.result.clone().err());
            if let Some(why) = failures.next().filter(|_| prover.engine.channels_last()) {
                return Err(BootRefusal::NoPartitions(why).into());
            }
            warmed.partitions = Some(proven);
        }
        let largest = warmed.times.iter().map(|time| time.rows).max().unwrap_or(1);
        warmed.pieces = self.device.pieces(largest);
        warmed.memory = self.memory;
        warmed.sleep = self.engine.check_release().and_then(|()| match self.device.emulated() {
            Some(gpu) => Ok(gpu.weights()),
            None => self.engine.sleep_bytes(),
        });
        self.engine.describe(&mut warmed);
        warmed.proof = between(warm_ns, now_ns());
        warmed.activations = free.saturating_sub(self.device.free_memory());
        Ok(warmed)
    }

    /// Makes the next worker load the model with channels first, if the layout with channels last
    /// may have caused this refusal. Does nothing if an MPS percentage below 100 % limits this
    /// process. Half-precision models then fail the proof anyway (measured at 60 %), so the layout
    /// is probably not the cause.
    fn with_other_layout(&self, refusal: BootRefusal) -> BootRefusal {
        let by_layout = matches!(refusal, BootRefusal::NoPartitions(_) | BootRefusal::Proof { .. });
        let percentage = std::env::var(SHARE_VARIABLE).is_ok_and(|share| share != "100");
        if !by_layout || percentage || !self.engine.channels_last() {
            return refusal;
        }
        let why = refusal.to_string();
        match self.engine.use_channels_first(&why) {
            true => BootRefusal::OtherForm(format!("with channels last, {why}")),
            false => refusal,
        }
    }

    fn into_warm(self, batched: bool) -> WarmWorker {
        let Self { engine, signature, device, pinned, requests, slots, socket, .. } = self;
        WarmWorker { engine, signature, batched, device, pinned, requests, slots, socket, is_asleep: false }
    }
}
