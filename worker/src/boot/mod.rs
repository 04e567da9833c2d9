//! From the first word to a worker that can serve: [`Connected`], then [`Loaded`], then [`Warm`],
//! each made from the one before. If a step fails, the worker tells the supervisor.

mod link;
mod partitions;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
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
use crate::device::Device;
use crate::device::cuda::pinned;
use crate::engine::{Engine, Host, Libraries, Means, Signature};
use crate::parent::Parent;
use crate::proof::{self, Trial, Unproven};
use crate::serve::Warm;
use crate::{say, walls};
pub use link::Fault;
pub use link::Link;
use shadowslice_shared::errors::chain;

#[derive(Debug)]
pub struct Connected {
    link: Link,
    descriptors: Descriptors,
    host: Option<Box<dyn Host>>,
    parent: Option<Parent>,
}

impl Connected {
    /// With the descriptors that the supervisor has passed to this process, and the program that
    /// runs models that no engine here runs.
    pub fn new(host: Option<Box<dyn Host>>) -> Result<Self, Fault> {
        let (boot, descriptors) = adopt().map_err(Fault::Connect)?;
        // Before the first order, which comes only while the supervisor lives.
        let parent = Parent::find().unwrap_or_else(unwatched);
        Ok(Self { link: Link::open(boot)?, descriptors, host, parent })
    }

    /// On an emulated device this takes at least as long as the assignment's profile says for
    /// starting a process and loading.
    pub fn load(self) -> Result<Loaded, Fault> {
        let Self { link, descriptors, host, parent } = self;
        let BootCommand::Load(assignment) = link.order()? else { return Err(link.out_of_step()) };
        let begun_ns = now_ns();
        let breaches = walls::raise(&walls::writable(&assignment.engine, assignment.on_gpu()));
        if assignment.purpose.is_reference() {
            // Once a model is enough.
            breaches.iter().for_each(|breach| say(&chain(breach)));
        }
        parent.map_or(Ok(()), Parent::end_with_it).unwrap_or_else(unwatched);
        let (parts, took, weights) =
            Parts::load(descriptors, host, &assignment).map_err(|refusal| link.refuse(refusal))?;
        let times = parts.device.start_times(assignment.profile.as_ref());
        wait_until(after(begun_ns, times.process.saturating_add(times.load)), &parts.socket)?;
        let took = emulated(took, times.process, between(begun_ns, now_ns()));
        let Signature { inputs, optional, outputs, streams } = parts.signature.clone();
        link.say(BootReply::Loaded(LoadedModel {
            inputs,
            optional,
            outputs,
            streams,
            sms: parts.device.sms(),
            took,
            weights,
        }))?;
        let Assignment { purpose, partition, .. } = *assignment;
        Ok(Loaded { link, purpose, partition, warm: times.warm, parts })
    }
}

#[derive(Debug)]
pub struct Loaded {
    link: Link,
    purpose: WorkerPurpose,
    partition: Option<PartitionSpec>,
    /// The least time that warming takes on the emulated device.
    warm: Duration,
    parts: Parts,
}

impl Loaded {
    /// `None` from a worker that only computes the reference answers: it has done its work then.
    ///
    /// Warm-up runs take no SMs of the emulated GPU from other workers, and none of its time.
    pub fn warm(mut self) -> Result<Option<Warm>, Fault> {
        let BootCommand::Warm(warm_up) = self.link.order()? else { return Err(self.link.out_of_step()) };
        let deadline_ns = after(now_ns(), self.warm);
        let aim = (self.purpose, self.partition.as_ref());
        let warmed = self.parts.prove(aim, &warm_up, &self.link).map_err(|unproven| match unproven {
            Unproven::Refused(refusal) => self.link.refuse(self.parts.perhaps_otherwise(refusal)),
            Unproven::HungUp => Fault::SupervisorGone,
        })?;
        self.parts.engine.warmed_up().map_err(|refusal| self.link.refuse(refusal))?;
        wait_until(deadline_ns, &self.parts.socket)?;
        let proof = warmed.proof.max(self.warm);
        self.link.say(BootReply::Warmed(WarmUpReport { proof, ..warmed }))?;
        Ok((!self.purpose.is_reference()).then(|| self.parts.into_warm(warm_up.batched)))
    }
}

