//! A model on a real GPU. The GPU copies inputs directly from the request slab to its tensors, and
//! answers directly into the response slab. A batch of a known form starts without waiting for the
//! GPU.
#![allow(unsafe_code)] // This module copies between slabs and the tensors of ONNX Runtime.

use std::collections::BTreeMap;
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::session::RunOptions;
use shadowslice_shared::batch::{BatchOutput, PartitionReply, RunFailure, SleepReply};
use shadowslice_shared::boot::{BootRefusal, DeviceMemory, ProviderSpec, WarmUpReport};
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::tensor::{Datatype, TensorSpec};

use super::bound::{Binder, BoundBatch, Buffers, ExecutionMode, OutputBuffer, RecordedBatch, Recorder};
use super::gather::GatherBuffer;
use super::loader::Loader;
use super::optimised::Optimised;
use super::partitions::RecordedPartitions;
use super::scratch;
use super::sessions::Sessions;
use super::sleep::WakeProof;
use super::weights::Weights;
use super::{Engine, EngineAnswer, Library, OnnxSession, Signature, output, run_failure};
use crate::answer::AnswerSlot;
use crate::device::cuda::CudaGpu;
use crate::device::cuda::arena::ThreadArena;
use crate::device::cuda::exclusion::Exclusion;
use crate::device::cuda::graph::{Executable, MoveError};
use crate::device::cuda::partition::SmGroups;
use crate::engine::cuda_failure;
use crate::engine::fetch::{bring, fetch};
use crate::engine::shapes::InputShapes;
use crate::inputs::Inputs;
use shadowslice_shared::errors::chain;

/// The parts of a model that earlier workers have prepared and later workers reuse.
#[derive(Debug, Default)]
pub struct RetainedModel<'k> {
    /// The folder of the model's optimised forms.
    pub folder: Option<&'k Path>,
    /// The socket over which worker and supervisor exchange the weights on the GPU.
    pub weights: Option<OwnedFd>,
}

/// The settings of a model on a real GPU.
#[derive(Debug, Clone, Copy)]
pub struct GpuSettings<'s> {
    /// The number of threads within operators that run on the host's CPU.
    pub threads: u32,
    /// The execution providers, in order of preference.
    pub providers: &'s [ProviderSpec],
    /// True if the model's share is a partition inside the process.
    pub partitioned: bool,
    /// True if other models run in the same process.
    pub is_shared: bool,
}

/// The maximum number of forms whose tensors stay bound. After warm-up, a model has tensors for
/// about a dozen batch sizes in each of two slots.
const MAX_BOUND: usize = 64;

/// The ONNX Runtime engine on a real GPU.
pub struct GpuEngine {
    // Fields are dropped in this order. Tensors must be dropped before sessions, and the GPU must
    // be dropped last.
    pub(super) bound: Vec<BoundBatch>,
    buffers: Buffers,
    /// The booleans of the batch in each slot, by slot and input.
    booleans: BTreeMap<(u8, usize), GatherBuffer>,
    /// The partitions, or `None` if the model's share is not a partition inside the process.
    partitions: Option<RecordedPartitions>,
    unmovable: Option<MoveError>,
    /// The number of kernels in the last recorded batch. The number is similar for other batch
    /// sizes.
    kernels: Option<u32>,
    options: RunOptions,
    memory: MemoryInfo<'static>,
    pub(super) sessions: Sessions,
    /// The memory that ONNX Runtime allocates for the sessions.
    pub(super) arena: ManuallyDrop<ThreadArena>,
    pub(super) wake_proof: WakeProof,
    is_shared: bool,
    pub(super) gpu: Arc<CudaGpu>,
}

impl fmt::Debug for GpuEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuEngine").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

impl Drop for GpuEngine {
    fn drop(&mut self) {
        self.bound.clear();
        self.partitions = None;
        self.sessions.clear();
        // The environment of a worker with one model has an arena too, and frees it when the process exits.
        if self.is_shared {
            // SAFETY: this is the only drop, and no session uses the memory any longer.
            unsafe { ManuallyDrop::drop(&mut self.arena) };
        }
    }
}

