//! A hosted model, and the partitions of the GPU that its host runs it on.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use shadowslice_shared::batch::{PartitionReply, RunFailure, StreamStep};
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::groups::{Division, Groups};

use super::recorded::{Form, Recorded, fitting};
use super::{Basis, Host, Ran, Setting, Signature};
use crate::answer::AnswerSlot;
use crate::device::cuda::CudaGpu;
use crate::device::cuda::graph::{Executable, UploadStream};
use crate::device::cuda::partition::{PartitionStream, SmGroups};
use crate::inputs::Inputs;
use shadowslice_shared::errors::chain;

#[derive(Debug)]
pub struct Hosted {
    // Before the host, whose recordings they are.
    recorded: Vec<Recorded>,
    /// What has run and may be recorded; `None` once it serves.
    forms: Option<Vec<Form>>,
    /// Where the share is a partition of a real GPU.
    partitions: Option<Partitions>,
    host: Box<dyn Host>,
    gpu: Option<Arc<CudaGpu>>,
}

#[derive(Debug)]
struct Partitions {
    groups: SmGroups,
    uploads: UploadStream,
    /// Never given up, as the driver would keep their memory all the same.
    made: BTreeMap<Groups, Partition>,
}

#[derive(Debug)]
struct Partition {
    /// All that is recorded, in the same order, as long as the partition is ready.
    executables: Vec<Executable>,
    stream: PartitionStream,
    /// Whether the model runs there, or why not.
    tried: Option<Result<(), String>>,
}

impl Hosted {
    pub(super) fn load(
        mut host: Box<dyn Host>,
        setting: Setting<'_>,
        gpu: Option<&Arc<CudaGpu>>,
        partitioned: bool,
    ) -> Result<(Self, Signature), BootRefusal> {
        let signature = host.load(setting)?;
        let partitions = gpu.filter(|_| partitioned).map(Partitions::of).transpose()?;
        let (recorded, forms) = (Vec::new(), Some(Vec::new()));
        Ok((Self { recorded, forms, partitions, host, gpu: gpu.cloned() }, signature))
    }

    /// Whether batches can run on another part of the GPU than all of it; else why not.
    pub fn movable(&self) -> Result<(), String> {
        if self.partitions.is_none() {
            return Ok(());
        }
        self.host.movable()?;
        self.recorded.iter().try_for_each(|recorded| recorded.movable().map_err(|why| chain(&why)))
    }

    /// `None` where no real GPU is divided.
    pub fn division(&self) -> Option<&Division> {
        self.partitions.as_ref().map(|partitions| partitions.groups.division())
    }

    pub(super) fn basis(&mut self) -> Result<Basis, BootRefusal> {
        self.host.basis()
    }

    pub(super) fn prepare(&mut self, groups: Groups) -> PartitionReply {
        let Self { partitions, recorded, .. } = self;
        let made = partitions.as_mut().map_or(Ok(()), |partitions| partitions.make(groups, recorded));
        PartitionReply { groups, result: made }
    }

    /// Whether the model runs on groups that are ready: a kernel whose blocks come in clusters may fit
    /// on some groups and not on as many others.
    pub(super) fn try_on(&mut self, groups: Groups) -> Result<(), String> {
        let Some(partitions) = self.partitions.as_mut() else { return Ok(()) };
        let Some(Partition { stream, tried, .. }) = partitions.made.get_mut(&groups) else { return Ok(()) };
        tried.get_or_insert_with(|| self.host.try_on(stream.handle())).clone()
    }

    pub(super) fn forget(&mut self, groups: Groups) {
        let partitions = self.partitions.as_mut();
        if let Some(partition) = partitions.and_then(|partitions| partitions.made.get_mut(&groups)) {
            partition.executables.clear();
        }
        self.host.left();
    }

    /// Batches of this size, in each form that has run.
    pub(super) fn record(&mut self, size: u32) -> Result<(), RunFailure> {
        let (Some(gpu), Some(forms)) = (&self.gpu, &mut self.forms) else { return Ok(()) };
        for form in forms.extract_if(.., |form| form.rows() == size) {
            let record = |shapes: &[Vec<i64>]| self.host.record(shapes);
            self.recorded.extend(Recorded::new(gpu, form, record)?);
        }
        Ok(())
    }

    pub(super) fn warmed_up(&mut self) {
        self.forms = None;
        self.host.warmed_up();
    }

    pub(super) fn run(&mut self, inputs: &Inputs<'_>, slot: &mut AnswerSlot<'_>) -> Result<Ran, RunFailure> {
        if let (Some(index), Some(gpu)) = (fitting(&self.recorded, inputs), &self.gpu) {
            let partition = self.partition(inputs.groups())?;
            let executable = partition.map(|partition| partition.executables.get(index).ok_or_else(unready));
            return self.recorded[index].run(gpu, executable.transpose()?, (inputs, slot));
        }
        if let Some(forms) = &mut self.forms
            && let form = Form::of(inputs)
            && !forms.contains(&form)
        {
            forms.push(form);
        }
        let cuda = self.stream_on(inputs.groups())?;
        self.host.run(inputs, slot, cuda)
    }

    pub(super) fn step(&mut self, step: &StreamStep, slot: &mut AnswerSlot<'_>) -> Result<Ran, RunFailure> {
        let cuda = self.stream_on(step.groups)?;
        self.host.step(step.stream, slot, cuda)
    }

    pub(super) fn may_need_warmup(&self) -> bool {
        self.host.may_need_warmup()
    }

    pub(super) fn close(&mut self, stream: u64) {
        self.host.close(stream);
    }

    /// The CUDA stream of a partition; `None` for the whole.
    fn stream_on(&self, groups: Groups) -> Result<Option<usize>, RunFailure> {
        Ok(self.partition(groups)?.map(|partition| partition.stream.handle()))
    }

    /// `None` for the whole.
    fn partition(&self, groups: Groups) -> Result<Option<&Partition>, RunFailure> {
        let partitions = self.partitions.as_ref().filter(|_| groups != Groups::WHOLE);
        partitions.map(|partitions| partitions.made.get(&groups).ok_or_else(unready)).transpose()
    }
}

fn unready() -> RunFailure {
    RunFailure::BadBatch("its partition is not ready".to_owned())
}

impl Partitions {
    fn of(gpu: &Arc<CudaGpu>) -> Result<Self, BootRefusal> {
        let groups = SmGroups::of(gpu).map_err(|undivided| BootRefusal::NoPartitions(chain(&undivided)))?;
        let uploads = UploadStream::new(gpu).map_err(|fault| BootRefusal::Setup(chain(&fault)))?;
        Ok(Self { groups, uploads, made: BTreeMap::new() })
    }

    fn make(&mut self, groups: Groups, recorded: &mut [Recorded]) -> Result<(), String> {
        if groups == Groups::WHOLE {
            return Ok(());
        }
        if !groups.is_run() {
            return Err("its groups are no neighbours".to_owned());
        }
        let Self { groups: all, uploads, made } = self;
        let partition = match made.entry(groups) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let stream = all.stream(groups).map_err(|fault| chain(&fault))?;
                place.insert(Partition { executables: Vec::new(), stream, tried: None })
            }
        };
        if partition.executables.is_empty() {
            let ready = recorded.iter_mut().map(|recorded| recorded.ready_on(&partition.stream, uploads));
            partition.executables = ready.collect::<Result<_, _>>().map_err(|fault| chain(&fault))?;
        }
        Ok(())
    }
}
