//! A hosted model, and the partitions of the GPU that its host runs it on.

use std::collections::BTreeMap;
use std::sync::Arc;

use shadowslice_shared::batch::{Prepared, RunFailure, Step};
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::groups::{Division, Groups};

use super::{Basis, Host, Ran, Setting, Signature};
use crate::answer::AnswerSlot;
use crate::device::cuda::CudaGpu;
use crate::device::cuda::partition::{PartitionStream, SmGroups};
use crate::inputs::Inputs;
use shadowslice_shared::errors::chain;

#[derive(Debug)]
pub struct Hosted {
    host: Box<dyn Host>,
    /// Where the share is a partition of a real GPU.
    partitions: Option<Partitions>,
}

#[derive(Debug)]
struct Partitions {
    groups: SmGroups,
    /// Never given up, as the driver would keep their memory all the same.
    streams: BTreeMap<Groups, PartitionStream>,
    /// Whether the model runs there, or why not.
    tried: BTreeMap<Groups, Result<(), String>>,
}

impl Hosted {
    pub(super) fn load(
        mut host: Box<dyn Host>,
        setting: Setting<'_>,
        gpu: Option<&Arc<CudaGpu>>,
        partitioned: bool,
    ) -> Result<(Self, Signature), BootRefusal> {
        let signature = host.load(setting)?;
        let divide = |gpu: &Arc<CudaGpu>| match SmGroups::of(gpu) {
            Ok(groups) => Ok(Partitions { groups, streams: BTreeMap::new(), tried: BTreeMap::new() }),
            Err(undivided) => Err(BootRefusal::NoPartitions(chain(&undivided))),
        };
        let partitions = gpu.filter(|_| partitioned).map(divide).transpose()?;
        Ok((Self { host, partitions }, signature))
    }

    /// Whether batches can run on another part of the GPU than all of it; else why not.
    pub fn movable(&self) -> Result<(), String> {
        if self.partitions.is_some() { self.host.movable() } else { Ok(()) }
    }

    /// `None` where no real GPU is divided.
    pub fn division(&self) -> Option<&Division> {
        self.partitions.as_ref().map(|partitions| partitions.groups.division())
    }

    pub(super) fn basis(&mut self) -> Result<Basis, BootRefusal> {
        self.host.basis()
    }

    pub(super) fn prepare(&mut self, groups: Groups) -> Prepared {
        let made = self.partitions.as_mut().map_or(Ok(()), |partitions| partitions.make(groups));
        Prepared { groups, result: made }
    }

    /// Whether the model runs on groups that are ready: a kernel whose blocks come in clusters may fit
    /// on some groups and not on as many others.
    pub(super) fn try_on(&mut self, groups: Groups) -> Result<(), String> {
        let Some(partitions) = self.partitions.as_mut() else { return Ok(()) };
        let Some(stream) = partitions.streams.get(&groups) else { return Ok(()) };
        let tried = partitions.tried.entry(groups);
        tried.or_insert_with(|| self.host.try_on(stream.handle())).clone()
    }

    pub(super) fn forget(&mut self) {
        self.host.left();
    }

    pub(super) fn warmed_up(&mut self) {
        self.host.warmed_up();
    }

    pub(super) fn run(&mut self, inputs: &Inputs<'_>, slot: &mut AnswerSlot<'_>) -> Result<Ran, RunFailure> {
        let cuda = self.stream_on(inputs.groups())?;
        self.host.run(inputs, slot, cuda)
    }

    pub(super) fn step(&mut self, step: &Step, slot: &mut AnswerSlot<'_>) -> Result<Ran, RunFailure> {
        let cuda = self.stream_on(step.groups)?;
        self.host.step(step.stream, slot, cuda)
    }

    pub(super) fn close(&mut self, stream: u64) {
        self.host.close(stream);
    }

    /// The CUDA stream of a partition; `None` for the whole.
    fn stream_on(&self, groups: Groups) -> Result<Option<usize>, RunFailure> {
        let Some(partitions) = self.partitions.as_ref().filter(|_| groups != Groups::WHOLE) else {
            return Ok(None);
        };
        let stream = partitions.streams.get(&groups).map(PartitionStream::handle);
        stream.map(Some).ok_or_else(|| RunFailure::BadBatch("its partition is not ready".to_owned()))
    }
}

impl Partitions {
    fn make(&mut self, groups: Groups) -> Result<(), String> {
        if groups == Groups::WHOLE || self.streams.contains_key(&groups) {
            return Ok(());
        }
        if !groups.is_run() {
            return Err("its groups are no neighbours".to_owned());
        }
        let stream = self.groups.stream(groups).map_err(|fault| chain(&fault))?;
        self.streams.insert(groups, stream);
        Ok(())
    }
}
