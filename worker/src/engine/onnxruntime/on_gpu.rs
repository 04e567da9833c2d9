//! A model on a real GPU: inputs go from the request slab straight to tensors on the GPU, answers straight back
//! into the response slab, and nothing waits on the way.
#![allow(unsafe_code)] // copies between slabs and the tensors of ONNX Runtime

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ort::environment::Environment;
use ort::logging::LogLevel;
use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::session::RunOptions;
use ort::session::builder::SessionBuilder;
use shadowslice_shared::batch::{Output, RunFailure};
use shadowslice_shared::boot::{Provider, Refusal};
use shadowslice_shared::tensor::{Datatype, TensorSpec};

use super::bound::{Bound, Fixed, How, Kind, Maker, Recorder};
use super::{Library, OnnxRuntime, Signature, broken, failed, operators, options, output, providers};
use crate::answer::AnswerSlot;
use crate::device::cuda::CudaGpu;
use crate::inputs::Inputs;

/// Kinds of batches whose places are kept. Warmed-up sizes are about a dozen, in two slots.
const MAX_BOUND: usize = 64;

/// A model whose tensors lie on the GPU.
pub struct OnGpu {
    // In the order in which they must go: the sessions' parts before the sessions, and the GPU last.
    bound: Vec<Bound>,
    options: RunOptions,
    allocator: Allocator,
    memory: MemoryInfo<'static>,
    /// The first is there from the start.
    sessions: Vec<OnnxRuntime>,
    loader: Loader,
    recording: Recording,
    gpu: Arc<CudaGpu>,
}

/// Whether executions are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recording {
    /// Some of it happens on the host, which a recording would not repeat.
    Never,
    /// As long as it warms up: what comes later may never come again. With `apart` each shape has a session of its own.
    Warming {
        /// Whether the sessions keep something for a shape.
        apart: bool,
    },
    /// It was; what has no place yet gets one in this session, whose state no recording depends on.
    Over {
        /// Its index, once it is there.
        spare: Option<usize>,
    },
}

impl fmt::Debug for OnGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnGpu").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

