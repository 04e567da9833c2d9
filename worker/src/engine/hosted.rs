//! A model that a host runs, and the partitions of the GPU on which it runs.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use shadowslice_shared::batch::{PartitionReply, RunFailure, SleepReply, StreamStep};
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::tensor::TensorSpec;

use super::hosted_sleep::HostedProof;
use super::recorded::{RecordedGraph, fitting};
use super::shapes::InputShapes;
use super::{Engine, EngineAnswer, LoadRequest, ModelHost, ProofBasis, Signature, StreamResult};
use crate::answer::AnswerSlot;
use crate::device::cuda::CudaGpu;
use crate::device::cuda::arena::ThreadArena;
use crate::device::cuda::graph::{Executable, UploadStream};
use crate::device::cuda::partition::{PartitionStream, SmGroups};
use crate::inputs::Inputs;
use shadowslice_shared::errors::chain;

/// A model that the host runs, with its recordings and partitions.
#[derive(Debug)]
pub struct Hosted {
    // The recordings must be dropped before the host, which owns their tensors.
    pub(super) recorded: Vec<RecordedGraph>,
    /// The shapes of the batches that have run but are not recorded yet, or `None` once the worker
    /// serves.
    seen_shapes: Option<Vec<InputShapes>>,
    /// The partitions, or `None` if the share is not a partition of a real GPU.
    partitions: Option<HostedPartitions>,
    pub(super) host: Box<dyn ModelHost>,
    /// The memory of a model on a real GPU. It is never dropped, because the host's libraries may use the
    /// memory until the process exits.
    pub(super) arena: Option<ManuallyDrop<ThreadArena>>,
    pub(super) wake_proof: HostedProof,
    pub(super) gpu: Option<Arc<CudaGpu>>,
    /// True if the model gives several answers to a request.
    pub(super) streams: bool,
}

#[derive(Debug)]
struct HostedPartitions {
    groups: SmGroups,
    uploads: UploadStream,
    /// The partitions that have been used. They are never freed, because the driver does not
    /// release all memory of a freed partition.
    by_groups: BTreeMap<Groups, Partition>,
}

#[derive(Debug)]
struct Partition {
    /// The executables of all recordings, in the same order as the recordings. They exist only
    /// while the partition is ready.
    executables: Vec<Executable>,
    stream: PartitionStream,
    /// The result of the model's trial run on the partition, or `None` if there was none.
    tried: Option<Result<(), String>>,
}

impl Hosted {
    pub(super) fn load(
        mut host: Box<dyn ModelHost>,
        request: LoadRequest<'_>,
        gpu: Option<&Arc<CudaGpu>>,
        partitioned: bool,
    ) -> Result<(Self, Signature), BootRefusal> {
        let arena = gpu.map(ThreadArena::create).transpose();
        let arena = arena.map_err(|fault| BootRefusal::Setup(chain(&fault)))?.map(ManuallyDrop::new);
        let signature = host.load(request)?;
        let partitions = gpu.filter(|_| partitioned).map(HostedPartitions::of).transpose()?;
        let (recorded, seen_shapes) = (Vec::new(), Some(Vec::new()));
        let gpu = gpu.cloned();
        let wake_proof = HostedProof::Unknown;
        let streams = signature.streams.is_some();
        let hosted = Self { recorded, seen_shapes, partitions, host, arena, wake_proof, gpu, streams };
        Ok((hosted, signature))
    }

    /// Runs a batch without a check that the answer fits into its slot.
    fn run_unchecked(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
    ) -> Result<EngineAnswer, RunFailure> {
        if !self.streams {
            if let (Some(index), Some(gpu)) = (fitting(&self.recorded, inputs), &self.gpu) {
                return self.recorded[index].run(gpu, self.executable(index, inputs.groups())?, inputs, slot);
            }
            self.see(InputShapes::of(inputs));
        }
        let cuda = self.stream_on(inputs.groups())?;
        self.host.run(inputs, slot, cuda)
    }

    /// Returns the executable of a recording on a partition, or `None` for the whole GPU.
    pub(super) fn executable(&self, index: usize, groups: Groups) -> Result<Option<&Executable>, RunFailure> {
        let partition = self.partition(groups)?;
        partition.map(|partition| partition.executables.get(index).ok_or_else(not_ready)).transpose()
    }

    /// Remembers shapes that have run before the worker serves, so that they can be recorded.
    fn see(&mut self, shapes: InputShapes) {
        if let Some(seen_shapes) = self.seen_shapes.as_mut().filter(|seen| !seen.contains(&shapes)) {
            seen_shapes.push(shapes);
        }
    }

    /// Returns the CUDA stream of a partition, or `None` for the whole GPU.
    fn stream_on(&self, groups: Groups) -> Result<Option<usize>, RunFailure> {
        Ok(self.partition(groups)?.map(|partition| partition.stream.handle()))
    }

    /// Returns the partition of these groups, or `None` for the whole GPU.
    fn partition(&self, groups: Groups) -> Result<Option<&Partition>, RunFailure> {
        let partitions = self.partitions.as_ref().filter(|_| groups != Groups::WHOLE);
        partitions.map(|partitions| partitions.by_groups.get(&groups).ok_or_else(not_ready)).transpose()
    }
}

