//! A model on a real GPU: inputs go from the request slab straight to tensors on the GPU, answers straight back
//! into the response slab, and nothing waits on the way.
#![allow(unsafe_code)] // copies between slabs and the tensors of ONNX Runtime

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::session::RunOptions;
use shadowslice_shared::batch::{Output, RunFailure};
use shadowslice_shared::boot::{Provider, Refusal};
use shadowslice_shared::tensor::{Datatype, TensorSpec};

use super::bound::{Bound, Fixed, How, Kind, Maker, Recorder};
use super::{Library, OnnxRuntime, Signature, broken, failed, options, output, providers};
use crate::answer::AnswerSlot;
use crate::device::cuda::CudaGpu;
use crate::inputs::Inputs;

/// Kinds of batches whose places are kept. Warmed-up sizes are about a dozen, in two slots.
const MAX_BOUND: usize = 64;

/// A model whose tensors lie on the GPU.
pub struct OnGpu {
    // In the order in which they must go: the session's parts before the session, and the GPU last.
    bound: Vec<Bound>,
    options: RunOptions,
    allocator: Allocator,
    memory: MemoryInfo<'static>,
    model: OnnxRuntime,
    gpu: Arc<CudaGpu>,
    /// While it warms up, executions are recorded; what comes up later is executed once, and may never come again.
    warming: bool,
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
        let providers = providers::on_gpu(providers, &gpu).map_err(Refusal::Setup)?;
        let builder = options(&library.environment, threads).map_err(Refusal::Model)?;
        let builder = builder
            .with_execution_providers(providers)
            .map_err(|fault| Refusal::Library(fault.message().to_owned()))?;
        let (model, signature) = OnnxRuntime::commit(builder, model)?;
        let setup = |fault: ort::Error| Refusal::Setup(fault.message().to_owned());
        let memory =
            || MemoryInfo::new(AllocationDevice::CUDA, 0, AllocatorType::Device, MemoryType::Default);
        let allocator = Allocator::new(&model.session, memory().map_err(setup)?).map_err(setup)?;
        let mut options = RunOptions::new().map_err(setup)?;
        options.disable_device_sync().map_err(setup)?;
        let memory = memory().map_err(setup)?;
        let engine = Self { bound: Vec::new(), options, allocator, memory, model, gpu, warming: true };
        Ok((engine, signature))
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
            self.model.run(inputs, slot)?
        } else {
            self.run_bound(inputs, slot)?
        };
        slot.check()?;
        self.gpu.end(inputs.slot()).map_err(|fault| broken(&fault))?;
        Ok(outputs)
    }

    fn has_strings(&self, inputs: &Inputs<'_>) -> bool {
        let mut all = inputs.specs().iter().chain(&self.model.outputs);
        all.any(|spec| spec.datatype == Datatype::Bytes)
    }

    /// The warm-up is over.
    pub fn warmed_up(&mut self) {
        self.warming = false;
    }

    fn run_bound(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
    ) -> Result<Vec<Output>, RunFailure> {
        let index = self.bound(inputs)?;
        self.copy_in(inputs, index)?;
        let Self { bound, model, gpu, options, .. } = self;
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
        let Self { model, allocator, memory, gpu, .. } = self;
        let maker = Maker { allocator, memory, gpu };
        let bound = maker.bind(&model.session, kind, inputs.specs(), &model.outputs)?;
        self.bound.push(bound);
        let index = self.bound.len() - 1;
        if self.warming {
            self.copy_in(inputs, index)?;
            self.gpu.synchronize().map_err(|fault| broken(&fault))?;
            self.record(index)?;
        }
        Ok(index)
    }

    fn record(&mut self, index: usize) -> Result<(), RunFailure> {
        let Self { bound, model, allocator, memory, options, gpu, .. } = self;
        let OnnxRuntime { session, outputs, .. } = model;
        Recorder { session, maker: Maker { allocator, memory, gpu }, options }
            .record(&mut bound[index], outputs)
    }

    /// Lets the parts of all inputs travel to their places, one after the other.
    fn copy_in(&mut self, inputs: &Inputs<'_>, index: usize) -> Result<(), RunFailure> {
        for (input, place) in self.bound[index].inputs.iter().enumerate() {
            let parts: Vec<&[u8]> = match inputs.specs()[input].datatype {
                Datatype::Bool => vec![self.model.buffers[input].booleans(inputs, input)],
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
