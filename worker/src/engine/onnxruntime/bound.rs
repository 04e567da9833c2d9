//! Bound batches. A bound batch consists of the GPU tensors for batches of one form, and the way to
//! execute these batches.
#![allow(unsafe_code)] // This module creates tensors in its own buffers.

use std::collections::BTreeMap;
use std::rc::Rc;

use ort::memory::MemoryInfo;
use ort::session::{IoBinding, RunOptions, Session};
use ort::value::DynValue;
use shadowslice_shared::batch::RunFailure;
use shadowslice_shared::tensor::{TensorSpec, elements};

use super::output::{RowLayout, layout};
use super::{element_type, run_failure, tensor};
use crate::device::cuda::buffer::DeviceBuffer;
use crate::device::cuda::graph::{Executable, Recording};
use crate::device::cuda::{CudaError, CudaGpu};
use crate::engine::cuda_failure;
use crate::engine::shapes::InputShapes;

/// The tensors of batches of one form, which consists of the slot and the shapes of a batch. They share no memory with intermediate tensors, so the
/// worker can copy a batch's inputs while the previous batch executes.
#[derive(Debug)]
pub(super) struct BoundBatch {
    pub(super) slot: u8,
    pub(super) shapes: InputShapes,
    pub(super) session: SessionRef,
    pub(super) how: ExecutionMode,
    pub(super) inputs: Vec<Rc<DeviceBuffer>>,
    /// The size of each input of the batch in bytes. Its buffer can be larger.
    pub(super) input_bytes: Vec<usize>,
}

impl BoundBatch {
    /// Drops the outputs of the last batch, unless they belong to a recording. The GPU must have
    /// finished using these outputs. The next batch gets new outputs.
    pub(super) fn drop_outputs(
        &mut self,
        outputs: &[TensorSpec],
        memory: &MemoryInfo<'static>,
    ) -> Result<(), RunFailure> {
        match &mut self.how {
            ExecutionMode::Eager(binding) => allot_outputs(binding, outputs, memory),
            ExecutionMode::Recorded(_) => Ok(()),
        }
    }
}

/// Makes ONNX Runtime allocate the outputs on the GPU during the next run.
fn allot_outputs(
    binding: &mut IoBinding,
    outputs: &[TensorSpec],
    memory: &MemoryInfo<'static>,
) -> Result<(), RunFailure> {
    let mut allot = |spec: &TensorSpec| binding.bind_output_to_device(&spec.name, memory);
    outputs.iter().try_for_each(|spec| allot(spec).map_err(|fault| run_failure(&fault)))
}

/// A reference to a session of the model, by the session's index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SessionRef {
    pub(super) index: usize,
    /// True if all work of the session runs on the GPU, so that CUDA can record the work.
    pub(super) recordable: bool,
}

/// The way in which a bound batch is executed.
#[derive(Debug)]
pub(super) enum ExecutionMode {
    /// ONNX Runtime executes the operators one by one, and allocates the outputs.
    Eager(Box<IoBinding>),
    /// The GPU replays a recording, which writes outputs at fixed addresses. Without a recording,
    /// ONNX Runtime chooses the algorithm of each convolution again whenever the batch size
    /// changes.
    Recorded(RecordedBatch),
}

/// The recording of a bound batch.
#[derive(Debug)]
pub(super) struct RecordedBatch {
    /// The executable that runs on all SMs of the process.
    pub(super) whole: Executable,
    pub(super) recording: usize,
    pub(super) outputs: Vec<OutputBuffer>,
}

/// The buffer into which a recording writes an output.
#[derive(Debug)]
pub(super) struct OutputBuffer {
    pub(super) layout: RowLayout,
    pub(super) buffer: Rc<DeviceBuffer>,
}

/// The largest buffer so far for each input and output of each slot. A slot holds only one batch at
/// a time, so batches of all sizes can share its buffers.
#[derive(Debug, Default)]
pub(super) struct Buffers(BTreeMap<(u8, TensorId), Rc<DeviceBuffer>>);

/// The identity of an input or output tensor within a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum TensorId {
    Input(usize),
    Output(usize),
}

impl Buffers {
    fn of(
        &mut self,
        slot: u8,
        tensor: TensorId,
        bytes: usize,
        gpu: &CudaGpu,
    ) -> Result<Rc<DeviceBuffer>, CudaError> {
        if let Some(buffer) = self.0.get(&(slot, tensor)).filter(|buffer| buffer.bytes() >= bytes) {
            return Ok(Rc::clone(buffer));
        }
        let buffer = Rc::new(DeviceBuffer::zeroed(gpu, bytes)?);
        self.0.insert((slot, tensor), Rc::clone(&buffer));
        Ok(buffer)
    }
}

/// Creates bound batches.
pub(super) struct Binder<'m> {
    pub(super) memory: &'m MemoryInfo<'static>,
    pub(super) gpu: &'m CudaGpu,
    pub(super) buffers: &'m mut Buffers,
}

