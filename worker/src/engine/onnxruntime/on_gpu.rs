//! A model on a real GPU: inputs go from the request slab straight to tensors on the GPU, answers straight back
//! into the response slab, and nothing waits on the way.
#![allow(unsafe_code)] // copies between slabs and the tensors of ONNX Runtime

use std::fmt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::session::{IoBinding, RunOptions};
use ort::value::DynTensor;
use shadowslice_shared::batch::{Output, RunFailure};
use shadowslice_shared::boot::{Provider, Refusal};
use shadowslice_shared::tensor::Datatype;

use super::{Library, OnnxRuntime, Signature, broken, element_type, failed, options, output, providers};
use crate::answer::AnswerSlot;
use crate::device::cuda::CudaGpu;
use crate::inputs::Inputs;

/// Combinations of slot and shapes whose tensors are kept. Warmed-up sizes are about a dozen.
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
}

impl fmt::Debug for OnGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnGpu").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

/// Where batches of these shapes in this slot lie. The memory is not shared with anything that is computed, so that
/// a batch can arrive while the one before executes.
#[derive(Debug)]
struct Bound {
    slot: u8,
    shapes: Vec<Vec<i64>>,
    binding: IoBinding,
    tensors: Vec<DynTensor>,
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
        Ok((Self { bound: Vec::new(), options, allocator, memory, model, gpu }, signature))
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

    fn run_bound(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
    ) -> Result<Vec<Output>, RunFailure> {
        let index = self.bound(inputs)?;
        let bound = &mut self.bound[index];
        for (input, tensor) in bound.tensors.iter_mut().enumerate() {
            let parts: Vec<&[u8]> = match inputs.specs()[input].datatype {
                Datatype::Bool => vec![self.model.buffers[input].booleans(inputs, input)],
                _ => (0..inputs.requests()).map(|request| inputs.part(request, input)).collect(),
            };
            copy_in(&self.gpu, &parts, tensor)?;
        }
        self.gpu.start(inputs.slot()).map_err(|fault| broken(&fault))?;
        let answer = self.model.session.run_binding_with_options(&bound.binding, &self.options);
        let answer = answer.map_err(|fault| failed(&fault))?;
        let outputs = self.model.outputs.iter().map(|spec| {
            let value = answer.get(&spec.name);
            let value =
                value.ok_or_else(|| RunFailure::Engine(format!("output `{}` is missing", spec.name)))?;
            let size = spec.datatype.size().expect("strings take another way");
            output::fetch(spec, size, value, inputs, (&self.gpu, slot))
        });
        outputs.collect()
    }

    /// The tensors for a batch like this one.
    fn bound(&mut self, inputs: &Inputs<'_>) -> Result<usize, RunFailure> {
        let shapes: Vec<Vec<i64>> =
            (0..inputs.specs().len()).map(|input| inputs.shape(input).collect()).collect();
        let same = |bound: &Bound| bound.slot == inputs.slot() && bound.shapes == shapes;
        if let Some(found) = self.bound.iter().position(same) {
            return Ok(found);
        }
        // What the allocator hands out may have been freed by a run that still executes.
        self.gpu.synchronize().map_err(|fault| broken(&fault))?;
        if self.bound.len() >= MAX_BOUND {
            self.bound.clear();
        }
        let bound = self.bind(inputs, shapes).map_err(|fault| failed(&fault))?;
        self.bound.push(bound);
        Ok(self.bound.len() - 1)
    }

    fn bind(&self, inputs: &Inputs<'_>, shapes: Vec<Vec<i64>>) -> ort::Result<Bound> {
        let mut binding = self.model.session.create_binding()?;
        let mut tensors = Vec::with_capacity(shapes.len());
        for (spec, shape) in inputs.specs().iter().zip(&shapes) {
            let tensor = DynTensor::new(&self.allocator, element_type(spec.datatype), shape.clone())?;
            binding.bind_input(&spec.name, &tensor)?;
            tensors.push(tensor);
        }
        for spec in &self.model.outputs {
            binding.bind_output_to_device(&spec.name, &self.memory)?;
        }
        Ok(Bound { slot: inputs.slot(), shapes, binding, tensors })
    }
}

/// Lets the parts of an input travel to their places in a tensor, one after the other.
fn copy_in(gpu: &CudaGpu, parts: &[&[u8]], tensor: &mut DynTensor) -> Result<(), RunFailure> {
    let Some(start) = NonNull::new(tensor.data_ptr_mut().cast::<u8>()) else { return Ok(()) };
    let mut done = 0;
    for part in parts {
        // SAFETY: the tensor was made for the shape of the whole batch, whose parts `Inputs` has measured. It is
        // used by the batch in this slot only, and a part in the slab stays as it is until that is answered. What lies
        // elsewhere is not registered with the driver, which then has a copy of its own when the call returns.
        unsafe { gpu.copy_in(part, start.add(done)) }.map_err(|fault| broken(&fault))?;
        done += part.len();
    }
    Ok(())
}
