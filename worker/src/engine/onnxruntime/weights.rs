//! A model's large tensors on the GPU, which all sessions of a worker share. Workers share them too
//! if they load the same optimised forms (see `optimised.rs`) in the same order. The supervisor
//! keeps the shared memory alive.
#![allow(unsafe_code)] // This module creates tensors in shared regions.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::value::DynValue;
use sha2::{Digest, Sha256};
use shadowslice_shared::errors::chain;
use shadowslice_shared::onnx::datatype_of;
use shadowslice_shared::weights::{self, MAX_REGIONS, RegionContent};

use super::optimised::{Fingerprint, OptimisedForm, StoredTensor};
use super::{element_type, tensor};
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
    kept_regions: Vec<weights::WeightRegion>,
    supervisor: Option<OwnedFd>,
    /// The reason why at least one region is not shared with other workers. The `unshared` of the
    /// loader is about optimised forms instead.
    unshared: Option<String>,
    /// The size of all regions, in bytes.
    bytes: u64,
    /// The size of the regions that this worker itself copied to the GPU, in bytes.
    brought: u64,
}

/// The location of a tensor on the GPU.
#[derive(Debug, Clone)]
struct Place {
    region: Arc<SharedRegion>,
    offset: usize,
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
        Self { places: BTreeMap::new(), kept_regions, supervisor, unshared: None, bytes: 0, brought: 0 }
    }

    pub(super) fn unshared(&self) -> Option<&str> {
        self.unshared.as_deref()
    }

    pub(super) fn bytes(&self) -> (u64, u64) {
        (self.bytes, self.brought)
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
            let Some((Place { region, offset }, datatype)) = place else { continue };
            let (bytes, element) = (stored.bytes as usize, element_type(datatype));
            // SAFETY: the region has the tensor's bytes at this offset. It outlives the value,
            // because sessions are dropped before the weights.
            let value =
                unsafe { tensor::at(&memory, region.start().add(*offset), bytes, &stored.shape, element) };
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
        let region = match self.take_over(&content, gpu) {
            Some(region) => region,
            None => {
                let region = self.make(form, &tensors, &content, gpu)?;
                self.brought += content.bytes;
                region
            }
        };
        self.bytes += content.bytes;
        let region = Arc::new(region);
        for (offset, tensor) in tensors {
            self.places.insert(tensor.fingerprint, Place { region: Arc::clone(&region), offset });
        }
        Ok(())
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
        form: &OptimisedForm,
        tensors: &[(usize, &StoredTensor)],
        content: &RegionContent,
        gpu: &CudaGpu,
    ) -> Result<SharedRegion, WeightsError> {
        let bytes =
            usize::try_from(content.bytes).map_err(|error| WeightsError::Read(io::Error::other(error)))?;
        let region = SharedRegion::filled(gpu, bytes, |writer| {
            for &(offset, tensor) in tensors {
                let content = form.bytes(tensor).map_err(WeightsError::Read)?;
                writer.write(offset, &content).map_err(WeightsError::Memory)?;
            }
            Ok::<(), WeightsError>(())
        })?;
        if let Some(supervisor) = &self.supervisor {
            // A failure here is not fatal, because this worker can use the region alone.
            if let Err(error) = weights::send(supervisor, content, region.file()) {
                self.unshared = Some(error.to_string());
            }
        }
        Ok(region)
    }
}