/// Records bound batches.
pub(super) struct Recorder<'m> {
    pub(super) session: &'m mut Session,
    pub(super) options: &'m RunOptions,
    pub(super) maker: Binder<'m>,
}

impl Binder<'_> {
    pub(super) fn bind(
        &mut self,
        session: &Session,
        slot: u8,
        shapes: InputShapes,
        of: SessionRef,
        inputs: &[TensorSpec],
        outputs: &[TensorSpec],
    ) -> Result<BoundBatch, RunFailure> {
        let mut binding = session.create_binding().map_err(|fault| run_failure(&fault))?;
        let (mut buffers, mut input_bytes) = (Vec::with_capacity(inputs.len()), Vec::new());
        for (input, (spec, shape)) in inputs.iter().zip(shapes.with_batch_axis()).enumerate() {
            let (buffer, tensor) = self.place(spec, &shape, slot, TensorId::Input(input))?;
            binding.bind_input(&spec.name, &tensor).map_err(|fault| run_failure(&fault))?;
            buffers.push(buffer);
            let count = elements(&shape).unwrap_or_default();
            input_bytes.push(count * spec.datatype.size().unwrap_or_default());
        }
        allot_outputs(&mut binding, outputs, self.memory)?;
        let how = ExecutionMode::Eager(Box::new(binding));
        Ok(BoundBatch { slot, shapes, session: of, how, inputs: buffers, input_bytes })
    }

    fn place(
        &mut self,
        spec: &TensorSpec,
        shape: &[i64],
        slot: u8,
        id: TensorId,
    ) -> Result<(Rc<DeviceBuffer>, DynValue), RunFailure> {
        let size = spec.datatype.size().expect("tensors of strings are not bound");
        let bytes = elements(shape).and_then(|count| count.checked_mul(size));
        let bytes = bytes.ok_or_else(|| {
            RunFailure::Engine(format!("input or output `{}` has an invalid shape {shape:?}", spec.name))
        })?;
        let buffer = self.buffers.of(slot, id, bytes, self.gpu).map_err(|fault| cuda_failure(&fault))?;
        // SAFETY: the buffer is at least as large as the shape requires. It outlives the tensor,
        // because bindings are dropped before buffers.
        let tensor =
            unsafe { tensor::at(self.memory, buffer.start(), bytes, shape, element_type(spec.datatype)) };
        Ok((buffer, tensor.map_err(|fault| run_failure(&fault))?))
    }
}

impl Recorder<'_> {
    /// Records the batch if CUDA can record it, and returns the recording. The inputs must already be in
    /// place. The batch runs once before the recording, so that all one-time work is already done.
    pub(super) fn record(
        &mut self,
        bound: &mut BoundBatch,
        outputs: &[TensorSpec],
    ) -> Result<Option<Recording>, RunFailure> {
        let ExecutionMode::Eager(binding) = &mut bound.how else { return Ok(None) };
        let answer = self.session.run_binding_with_options(binding, self.options);
        let answer = answer.map_err(|fault| run_failure(&fault))?;
        let mut layouts = Vec::with_capacity(outputs.len());
        for spec in outputs {
            let Some(value) = answer.get(&spec.name) else { return Ok(None) };
            layouts.push(layout(spec, value, bound.shapes.rows)?);
        }
        drop(answer);
        self.maker.gpu.synchronize().map_err(|fault| cuda_failure(&fault))?;
        let mut fixed = Vec::with_capacity(outputs.len());
        for (output, (spec, layout)) in outputs.iter().zip(layouts).enumerate() {
            let rows = bound.shapes.rows.map(i64::from);
            let shape: Vec<i64> = rows.into_iter().chain(layout.shape.iter().copied()).collect();
            let (buffer, tensor) = self.maker.place(spec, &shape, bound.slot, TensorId::Output(output))?;
            binding.bind_output(&spec.name, tensor).map_err(|fault| run_failure(&fault))?;
            fixed.push(OutputBuffer { layout, buffer });
        }
        let work = || self.session.run_binding_with_options(binding, self.options).map(drop);
        let recorded = self.maker.gpu.record(work).map_err(|fault| cuda_failure(&fault))?;
        let Some(recording) = recorded else {
            allot_outputs(binding, outputs, self.maker.memory)?;
            // After a failed recording, the driver reports the error again at the next call. This
            // extra run receives that error, so that no later run receives it.
            self.session.run_binding_with_options(binding, self.options).ok();
            return Ok(None);
        };
        let recording = self.maker.gpu.cut(recording).map_err(|fault| cuda_failure(&fault))?;
        let whole = recording.instantiate().map_err(|fault| cuda_failure(&fault))?;
        bound.how = ExecutionMode::Recorded(RecordedBatch { whole, recording: 0, outputs: fixed });
        Ok(Some(recording))
    }
}