impl OnGpu {
    /// Loads a model with `threads` threads within those operators that run on the host's processor.
    pub fn load(
        library: &Library,
        model: &Path,
        threads: u32,
        (providers, gpu): (&[Provider], Arc<CudaGpu>),
    ) -> Result<(Self, Signature), Refusal> {
        let loader = Loader {
            environment: library.environment.clone(),
            model: model.to_owned(),
            threads,
            providers: providers.to_vec(),
            gpu: Arc::clone(&gpu),
        };
        let (session, signature, recording) = match loader.session(Fallback::Forbidden) {
            Ok((session, signature)) => {
                let apart = operators::remembers_shapes(model);
                (session, signature, Recording::Warming { apart })
            }
            // Either not all of it can be computed on the GPU, or it cannot be loaded at all, which is said then.
            Err(_) => {
                let (session, signature) = loader.session(Fallback::Allowed)?;
                (session, signature, Recording::Never)
            }
        };
        let setup = |fault: ort::Error| Refusal::Setup(fault.message().to_owned());
        let memory =
            || MemoryInfo::new(AllocationDevice::CUDA, 0, AllocatorType::Device, MemoryType::Default);
        let allocator = Allocator::new(&session.session, memory().map_err(setup)?).map_err(setup)?;
        let mut options = RunOptions::new().map_err(setup)?;
        options.disable_device_sync().map_err(setup)?;
        let memory = memory().map_err(setup)?;
        let (bound, sessions) = (Vec::new(), vec![session]);
        Ok((Self { bound, options, allocator, memory, sessions, loader, recording, gpu }, signature))
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<CudaGpu> {
        &self.gpu
    }

    /// Puts a batch on the GPU, and says where its answer will be once the GPU is [through](CudaGpu::executed)
    /// with this slot.
    pub fn begin(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
    ) -> Result<Vec<Output>, RunFailure> {
        let outputs = if self.has_strings(inputs) {
            // They live on the host; ONNX Runtime moves what it needs.
            self.gpu.start(inputs.slot()).map_err(|fault| broken(&fault))?;
            self.sessions[0].run(inputs, slot)?
        } else {
            self.run_bound(inputs, slot)?
        };
        slot.check()?;
        self.gpu.end(inputs.slot()).map_err(|fault| broken(&fault))?;
        Ok(outputs)
    }

    fn has_strings(&self, inputs: &Inputs<'_>) -> bool {
        let mut all = inputs.specs().iter().chain(&self.sessions[0].outputs);
        all.any(|spec| spec.datatype == Datatype::Bytes)
    }

    /// The warm-up is over.
    pub fn warmed_up(&mut self) {
        if let Recording::Warming { apart } = self.recording {
            self.recording = Recording::Over { spare: (!apart).then_some(0) };
        }
    }

    fn run_bound(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
    ) -> Result<Vec<Output>, RunFailure> {
        let index = self.bound(inputs)?;
        self.copy_in(inputs, index)?;
        let Self { bound, sessions, gpu, options, .. } = self;
        let model = &mut sessions[bound[index].session];
        gpu.start(inputs.slot()).map_err(|fault| broken(&fault))?;
        let specs = model.outputs.iter();
        match &bound[index].how {
            How::Recorded(graph, outputs) => {
                gpu.replay(graph).map_err(|fault| broken(&fault))?;
                let fetched = specs.zip(outputs).map(|(spec, Fixed { layout, buffer })| {
                    output::fetch(layout, size_of(spec), buffer.start(), inputs, (gpu, slot))
                });
                fetched.collect()
            }
            How::Eager(binding) => {
                let rows = bound[index].kind.rows;
                let answer = model.session.run_binding_with_options(binding, options);
                let answer = answer.map_err(|fault| failed(&fault))?;
                let fetched = specs.map(|spec| {
                    let missing = || RunFailure::Engine(format!("output `{}` is missing", spec.name));
                    let value = answer.get(&spec.name).ok_or_else(missing)?;
                    let layout = output::layout(spec, value, rows)?;
                    match output::on_device(value)? {
                        Some(start) => output::fetch(&layout, size_of(spec), start, inputs, (gpu, slot)),
                        None => output::split(spec, value, inputs, slot),
                    }
                });
                fetched.collect()
            }
        }
    }

    /// The places for a batch like this one, made if need be.
    fn bound(&mut self, inputs: &Inputs<'_>) -> Result<usize, RunFailure> {
        let shapes = (0..inputs.specs().len()).map(|input| inputs.row_shape(input).to_vec()).collect();
        let kind = Kind { slot: inputs.slot(), rows: inputs.rows(), shapes };
        let fitting = self.bound.iter().enumerate().filter(|(_, bound)| bound.kind.holds(&kind));
        if let Some((found, _)) = fitting.min_by_key(|(_, bound)| bound.kind.rows) {
            return Ok(found);
        }
        // What is on its way may use what goes now.
        self.gpu.synchronize().map_err(|fault| broken(&fault))?;
        if self.bound.len() >= MAX_BOUND {
            self.bound.pop();
        }
        let session = self.session_for(&kind)?;
        let Self { sessions, allocator, memory, gpu, .. } = self;
        let OnnxRuntime { session: model, outputs, .. } = &sessions[session];
        let bound = Maker { allocator, memory, gpu }.bind(model, kind, inputs.specs(), outputs)?;
        self.bound.push(Bound { session, ..bound });
        let index = self.bound.len() - 1;
        if matches!(self.recording, Recording::Warming { .. }) {
            self.copy_in(inputs, index)?;
            self.gpu.synchronize().map_err(|fault| broken(&fault))?;
            self.record(index)?;
        }
        Ok(index)
    }

    /// The session that executes batches of this kind, loaded if need be.
    fn session_for(&mut self, kind: &Kind) -> Result<usize, RunFailure> {
        let alike = |bound: &&Bound| bound.kind.rows == kind.rows && bound.kind.shapes == kind.shapes;
        match self.recording {
            Recording::Never | Recording::Warming { apart: false } => Ok(0),
            Recording::Warming { apart: true } => match self.bound.iter().find(alike) {
                Some(bound) => Ok(bound.session),
                None if self.bound.is_empty() => Ok(0),
                None => self.load_another(),
            },
            Recording::Over { spare: Some(spare) } => Ok(spare),
            Recording::Over { spare: None } => {
                let spare = self.load_another()?;
                self.recording = Recording::Over { spare: Some(spare) };
                Ok(spare)
            }
        }
    }

    fn load_another(&mut self) -> Result<usize, RunFailure> {
        let loaded = self.loader.session(Fallback::Allowed);
        let (session, _) = loaded.map_err(|refusal| RunFailure::Engine(refusal.to_string()))?;
        self.sessions.push(session);
        Ok(self.sessions.len() - 1)
    }

    fn record(&mut self, index: usize) -> Result<(), RunFailure> {
        let Self { bound, sessions, allocator, memory, options, gpu, .. } = self;
        let bound = &mut bound[index];
        let OnnxRuntime { session, outputs, .. } = &mut sessions[bound.session];
        Recorder { session, maker: Maker { allocator, memory, gpu }, options }.record(bound, outputs)
    }

    /// Lets the parts of all inputs travel to their places, one after the other.
    fn copy_in(&mut self, inputs: &Inputs<'_>, index: usize) -> Result<(), RunFailure> {
        for (input, place) in self.bound[index].inputs.iter().enumerate() {
            let parts: Vec<&[u8]> = match inputs.specs()[input].datatype {
                Datatype::Bool => vec![self.sessions[0].buffers[input].booleans(inputs, input)],
                _ => (0..inputs.requests()).map(|request| inputs.part(request, input)).collect(),
            };
            let mut done = 0;
            for part in parts {
                // SAFETY: there is room for a batch at least as large, whose parts `Inputs` has measured. It is used by the
                // batch in this slot only, and a part in the slab stays as it is until that is answered. What lies
                // elsewhere is not registered with the driver, which then has a copy of its own when the call returns.
                unsafe { self.gpu.copy_in(part, place.start().add(done)) }.map_err(|fault| broken(&fault))?;
                done += part.len();
            }
        }
        Ok(())
    }
}

fn size_of(spec: &TensorSpec) -> usize {
    spec.datatype.size().expect("strings are not bound")
}

/// What it takes to load a session once more.
struct Loader {
    environment: Environment,
    model: PathBuf,
    threads: u32,
    providers: Vec<Provider>,
    gpu: Arc<CudaGpu>,
}

/// Whether the host's processor may take what the providers do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fallback {
    Allowed,
    Forbidden,
}

impl Loader {
    fn session(&self, fallback: Fallback) -> Result<(OnnxRuntime, Signature), Refusal> {
        let refused = |fault: ort::Error<SessionBuilder>| Refusal::Library(fault.message().to_owned());
        let providers = providers::on_gpu(&self.providers, &self.gpu).map_err(Refusal::Setup)?;
        let builder = options(&self.environment, self.threads).map_err(Refusal::Model)?;
        let mut builder = builder.with_execution_providers(providers).map_err(refused)?;
        if fallback == Fallback::Forbidden {
            // That it fails is no error, and not to be logged as one.
            builder = builder.with_disable_cpu_fallback().map_err(refused)?;
            builder = builder.with_log_level(LogLevel::Fatal).map_err(refused)?;
        }
        OnnxRuntime::commit(builder, &self.model)
    }
}