impl GpuEngine {
    pub fn load(
        library: &Library,
        model: &Path,
        retained: RetainedModel<'_>,
        settings: GpuSettings<'_>,
        gpu: Arc<CudaGpu>,
    ) -> Result<(Self, Signature), BootRefusal> {
        let GpuSettings { threads, providers, partitioned, is_shared } = settings;
        let mut loader = Loader {
            environment: library.environment.clone(),
            model: model.to_owned(),
            threads,
            providers: providers.to_vec(),
            optimised: None,
            weights: Weights::new(retained.weights),
            unshared: None,
            channels_last: false,
            is_shared,
            gpu: Arc::clone(&gpu),
        };
        match retained.folder.and_then(|folder| optimised(folder, model, providers, &loader.gpu)) {
            Some(Ok(optimised)) => {
                loader.channels_last = optimised.channels_last;
                loader.optimised = Some(optimised);
            }
            Some(Err(error)) => {
                loader.unshared = Some(format!(
                    "cannot use the folder of optimised models, so starts take more time and memory: {}",
                    chain(&error)
                ));
            }
            None => {}
        }
        let setup = |fault: ort::Error| BootRefusal::Setup(fault.message().to_owned());
        let arena = ThreadArena::create(&gpu).map_err(|fault| BootRefusal::Setup(chain(&fault)))?;
        if !is_shared {
            scratch::share(&library.environment).map_err(setup)?;
        }
        let (sessions, signature) = Sessions::load(loader)?;
        let memory = MemoryInfo::new(AllocationDevice::CUDA, 0, AllocatorType::Device, MemoryType::Default)
            .map_err(setup)?;
        let mut options = RunOptions::new().map_err(setup)?;
        options.disable_device_sync().map_err(setup)?;
        let undivided = |why| BootRefusal::NoPartitions(chain(&why));
        let groups = partitioned.then(|| SmGroups::of(&gpu)).transpose().map_err(undivided)?;
        let partitions = groups.map(|groups| RecordedPartitions::new(groups, Arc::clone(&gpu))).transpose();
        let partitions = partitions.map_err(|fault| BootRefusal::Setup(chain(&fault)))?;
        let engine = Self {
            bound: Vec::new(),
            buffers: Buffers::default(),
            booleans: BTreeMap::new(),
            partitions,
            unmovable: None,
            kernels: None,
            options,
            memory,
            sessions,
            arena: ManuallyDrop::new(arena),
            wake_proof: WakeProof::default(),
            is_shared,
            gpu,
        };
        Ok((engine, signature))
    }

    pub fn gpu(&self) -> &Arc<CudaGpu> {
        &self.gpu
    }

    /// Returns the result for one partition that has become ready since the last call, or `None` if
    /// there is none.
    pub fn next_prepared(&mut self) -> Option<PartitionReply> {
        self.partitions.as_mut()?.next_prepared()
    }

    /// Starts a batch, and returns the parts of its answer. The parts are complete once the GPU has
    /// [finished](CudaGpu::execution_time) the batch of this slot.
    pub fn begin(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
    ) -> Result<Vec<BatchOutput>, RunFailure> {
        let outputs = if self.has_strings(inputs) {
            // Strings stay in host memory, and ONNX Runtime copies the strings that it needs.
            self.refuse_partition(inputs.groups())?;
            self.gpu.start(inputs.slot()).map_err(|fault| cuda_failure(&fault))?;
            self.sessions.first_mut().run(inputs, slot)?.outputs
        } else {
            self.run_bound(inputs, slot)?
        };
        slot.check()?;
        self.gpu.end(inputs.slot()).map_err(|fault| cuda_failure(&fault))?;
        Ok(outputs)
    }

    fn has_strings(&self, inputs: &Inputs<'_>) -> bool {
        let mut all = inputs.specs().iter().chain(&self.sessions.first().outputs);
        all.any(|spec| spec.datatype == Datatype::Bytes)
    }

    /// Returns an error if the batch should run on a partition. A batch that is not recorded can
    /// only run on all SMs of the process.
    fn refuse_partition(&self, groups: Groups) -> Result<(), RunFailure> {
        if groups == Groups::WHOLE {
            return Ok(());
        }
        Err(RunFailure::Engine(
            "a batch of this shape has no CUDA graph, so the batch cannot run on a partition".into(),
        ))
    }

