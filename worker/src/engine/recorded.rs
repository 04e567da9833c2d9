//! A batch that a host has recorded as a CUDA graph, and that is started without the host.
#![allow(unsafe_code)] // copies between slabs and the recording's tensors

use std::ptr::NonNull;

use shadowslice_shared::batch::RunFailure;

use super::fetch::fetch;
use super::host::{HostRecording, RecordedOutput};
use super::{EngineAnswer, broken};
use crate::answer::AnswerSlot;
use crate::device::cuda::graph::{Executable, MoveError, Recording, UploadStream};
use crate::device::cuda::partition::PartitionStream;
use crate::device::cuda::{CudaFault, CudaGpu};
use crate::inputs::Inputs;

/// The shapes of a batch's inputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InputShapes {
    /// `None` for a model without a batch axis.
    rows: Option<u32>,
    shapes: Vec<Vec<i64>>,
}

impl InputShapes {
    pub(super) fn of(inputs: &Inputs<'_>) -> Self {
        let shapes = (0..inputs.specs().len()).map(|input| inputs.row_shape(input).to_vec());
        Self { rows: inputs.rows(), shapes: shapes.collect() }
    }

    pub(super) fn rows(&self) -> u32 {
        self.rows.unwrap_or(1)
    }

    /// With the batch axis.
    fn whole(&self) -> Vec<Vec<i64>> {
        let rows = self.rows.map(i64::from);
        self.shapes.iter().map(|row| rows.into_iter().chain(row.iter().copied()).collect()).collect()
    }

    fn holds(&self, inputs: &Inputs<'_>) -> bool {
        self.rows >= inputs.rows()
            && (0..inputs.specs().len()).all(|input| self.shapes[input] == inputs.row_shape(input))
    }
}

#[derive(Debug)]
pub(super) struct RecordedGraph {
    form: InputShapes,
    inputs: Vec<NonNull<u8>>,
    outputs: Vec<RecordedOutput>,
    recording: Recording,
    whole: Executable,
}

impl RecordedGraph {
    /// `record` is asked with whole shapes.
    pub(super) fn new(
        gpu: &CudaGpu,
        form: InputShapes,
        record: impl FnOnce(&[Vec<i64>]) -> Result<Option<HostRecording>, RunFailure>,
    ) -> Result<Option<Self>, RunFailure> {
        let Some(HostRecording { graph, inputs, outputs }) = record(&form.whole())? else {
            return Ok(None);
        };
        // SAFETY: the host keeps what it has recorded, and changes none of it.
        let recording = unsafe { gpu.copy_recording(graph) }.map_err(|fault| broken(&fault))?;
        let whole = recording.instantiate().map_err(|fault| broken(&fault))?;
        let inputs = inputs.into_iter().map(place).collect();
        Ok(Some(Self { form, inputs, outputs, recording, whole }))
    }

    pub(super) fn check_movable(&self) -> Result<(), MoveError> {
        self.recording.check_movable()
    }

    pub(super) fn instantiate_on(
        &mut self,
        partition: &PartitionStream,
        uploads: &UploadStream,
    ) -> Result<Executable, CudaFault> {
        self.recording.instantiate_on(partition.context(), uploads)
    }

    /// Returns when the answer is in the slot. `partition`: this recording, ready on the batch's SMs.
    pub(super) fn run(
        &self,
        gpu: &CudaGpu,
        partition: Option<&Executable>,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
    ) -> Result<EngineAnswer, RunFailure> {
        self.copy_in(gpu, inputs).map_err(|fault| broken(&fault))?;
        gpu.start(inputs.slot()).map_err(|fault| broken(&fault))?;
        gpu.replay(partition.unwrap_or(&self.whole)).map_err(|fault| broken(&fault))?;
        let outputs = self.outputs.iter().map(|RecordedOutput { shape, address, row }| {
            // SAFETY: the output has as many rows as the recording, which holds the batch, and which
            // alone writes there.
            unsafe { fetch(shape, *row, place(*address), inputs, gpu, slot) }
        });
        let outputs = outputs.collect::<Result<_, _>>()?;
        gpu.synchronize().map_err(|fault| broken(&fault))?;
        Ok(EngineAnswer::whole(outputs))
    }

    fn copy_in(&self, gpu: &CudaGpu, inputs: &Inputs<'_>) -> Result<(), CudaFault> {
        for (input, &place) in self.inputs.iter().enumerate() {
            let mut done = 0;
            for request in 0..inputs.requests() {
                let part = inputs.part(request, input);
                // SAFETY: there is room for as many rows of this shape, or more. A batch runs when the
                // one before is through, and its parts stay in the slab until it is answered.
                unsafe { gpu.copy_in(part, place.add(done)) }?;
                done += part.len();
            }
        }
        Ok(())
    }
}

/// The smallest that holds the batch, by its place in the list.
pub(super) fn fitting(recorded: &[RecordedGraph], inputs: &Inputs<'_>) -> Option<usize> {
    let fits = recorded.iter().enumerate().filter(|(_, recorded)| recorded.form.holds(inputs));
    fits.min_by_key(|(_, recorded)| recorded.form.rows).map(|(index, _)| index)
}

/// Tensors without elements may have no address; no byte of them is copied.
fn place(address: usize) -> NonNull<u8> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap_or(NonNull::dangling())
}