fn unwatched<T: Default>(error: io::Error) -> T {
    say(&format!("if its model hangs, it would outlive a supervisor that is killed: {error}"));
    T::default()
}

/// How long each part of loading took, including the waits on an emulated device: `process` is the
/// time to start a process, out of `all`.
fn emulated(took: LoadTimes, process: Duration, all: Duration) -> LoadTimes {
    let context = took.context.max(process);
    let before = took.libraries.saturating_add(context);
    LoadTimes { context, session: took.session.max(all.saturating_sub(before)), ..took }
}

fn between(begun_ns: u64, ended_ns: u64) -> Duration {
    Duration::from_nanos(ended_ns.saturating_sub(begun_ns))
}

#[derive(Debug)]
struct Parts {
    engine: Engine,
    signature: Signature,
    device: Device,
    requests: ReadableSlab,
    slots: AnswerSlots,
    responses: OwnedFd,
    response_bytes: u64,
    reference: File,
    socket: OwnedFd,
    /// The file of an ONNX model.
    model_file: Option<PathBuf>,
    /// What it has of an emulated GPU's memory.
    memory: DeviceMemory,
}

impl Parts {
    fn load(
        descriptors: Descriptors,
        host: Option<Box<dyn Host>>,
        assignment: &Assignment,
    ) -> Result<(Self, LoadTimes, u64), BootRefusal> {
        let setup = |fault: SlabError| BootRefusal::Setup(chain(&fault));
        let Descriptors { batches, requests, responses, reference, pool, weights } = descriptors;
        let begun_ns = now_ns();
        let on_gpu = assignment.on_gpu();
        let libraries = Libraries::load(&assignment.engine, on_gpu)?;
        let loaded_ns = now_ns();
        let device = Device::open(assignment, pool)?;
        let opened_ns = now_ns();
        if let Err(breach) = walls::close_connections()
            && assignment.purpose.is_reference()
        {
            say(&chain(&breach));
        }
        let requests = ReadableSlab::map(requests.as_fd(), assignment.request_bytes).map_err(setup)?;
        let slot_bytes = assignment.response_slot_bytes;
        let response_bytes = slot_bytes
            .checked_mul(IN_FLIGHT as u64)
            .ok_or_else(|| BootRefusal::Setup(format!("slots of {slot_bytes} bytes are impossible")))?;
        let writer = AnswerWriter::map(responses.as_fd(), response_bytes).map_err(setup)?;
        if let Some(gpu) = device.gpu() {
            pinned::pin(gpu, &requests, &writer);
        }
        let memory = device.take_memory(assignment.profile.as_ref(), weights.as_ref())?;
        let free = device.free_memory();
        let means = Means {
            gpu: device.gpu().cloned(),
            weights,
            host,
            partitioned: assignment.partition.is_some(),
            model: &assignment.model,
        };
        let (engine, mut signature) = Engine::load(&assignment.engine, &libraries, means)?;
        if assignment.device == DeviceSpec::Cuda {
            // A reference worker computes on the CPU, which takes them. The workers that serve do not.
            signature.optional.clear();
        }
        let weights = free.saturating_sub(device.free_memory());
        let took = LoadTimes {
            libraries: between(begun_ns, loaded_ns),
            context: between(loaded_ns, opened_ns),
            session: between(opened_ns, now_ns()),
        };
        let slots = AnswerSlots::new(writer, slot_bytes);
        let (reference, socket) = (File::from(reference), batches);
        let model_file = match &assignment.engine {
            EngineSpec::OnnxRuntime { path, .. } => Some(path.clone()),
            EngineSpec::Python { .. } | EngineSpec::Emulated { .. } => None,
        };
        let parts = Self {
            engine,
            signature,
            device,
            requests,
            slots,
            responses,
            response_bytes,
            reference,
            socket,
            model_file,
            memory,
        };
        Ok((parts, took, weights))
    }