    fn run_bound(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
    ) -> Result<Vec<BatchOutput>, RunFailure> {
        let index = self.bound(inputs)?;
        // In the warm-up, libraries load kernels and allocate workspaces.
        let is_eager = matches!(self.bound[index].how, ExecutionMode::Eager(_));
        let _exclusion = (is_eager && self.sessions.is_warming()).then(Exclusion::of_setup);
        if let ExecutionMode::Eager(_) = self.bound[index].how {
            self.refuse_partition(inputs.groups())?;
        }
        self.copy_in(inputs, index)?;
        let Self { bound, partitions, sessions, gpu, options, .. } = self;
        let model = sessions.at_mut(bound[index].session);
        gpu.start(inputs.slot()).map_err(|fault| cuda_failure(&fault))?;
        let specs = model.outputs.iter();
        match &bound[index].how {
            ExecutionMode::Recorded(recorded) => {
                let executable = executable(partitions.as_mut(), recorded, inputs.groups())?;
                gpu.replay(executable).map_err(|fault| cuda_failure(&fault))?;
                let fetched = specs.zip(&recorded.outputs).map(|(spec, OutputBuffer { layout, buffer })| {
                    let row = layout.row * size_of(spec);
                    // SAFETY: the recording has at least as many rows as the batch, and only the
                    // recording writes to this buffer.
                    unsafe { fetch(&layout.shape, row, buffer.start(), inputs, gpu, slot) }
                });
                fetched.collect()
            }
            ExecutionMode::Eager(binding) => {
                let rows = bound[index].shapes.rows;
                let answer = model.session.run_binding_with_options(binding, options);
                let answer = answer.map_err(|fault| run_failure(&fault))?;
                let fetched = specs.map(|spec| {
                    let missing = || RunFailure::Engine(format!("output `{}` is missing", spec.name));
                    let value = answer.get(&spec.name).ok_or_else(missing)?;
                    let layout = output::layout(spec, value, rows)?;
                    match output::on_device(value)? {
                        Some(start) => {
                            let row = layout.row * size_of(spec);
                            // SAFETY: the output belongs to this batch, and only the compute stream
                            // frees its memory.
                            unsafe { fetch(&layout.shape, row, start, inputs, gpu, slot) }
                        }
                        None => output::split(spec, value, inputs, slot),
                    }
                });
                fetched.collect()
            }
        }
    }

    fn bound(&mut self, inputs: &Inputs<'_>) -> Result<usize, RunFailure> {
        let (slot, shapes) = (inputs.slot(), InputShapes::of(inputs));
        let exact = self.sessions.is_warming();
        let fits = |held: &InputShapes| if exact { *held == shapes } else { held.holds(&shapes) };
        let bound = self.bound.iter().enumerate();
        let fitting = bound.filter(|(_, bound)| bound.slot == slot && fits(&bound.shapes));
        if let Some((found, _)) = fitting.min_by_key(|(_, bound)| bound.shapes.rows) {
            return Ok(found);
        }
        // Batches in flight may still use the outputs and tensors that the code below drops.
        self.gpu.synchronize().map_err(|fault| cuda_failure(&fault))?;
        // Old outputs would fragment the scratch memory, and the next batch needs large blocks of
        // that memory.
        for bound in &mut self.bound {
            bound.drop_outputs(&self.sessions.at(bound.session).outputs, &self.memory)?;
        }
        if self.bound.len() >= MAX_BOUND {
            self.bound.pop();
        }
        let of = self.sessions.of(&shapes, &self.bound)?;
        let Self { sessions, memory, gpu, buffers, .. } = self;
        let OnnxSession { session: model, outputs, .. } = &sessions.at(of);
        let bound = Binder { memory, gpu, buffers }.bind(model, slot, shapes, of, inputs.specs(), outputs)?;
        self.bound.push(bound);
        Ok(self.bound.len() - 1)
    }

