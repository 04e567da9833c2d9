//! The parameters of inputs and outputs, which both protocols share.

use super::shared_memory::SharedTensor;
use crate::admission::Clipped;
use shadowslice_datapath::pipeline::RequestFailure;

/// The known parameters of a tensor. All other parameters are ignored.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default, expecting = "an object of parameters")]
pub(super) struct TensorParameters {
    pub(super) binary_data_size: Option<u64>,
    pub(super) binary_data: Option<bool>,
    pub(super) classification: Option<u64>,
    pub(super) shared_memory_region: Option<String>,
    pub(super) shared_memory_byte_size: Option<u64>,
    pub(super) shared_memory_offset: Option<u64>,
}

impl TensorParameters {
    /// Returns the part of shared memory that contains the tensor, or `None` if the parameters name
    /// no region. Refuses parameters for an extension that is not supported. `kind` is "input" or
    /// "output".
    pub(super) fn region(&self, kind: &str, name: &str) -> Result<Option<SharedTensor>, RequestFailure> {
        let invalid = |why: &str| Err(RequestFailure::Invalid(format!("{kind} '{}': {why}", Clipped(name))));
        if self.classification.is_some_and(|classes| classes > 0) {
            return invalid("classification is not supported");
        }
        match (&self.shared_memory_region, self.shared_memory_byte_size) {
            (None, _) => Ok(None),
            (Some(region), Some(byte_size)) => {
                let (region, offset) = (region.clone(), self.shared_memory_offset.unwrap_or(0));
                Ok(Some(SharedTensor { region, offset, byte_size }))
            }
            (Some(_), None) => invalid("shared_memory_region is given without shared_memory_byte_size"),
        }
    }
}