    fn prove(
        &mut self,
        (purpose, partition): (WorkerPurpose, Option<&PartitionSpec>),
        warm_up: &WarmUp,
        link: &Link,
    ) -> Result<WarmUpReport, Unproven> {
        let answers = ReadableSlab::map(self.responses.as_fd(), self.response_bytes)
            .map_err(|fault| BootRefusal::Setup(chain(&fault)))?;
        let on_gpu = self.device.gpu().is_some();
        let (engine, signature, slots) = (&mut self.engine, &self.signature, &self.slots);
        let socket = Some(self.socket.as_fd());
        let (inputs, given) = (BTreeMap::new(), None);
        let mut trial = Trial {
            engine,
            signature,
            slots,
            answers: &answers,
            warm_up,
            socket,
            link: Some(link),
            on_gpu,
            inputs,
            file: self.model_file.as_deref(),
            values: warm_up.values.clone(),
            open_axis: 1,
            given,
        };
        let begun_ns = now_ns();
        let free = self.device.free_memory();
        match purpose {
            WorkerPurpose::Serve if on_gpu => proof::warm(&mut trial, Some(&self.reference))?,
            WorkerPurpose::Serve | WorkerPurpose::Reference => {}
            // So that nothing is recorded: the reference answers must not depend on recordings.
            WorkerPurpose::DeviceReference => trial.engine.warmed_up()?,
        }
        let warm_ns = now_ns();
        let mut warmed = WarmUpReport { warmup: between(begun_ns, warm_ns), ..WarmUpReport::default() };
        match purpose {
            WorkerPurpose::Reference | WorkerPurpose::DeviceReference => {
                warmed.times = proof::write_reference(&mut trial, &self.reference)?;
            }
            WorkerPurpose::Serve => warmed.times = proof::prove(&mut trial, &self.reference, Groups::WHOLE)?,
        }
        if let Some(partition) = partition {
            let proven = partitions::prove(&mut trial, &self.reference, partition, &warmed.times)?;
            let mut failures = proven.counts.iter().filter_map(|proof| proof.result.clone().err());
            if let Some(why) = failures.next().filter(|_| trial.engine.channels_last()) {
                return Err(BootRefusal::NoPartitions(why).into());
            }
            warmed.partitions = Some(proven);
        }
        warmed.kernels = self.engine.kernels();
        warmed.memory = self.engine.memory().unwrap_or(self.memory);
        warmed.unshared = self.engine.unshared().map(str::to_owned);
        warmed.proof = between(warm_ns, now_ns());
        warmed.activations = free.saturating_sub(self.device.free_memory());
        Ok(warmed)
    }

    /// If channels last may be the cause of a refusal, the next worker does without them. At an MPS
    /// percentage others are likelier: half precision is wrong there.
    fn perhaps_otherwise(&self, refusal: BootRefusal) -> BootRefusal {
        let by_layout = matches!(refusal, BootRefusal::NoPartitions(_) | BootRefusal::Proof { .. });
        let percentage = std::env::var(SHARE_VARIABLE).is_ok_and(|share| share != "100");
        if !by_layout || percentage || !self.engine.channels_last() {
            return refusal;
        }
        let why = refusal.to_string();
        match self.engine.put_channels_first(&why) {
            true => BootRefusal::OtherForm(format!("with channels last {why}")),
            false => refusal,
        }
    }

    fn into_warm(self, batched: bool) -> Warm {
        let Self { engine, signature, device, requests, slots, socket, .. } = self;
        Warm { engine, signature, batched, device, requests, slots, socket }
    }
}