    fn record_bound(&mut self, index: usize) -> Result<(), RunFailure> {
        let Self { bound, buffers, partitions, unmovable, kernels, sessions, memory, options, gpu, .. } =
            self;
        let bound = &mut bound[index];
        let OnnxSession { session, outputs, .. } = sessions.at_mut(bound.session);
        let maker = Binder { memory, gpu, buffers };
        let recording = Recorder { session, maker, options }.record(bound, outputs)?;
        if let (Some(partitions), Some(recording), ExecutionMode::Recorded(recorded)) =
            (partitions, recording, &mut bound.how)
        {
            *kernels = recording.kernels();
            *unmovable = unmovable.or(recording.check_movable().err());
            recorded.recording = partitions.add(recording);
        }
        Ok(())
    }

    fn copy_in(&mut self, inputs: &Inputs<'_>, index: usize) -> Result<(), RunFailure> {
        let slot = inputs.slot();
        for (input, place) in self.bound[index].inputs.iter().enumerate() {
            let parts: Vec<&[u8]> = match inputs.specs()[input].datatype {
                Datatype::Bool => {
                    vec![self.booleans.entry((slot, input)).or_default().booleans(inputs, input)]
                }
                _ => (0..inputs.requests()).map(|request| inputs.part(request, input)).collect(),
            };
            // SAFETY: the buffer has space for a batch of this size, and `Inputs` has checked the
            // lengths of its parts. Only the batch in this slot uses that memory. Parts in the slab
            // and the slot's booleans do not change until the batch is answered.
            unsafe { bring(parts.into_iter(), place.start(), &self.gpu) }
                .map_err(|fault| cuda_failure(&fault))?;
        }
        Ok(())
    }
}

impl Engine for GpuEngine {
    fn run(&mut self, inputs: &Inputs<'_>, slot: &mut AnswerSlot<'_>) -> Result<EngineAnswer, RunFailure> {
        let outputs = self.begin(inputs, slot)?;
        self.gpu.synchronize().map_err(|fault| cuda_failure(&fault))?;
        Ok(EngineAnswer::complete(outputs))
    }

    fn execution_time(&self, slot: u8) -> Option<Duration> {
        self.gpu.execution_time(slot).ok().flatten()
    }

    fn describe(&self, report: &mut WarmUpReport) {
        let (weights, brought) = self.sessions.weights();
        let arenas = self.sessions.arenas().filter_map(|model| {
            let allocator = Allocator::new(&model.session, self.memory.clone()).ok()?;
            scratch::bytes(&allocator)
        });
        report.memory = DeviceMemory { weights, brought, scratch: arenas.sum() };
        report.unshared = self.sessions.unshared().map(str::to_owned);
        report.kernels = self.kernels;
    }

    fn channels_last(&self) -> bool {
        self.sessions.channels_last()
    }

    fn use_channels_first(&self, why: &str) -> bool {
        self.sessions.use_channels_first(why)
    }

    fn division(&self) -> Option<&Division> {
        self.partitions.as_ref().map(RecordedPartitions::division)
    }

    fn check_movable(&self, inputs: &[TensorSpec], batched: bool) -> Result<(), String> {
        let strings = inputs.iter().chain(&self.sessions.first().outputs);
        if let Some(spec) = strings.into_iter().find(|spec| spec.datatype == Datatype::Bytes) {
            return Err(format!("`{}` holds strings, which only the CPU can compute", spec.name));
        }
        let open = |spec: &&TensorSpec| spec.shape.iter().skip(usize::from(batched)).any(|&axis| axis < 0);
        if let Some(spec) = inputs.iter().find(open) {
            return Err(format!(
                "input `{}` has dynamic axes besides the batch, and a CUDA graph has fixed lengths; \
                 export the model with fixed axes",
                spec.name
            ));
        }
        let eager = self.bound.iter().find(|bound| matches!(bound.how, ExecutionMode::Eager(_)));
        match eager {
            Some(bound) if !bound.session.recordable => Err(format!(
                "the CPU computes a part of the model, which a CUDA graph cannot repeat: {}",
                self.sessions
                    .host_fallback_reason()
                    .unwrap_or("a dynamic axis of an input has no name, or one name has several lengths")
            )),
            Some(_) => Err("the model cannot be recorded as a CUDA graph".to_owned()),
            None => self.unmovable.as_ref().map_or(Ok(()), |why| Err(chain(why))),
        }
    }

