//! A model's large tensors on the GPU: one copy for all sessions of all its workers, which the
//! supervisor keeps.
#![allow(unsafe_code)] // tensors over memory that ONNX Runtime does not own

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::value::{DynValue, TensorElementType};
use ort::{AsPointer, ortsys};
use sha2::{Digest, Sha256};
use shadowslice_shared::errors::chain;
use shadowslice_shared::weights::{self, MAX_REGIONS, RegionContent};

use super::optimised::{Fingerprint, Form, Tensor};
use crate::device::cuda::region::Region;
use crate::device::cuda::{CudaFault, CudaGpu};

/// Where kernels expect tensors to begin: CUDA's own allocations do.
const ALIGNMENT: u64 = 256;

#[derive(Debug, thiserror::Error)]
pub(super) enum WeightsError {
    #[error("the kept weights cannot be read")]
    Read(#[source] io::Error),
    #[error("there is no memory for the weights")]
    Memory(#[from] CudaFault),
    #[error("ONNX Runtime takes no tensor: {0}")]
    Tensor(String),
}

#[derive(Debug)]
pub(super) struct Weights {
    places: BTreeMap<Fingerprint, Place>,
    kept: Vec<weights::WeightRegion>,
    supervisor: Option<OwnedFd>,
    /// Why a region is not the one that other workers have.
    unshared: Option<String>,
    /// Bytes of all regions, and of those that were made here.
    bytes: u64,
    brought: u64,
}

#[derive(Debug, Clone)]
struct Place {
    region: Arc<Region>,
    offset: usize,
}

/// Tensors that lie one after the other in a region, by their fingerprints.
struct Layout<'f> {
    tensors: Vec<(usize, &'f Tensor)>,
    content: RegionContent,
}

impl<'f> Layout<'f> {
    fn of(tensors: impl Iterator<Item = &'f Tensor>) -> Self {
        let once: BTreeMap<Fingerprint, &Tensor> =
            tensors.map(|tensor| (tensor.fingerprint, tensor)).collect();
        let (mut offset, mut digest, mut tensors) = (0, Sha256::new(), Vec::new());
        for (fingerprint, tensor) in once {
            digest.update(fingerprint);
            tensors.push((offset as usize, tensor));
            offset += tensor.bytes.next_multiple_of(ALIGNMENT);
        }
        Self { tensors, content: RegionContent { fingerprint: digest.finalize().into(), bytes: offset } }
    }
}

impl Weights {
    /// The supervisor has sent what it keeps to this socket.
    pub(super) fn new(supervisor: Option<OwnedFd>) -> Self {
        let next = || weights::receive(supervisor.as_ref()?).ok()?;
        let kept = std::iter::from_fn(next).take(MAX_REGIONS).collect();
        Self { places: BTreeMap::new(), kept, supervisor, unshared: None, bytes: 0, brought: 0 }
    }

    pub(super) fn unshared(&self) -> Option<&str> {
        self.unshared.as_deref()
    }

    pub(super) fn bytes(&self) -> (u64, u64) {
        (self.bytes, self.brought)
    }

    /// For a session that is dropped before this. Tensors that are not on the GPU yet are brought
    /// there.
    pub(super) fn of(
        &mut self,
        form: &Form,
        gpu: &CudaGpu,
    ) -> Result<Vec<(String, Arc<DynValue>)>, WeightsError> {
        self.bring(form, gpu)?;
        let memory = MemoryInfo::new(AllocationDevice::CUDA, 0, AllocatorType::Device, MemoryType::Default)
            .map_err(|fault| WeightsError::Tensor(fault.message().to_owned()))?;
        let known = form.tensors.iter().filter_map(|tensor| {
            let (place, element) = (self.places.get(&tensor.fingerprint)?, element(tensor.element)?);
            Some((tensor, place, element))
        });
        known
            .map(|(tensor, place, element)| {
                let value = value(tensor, place, element, &memory)
                    .map_err(|fault| WeightsError::Tensor(fault.message().to_owned()))?;
                Ok((tensor.name.clone(), Arc::new(value)))
            })
            .collect()
    }

    fn bring(&mut self, form: &Form, gpu: &CudaGpu) -> Result<(), WeightsError> {
        let unknown = form.tensors.iter().filter(|tensor| !self.places.contains_key(&tensor.fingerprint));
        let Layout { tensors, content } = Layout::of(unknown);
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

    /// A kept region that cannot be mapped any more is made anew.
    fn take_over(&mut self, content: &RegionContent, gpu: &CudaGpu) -> Option<Region> {
        let found = self.kept.iter().position(|region| region.content == *content)?;
        let weights::WeightRegion { file, .. } = self.kept.swap_remove(found);
        let region = Region::import(gpu, file, usize::try_from(content.bytes).ok()?);
        let lost = |error: &CudaFault| {
            self.unshared = Some(format!("it was lost and is loaded again: {}", chain(error)))
        };
        region.inspect_err(lost).ok()
    }

    fn make(
        &mut self,
        form: &Form,
        tensors: &[(usize, &Tensor)],
        content: &RegionContent,
        gpu: &CudaGpu,
    ) -> Result<Region, WeightsError> {
        let bytes =
            usize::try_from(content.bytes).map_err(|error| WeightsError::Read(io::Error::other(error)))?;
        let region = Region::filled(gpu, bytes, |writer| {
            for &(offset, tensor) in tensors {
                let content = form.bytes(tensor).map_err(WeightsError::Read)?;
                writer.write(offset, &content).map_err(WeightsError::Memory)?;
            }
            Ok::<(), WeightsError>(())
        })?;
        if let Some(supervisor) = &self.supervisor {
            // Not handed over, it serves this worker alone.
            if let Err(error) = weights::send(supervisor, content, region.file()) {
                self.unshared = Some(error.to_string());
            }
        }
        Ok(region)
    }
}

fn element(number: i32) -> Option<TensorElementType> {
    Some(match number {
        1 => TensorElementType::Float32,
        2 => TensorElementType::Uint8,
        3 => TensorElementType::Int8,
        4 => TensorElementType::Uint16,
        5 => TensorElementType::Int16,
        6 => TensorElementType::Int32,
        7 => TensorElementType::Int64,
        9 => TensorElementType::Bool,
        10 => TensorElementType::Float16,
        11 => TensorElementType::Float64,
        12 => TensorElementType::Uint32,
        13 => TensorElementType::Uint64,
        16 => TensorElementType::Bfloat16,
        _ => return None,
    })
}

fn value(
    tensor: &Tensor,
    place: &Place,
    element: TensorElementType,
    memory: &MemoryInfo<'static>,
) -> ort::Result<DynValue> {
    let start = place.region.start().as_ptr().wrapping_add(place.offset);
    let (start, bytes) = (start.cast(), tensor.bytes as usize);
    let (memory, shape) = (memory.ptr(), &tensor.shape);
    let mut value = std::ptr::null_mut();
    // SAFETY: the tensor lies there, in memory that outlives the value: sessions are dropped before
    // the weights. A size that does not fit the shape is an error.
    ortsys![unsafe CreateTensorWithDataAsOrtValue(memory, start, bytes, shape.as_ptr(), shape.len(), element.into(), &mut value)?];
    let value = NonNull::new(value).expect("the call above made it");
    // SAFETY: it is a tensor, and has no other owner. No allocator has made its memory; `ort` wants
    // one named, and uses it for nothing but tensors that it makes itself.
    Ok(unsafe { DynValue::from_ptr(value, Some(&Allocator::default())) })
}
