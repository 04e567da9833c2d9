//! A model's large tensors on the GPU, which all sessions of a worker share. Workers share them too
//! if they load the same optimised forms (see `optimised.rs`) in the same order. The supervisor
//! keeps the shared memory alive.
#![allow(unsafe_code)] // This module creates tensors in shared regions.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::value::DynValue;
use sha2::{Digest, Sha256};
use shadowslice_shared::errors::chain;
use shadowslice_shared::onnx::datatype_of;
use shadowslice_shared::weights::{self, MAX_REGIONS, RegionContent};

use super::content::Fingerprint;
use super::optimised::{OptimisedForm, StoredTensor};
use super::{element_type, tensor};
use crate::device::cuda::pinned_file::PinnedFile;
use crate::device::cuda::region::SharedRegion;
use crate::device::cuda::{CudaError, CudaGpu};

/// The alignment of tensors, in bytes. It is the same as for CUDA's own allocations.
const ALIGNMENT: u64 = 256;

/// The reasons why a session cannot use a form with shared weights.
#[derive(Debug, thiserror::Error)]
pub(super) enum WeightsError {
    #[error("cannot read the stored weights")]
    Read(#[source] io::Error),
    #[error("cannot allocate memory for the weights on the GPU")]
    Memory(#[from] CudaError),
    #[error("ONNX Runtime rejects a tensor of the weights: {0}")]
    Tensor(String),
}

/// The model's weights on the GPU.
#[derive(Debug)]
pub(super) struct Weights {
    places: BTreeMap<Fingerprint, Place>,
    regions: Vec<WeightsRegion>,
    kept_regions: Vec<weights::WeightRegion>,
    supervisor: Option<OwnedFd>,
    /// The reason why at least one region is not shared with other workers. The `unshared` of the
    /// loader is about optimised forms instead.
    unshared: Option<String>,
    /// The size of the regions that this worker itself copied to the GPU, in bytes.
    brought: u64,
}

/// The weights of a model that sleeps.
#[derive(Debug)]
pub(super) struct Released {
    /// The host memory from which the GPU can copy directly.
    pub(super) pinned: u64,
    /// The reason why the weights are not in such memory, if they should be.
    pub(super) unpinned: Option<String>,
}

/// The location of a tensor on the GPU: the index of its region, and the offset there.
#[derive(Debug, Clone, Copy)]
struct Place {
    region: usize,
    offset: usize,
}

/// A region, with the file from which its content can be read again.
#[derive(Debug)]
struct WeightsRegion {
    memory: SharedRegion,
    content: RegionContent,
    /// The tensors in the region, each with its offset there.
    tensors: Vec<(usize, StoredTensor)>,
    file: File,
    /// The file in host memory, from which the GPU copies directly. `None` until the model sleeps.
    pinned: Option<PinnedFile>,
}

/// The layout of a new region. The tensors are in the order of their fingerprints.
struct RegionLayout<'f> {
    tensors: Vec<(usize, &'f StoredTensor)>,
    content: RegionContent,
}

impl<'f> RegionLayout<'f> {
    fn of(tensors: impl Iterator<Item = &'f StoredTensor>) -> Self {
        let once: BTreeMap<Fingerprint, &StoredTensor> =
            tensors.map(|stored| (stored.fingerprint, stored)).collect();
        let (mut offset, mut digest, mut tensors) = (0, Sha256::new(), Vec::new());
        for (fingerprint, stored) in once {
            digest.update(fingerprint);
            tensors.push((offset as usize, stored));
            offset += stored.tensor.bytes.next_multiple_of(ALIGNMENT);
        }
        Self { tensors, content: RegionContent { fingerprint: digest.finalize().into(), bytes: offset } }
    }
}

impl Weights {
    /// Receives the regions that the supervisor keeps for the model. Their descriptors are already
    /// queued in this socket.
    pub(super) fn new(supervisor: Option<OwnedFd>) -> Self {
        let next = || weights::receive(supervisor.as_ref()?).ok()?;
        let kept_regions = std::iter::from_fn(next).take(MAX_REGIONS).collect();
        let (places, regions) = (BTreeMap::new(), Vec::new());
        Self { places, regions, kept_regions, supervisor, unshared: None, brought: 0 }
    }

    pub(super) fn unshared(&self) -> Option<&str> {
        self.unshared.as_deref()
    }

    /// Returns the size of all regions, and the size of those that this worker copied to the GPU, in
    /// bytes.
    pub(super) fn bytes(&self) -> (u64, u64) {
        (self.regions.iter().map(|region| region.content.bytes).sum(), self.brought)
    }

    /// Returns the tensors of a form for a session. The session must be dropped before this
    /// [`Weights`]. Copies tensors to the GPU if they are not there yet. Omits tensors whose
    /// datatype this worker does not know.
    pub(super) fn of(
        &mut self,
        form: &OptimisedForm,
        gpu: &CudaGpu,
    ) -> Result<Vec<(String, Arc<DynValue>)>, WeightsError> {
        self.bring(form, gpu)?;
        let failed = |fault: ort::Error| WeightsError::Tensor(fault.message().to_owned());
        let memory = MemoryInfo::new(AllocationDevice::CUDA, 0, AllocatorType::Device, MemoryType::Default);
        let (memory, mut values) = (memory.map_err(failed)?, Vec::new());
        for StoredTensor { tensor: stored, fingerprint } in &form.tensors {
            let place = self.places.get(fingerprint).zip(datatype_of(stored.element));
            let Some((&Place { region, offset }, datatype)) = place else { continue };
            let (bytes, element) = (stored.bytes as usize, element_type(datatype));
            let start = self.regions[region].memory.start();
            // SAFETY: the region has the tensor's bytes at this offset. It outlives the value,
            // because sessions are dropped before the weights.
            let value = unsafe { tensor::at(&memory, start.add(offset), bytes, &stored.shape, element) };
            values.push((stored.name.clone(), Arc::new(value.map_err(failed)?)));
        }
        Ok(values)
    }

    /// Makes sure that all tensors of a form are on the GPU. Maps a region that the supervisor
    /// keeps, or otherwise creates a region, which counts as `brought`.
    fn bring(&mut self, form: &OptimisedForm, gpu: &CudaGpu) -> Result<(), WeightsError> {
        let unknown = form.tensors.iter().filter(|tensor| !self.places.contains_key(&tensor.fingerprint));
        let RegionLayout { tensors, content } = RegionLayout::of(unknown);
        if content.bytes == 0 {
            return Ok(());
        }
        let file = form.open_weights().map_err(WeightsError::Read)?;
        let memory = match self.take_over(&content, gpu) {
            Some(memory) => memory,
            None => {
                let memory = self.make(&file, &tensors, &content, gpu)?;
                self.brought += content.bytes;
                memory
            }
        };
        let region = self.regions.len();
        for (offset, tensor) in &tensors {
            self.places.insert(tensor.fingerprint, Place { region, offset: *offset });
        }
        let tensors = tensors.into_iter().map(|(offset, tensor)| (offset, tensor.clone())).collect();
        self.regions.push(WeightsRegion { memory, content, tensors, file, pinned: None });
        Ok(())
    }

    /// Frees the memory of all regions. With `pin`, the files of the weights stay in host memory.
    ///
    /// # Safety
    ///
    /// All work on the GPU that uses the weights must have ended.
    pub(super) unsafe fn release(&mut self, gpu: &Arc<CudaGpu>, pin: bool) -> Result<Released, WeightsError> {
        // Unused regions of earlier workers would keep their memory allocated.
        self.kept_regions.clear();
        let mut unpinned = None;
        for region in &mut self.regions {
            match &region.pinned {
                None if pin => match PinnedFile::pin(gpu, &region.file, region.part()) {
                    Ok(pinned) => region.pinned = Some(pinned),
                    Err(error) => unpinned = Some(chain(&error)),
                },
                Some(_) if !pin => region.pinned = None,
                _ => {}
            }
            // SAFETY: the caller guarantees that no work uses the memory.
            unsafe { region.memory.release() }?;
        }
        let pinned = self.regions.iter().filter_map(|region| region.pinned.as_ref());
        let pinned = pinned.map(|file| file.bytes() as u64).sum();
        Ok(Released { pinned, unpinned })
    }

    /// Brings all regions back to the same addresses. Batches that start later wait for the copies. If
    /// this fails, all regions stay released.
    pub(super) fn restore(&mut self, gpu: &CudaGpu) -> Result<(), WeightsError> {
        let restored = self.regions.iter_mut().try_for_each(|region| {
            region.memory.restore(gpu)?;
            region.fill(gpu)
        });
        if restored.is_err() {
            gpu.synchronize()?;
            for region in &mut self.regions {
                // SAFETY: the copies have ended, and no batch has started.
                unsafe { region.memory.release() }?;
            }
        }
        restored
    }

    /// Sends the descriptors of all regions to the supervisor, for later workers of the model.
    pub(super) fn offer(&self) {
        for region in &self.regions {
            if let (Some(supervisor), Some(file)) = (&self.supervisor, region.memory.file()) {
                // If this fails, the model's next worker loads the weights again.
                weights::send(supervisor, &region.content, file).ok();
            }
        }
    }

    /// Maps a region that the supervisor keeps. Returns `None` if the supervisor does not keep this
    /// region or the mapping fails. The caller then creates a new region.
    fn take_over(&mut self, content: &RegionContent, gpu: &CudaGpu) -> Option<SharedRegion> {
        let found = self.kept_regions.iter().position(|region| region.content == *content)?;
        let weights::WeightRegion { file, .. } = self.kept_regions.swap_remove(found);
        let region = SharedRegion::import(gpu, file, usize::try_from(content.bytes).ok()?);
        let lost = |error: &CudaError| {
            self.unshared = Some(format!(
                "a shared region cannot be mapped, so this worker loads its weights again: {}",
                chain(error)
            ))
        };
        region.inspect_err(lost).ok()
    }

    fn make(
        &mut self,
        file: &File,
        tensors: &[(usize, &StoredTensor)],
        content: &RegionContent,
        gpu: &CudaGpu,
    ) -> Result<SharedRegion, WeightsError> {
        let bytes =
            usize::try_from(content.bytes).map_err(|error| WeightsError::Read(io::Error::other(error)))?;
        let region = SharedRegion::filled(gpu, bytes, |region| {
            for &(offset, tensor) in tensors {
                region.write(offset, &tensor.read(file).map_err(WeightsError::Read)?)?;
            }
            Ok::<(), WeightsError>(())
        })?;
        if let (Some(supervisor), Some(file)) = (&self.supervisor, region.file()) {
            // A failure here is not fatal, because this worker can use the region alone.
            if let Err(error) = weights::send(supervisor, content, file) {
                self.unshared = Some(error.to_string());
            }
        }
        Ok(region)
    }
}

impl WeightsRegion {
    /// Copies the tensors to the region.
    fn fill(&self, gpu: &CudaGpu) -> Result<(), WeightsError> {
        let Some(pinned) = &self.pinned else {
            for (offset, tensor) in &self.tensors {
                self.memory.write(*offset, &tensor.read(&self.file).map_err(WeightsError::Read)?)?;
            }
            // The streams of this model do not wait for these copies.
            return Ok(gpu.synchronize_context()?);
        };
        let start = self.memory.start();
        // SAFETY: the offset of a tensor is inside the region.
        let place = |(offset, stored): &(usize, StoredTensor)| (stored.part(), unsafe { start.add(*offset) });
        // SAFETY: the region has space for the tensors at these offsets, and no batch uses them before the
        // copies have ended.
        unsafe { pinned.copy(self.tensors.iter().map(place)) }?;
        Ok(())
    }

    /// Returns the part of the file that contains the tensors.
    fn part(&self) -> Range<u64> {
        let parts = || self.tensors.iter().map(|(_, stored)| stored.part());
        let start = parts().map(|part| part.start).min().unwrap_or_default();
        start..parts().map(|part| part.end).max().unwrap_or_default()
    }
}