    /// Prepares a partition. Returns `None` if [`GpuEngine::next_prepared`] returns the result later.
    fn prepare(&mut self, groups: Groups) -> Option<PartitionReply> {
        match &mut self.partitions {
            Some(partitions) => partitions.prepare(groups),
            None => {
                let why = "the worker's share is a percentage, not a partition".to_owned();
                Some(PartitionReply { groups, result: Err(why) })
            }
        }
    }

    fn fits(&self, groups: Groups, rows: u32) -> bool {
        let Some(partitions) = self.partitions.as_ref().filter(|_| groups != Groups::WHOLE) else {
            return true;
        };
        let mut sized = self.bound.iter().filter(|bound| bound.shapes.rows() == rows);
        sized.all(|bound| match &bound.how {
            ExecutionMode::Recorded(recorded) => partitions.fits(groups, recorded.recording),
            ExecutionMode::Eager(_) => false,
        })
    }

    fn forget(&mut self, groups: Groups, in_use: bool) {
        if let Some(partitions) = &mut self.partitions {
            partitions.forget(groups, in_use);
        }
    }

    fn check_release(&self) -> Result<(), String> {
        match self.sessions.has_tensorrt() {
            true => Err("TensorRT does not release the weights of its engines".to_owned()),
            false => Ok(()),
        }
    }

    fn sleep_bytes(&self) -> Result<u64, String> {
        self.releasable_bytes()
    }

    fn sleep(&mut self, pin: bool) -> Result<SleepReply, String> {
        self.release_memory(pin)
    }

    fn wake(&mut self) -> Result<(), String> {
        self.restore_memory()
    }

    /// Records batches of this size. Batches of all sizes must have run before the first recording.
    /// Otherwise, a later batch size could permanently allocate memory to which a recording writes.
    fn record(&mut self, size: u32) -> Result<(), RunFailure> {
        self.gpu.synchronize().map_err(|fault| cuda_failure(&fault))?;
        let wanted = |bound: &BoundBatch| bound.session.recordable && bound.shapes.rows() == size;
        for index in (0..self.bound.len()).filter(|&index| wanted(&self.bound[index])).collect::<Vec<_>>() {
            self.record_bound(index)?;
        }
        Ok(())
    }

    fn finish_warm_up(&mut self) -> Result<(), BootRefusal> {
        let _exclusion = Exclusion::of_setup();
        self.sessions.finish_warm_up(&self.bound)?;
        self.partitions
            .as_mut()
            .map_or(Ok(()), RecordedPartitions::finish_warm_up)
            .map_err(BootRefusal::NoPartitions)
    }
}

pub(super) fn size_of(spec: &TensorSpec) -> usize {
    spec.datatype.size().expect("tensors of strings are not bound")
}

/// Opens the folder of the model's optimised forms. Returns `None` if the model uses TensorRT,
/// which caches its engines itself.
fn optimised(
    folder: &Path,
    model: &Path,
    providers: &[ProviderSpec],
    gpu: &CudaGpu,
) -> Option<std::io::Result<Optimised>> {
    if providers.iter().any(|provider| *provider != ProviderSpec::Cuda) {
        return None;
    }
    let environment = format!("{} {:?} {providers:?}", ort::info(), gpu.capability());
    Some(Optimised::of(folder, model, &environment))
}

fn executable<'e>(
    partitions: Option<&'e mut RecordedPartitions>,
    recorded: &'e RecordedBatch,
    groups: Groups,
) -> Result<&'e Executable, RunFailure> {
    if groups == Groups::WHOLE {
        return Ok(&recorded.whole);
    }
    let partitions = partitions.filter(|partitions| partitions.has(groups));
    let partitions = partitions
        .ok_or_else(|| RunFailure::BadBatch(format!("the partition of groups {groups} is not ready")))?;
    // If a recording does not fit on the partition, it runs on all SMs. If the warm-up did not
    // detect this, the instantiator reports the failure.
    Ok(partitions.get(groups, recorded.recording).unwrap_or(&recorded.whole))
}