impl Engine for Hosted {
    fn check_movable(&self, _inputs: &[TensorSpec], _batched: bool) -> Result<(), String> {
        if self.partitions.is_none() {
            return Ok(());
        }
        self.host.check_movable()?;
        self.recorded.iter().try_for_each(|recorded| recorded.check_movable().map_err(|why| chain(&why)))
    }

    fn division(&self) -> Option<&Division> {
        self.partitions.as_ref().map(|partitions| partitions.groups.division())
    }

    fn basis(&mut self) -> Result<ProofBasis, BootRefusal> {
        self.host.basis()
    }

    fn prepare(&mut self, groups: Groups) -> Option<PartitionReply> {
        let Self { partitions, recorded, .. } = self;
        let made = partitions.as_mut().map_or(Ok(()), |partitions| partitions.make(groups, recorded));
        Some(PartitionReply { groups, result: made })
    }

    /// Runs the model once on these groups, whose partition must be ready. The proof uses only the
    /// first groups of the GPU, and the model may fail on the same number of other groups. This
    /// happens if a kernel's blocks form clusters.
    fn try_on(&mut self, groups: Groups) -> Result<(), String> {
        let Some(partitions) = self.partitions.as_mut() else { return Ok(()) };
        let Some(Partition { stream, tried, .. }) = partitions.by_groups.get_mut(&groups) else {
            return Ok(());
        };
        tried.get_or_insert_with(|| self.host.try_on(stream.handle())).clone()
    }

    fn forget(&mut self, groups: Groups, _in_use: bool) {
        let partitions = self.partitions.as_mut();
        if let Some(partition) = partitions.and_then(|partitions| partitions.by_groups.get_mut(&groups)) {
            partition.executables.clear();
        }
        self.host.release_partition();
    }

    /// Records batches of this size. Makes one recording for each combination of input shapes that
    /// has run.
    fn record(&mut self, size: u32) -> Result<(), RunFailure> {
        let (Some(gpu), Some(seen_shapes)) = (&self.gpu, &mut self.seen_shapes) else { return Ok(()) };
        for shapes in seen_shapes.extract_if(.., |shapes| shapes.rows() == size) {
            let record = |shapes: &[Vec<i64>]| self.host.record(shapes);
            self.recorded.extend(RecordedGraph::new(gpu, shapes, record)?);
        }
        Ok(())
    }

    fn finish_warm_up(&mut self) -> Result<(), BootRefusal> {
        self.seen_shapes = None;
        self.host.finish_warm_up();
        Ok(())
    }

    fn run(&mut self, inputs: &Inputs<'_>, slot: &mut AnswerSlot<'_>) -> Result<EngineAnswer, RunFailure> {
        let ran = self.run_unchecked(inputs, slot)?;
        slot.check().map(|()| ran)
    }

    fn step(&mut self, step: &StreamStep, slot: &mut AnswerSlot<'_>) -> Vec<StreamResult> {
        let failed = |failure: RunFailure| step.streams.iter().map(|_| Err(failure.clone())).collect();
        match self.replay_step(step, slot) {
            Ok(Some(results)) => return results,
            Ok(None) => {}
            Err(failure) => return failed(failure),
        }
        self.see(InputShapes::of_step(step.streams.len()));
        match self.stream_on(step.groups) {
            Ok(cuda) => self.host.step(&step.streams, slot, cuda),
            Err(failure) => failed(failure),
        }
    }

    fn advice_on_difference(&self) -> &'static str {
        "; if answers to the same input may differ, write `deterministic = False` in the class"
    }

    fn advice_on_failure(&self) -> Option<&'static str> {
        Some(match self.host.may_need_warmup() {
            true => {
                "; if the model cannot run on made-up values, add a method `warmup` to its class, or \
                 set `warmup` in its configuration to values or to a file of arrays"
            }
            false => "",
        })
    }

    fn close(&mut self, stream: u64) {
        self.host.close(stream);
    }

    fn check_release(&self) -> Result<(), String> {
        self.host.check_arena()
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
}

fn not_ready() -> RunFailure {
    RunFailure::BadBatch("the partition of the batch is not ready".to_owned())
}

impl HostedPartitions {
    fn of(gpu: &Arc<CudaGpu>) -> Result<Self, BootRefusal> {
        let groups = SmGroups::of(gpu).map_err(|undivided| BootRefusal::NoPartitions(chain(&undivided)))?;
        let uploads = UploadStream::new(gpu).map_err(|fault| BootRefusal::Setup(chain(&fault)))?;
        Ok(Self { groups, uploads, by_groups: BTreeMap::new() })
    }

    fn make(&mut self, groups: Groups, recorded: &mut [RecordedGraph]) -> Result<(), String> {
        if groups == Groups::WHOLE {
            return Ok(());
        }
        if !groups.is_run() {
            return Err("the groups of the partition are not adjacent".to_owned());
        }
        let Self { groups: all, uploads, by_groups } = self;
        let partition = match by_groups.entry(groups) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let stream = all.stream(groups).map_err(|fault| chain(&fault))?;
                place.insert(Partition { executables: Vec::new(), stream, tried: None })
            }
        };
        if partition.executables.is_empty() {
            let ready =
                recorded.iter_mut().map(|recorded| recorded.instantiate_on(&partition.stream, uploads));
            partition.executables = ready.collect::<Result<_, _>>().map_err(|fault| chain(&fault))?;
        }
        Ok(())
    }
}
