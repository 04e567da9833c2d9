//! The sizes of the memory that supervisor and worker share. In a shared worker, the driver pins this
//! memory for each model, so it is only as large as the model's tensors require.

use shadowslice_datapath::pipeline::Metadata;
use shadowslice_shared::batch::IN_FLIGHT;
use shadowslice_shared::slab::ALIGNMENT;
use shadowslice_shared::tensor::{TensorSpec, elements};

/// The number of largest batches whose inputs fit into the part of the request slab that the GPU reads
/// directly. If more requests wait, the driver copies the inputs of some of them twice.
const PINNED_BATCHES: u64 = 4 * IN_FLIGHT as u64;

/// The sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlabSizes {
    pub(super) response_slot: u64,
    /// The size of the part at the start of the request slab that the GPU reads directly.
    pub(super) pinned_requests: u64,
}

impl SlabSizes {
    /// Returns the sizes that the tensors of a model require. A size stays as it is if the lengths of the
    /// tensors are not known before they are computed.
    pub(super) fn fitting(self, metadata: &Metadata) -> Self {
        let requests =
            batch_bytes(metadata, &metadata.inputs).map(|bytes| bytes.saturating_mul(PINNED_BATCHES));
        let response = batch_bytes(metadata, &metadata.outputs);
        Self {
            response_slot: response.map_or(self.response_slot, |bytes| bytes.min(self.response_slot)),
            pinned_requests: requests.map_or(self.pinned_requests, |bytes| bytes.min(self.pinned_requests)),
        }
    }
}

/// Returns the bytes of these tensors in the largest batch, if each request has one row and each part is
/// aligned. Returns `None` if the length of a tensor is not known.
fn batch_bytes(metadata: &Metadata, tensors: &[TensorSpec]) -> Option<u64> {
    let per_step = metadata.streams.map_or(0, |streams| streams.per_step);
    let rows = u64::from(metadata.max_batch.max(per_step).max(1));
    let of_tensor = |tensor: &TensorSpec| {
        let row = if metadata.max_batch > 0 { tensor.shape.get(1..)? } else { &tensor.shape[..] };
        let bytes = elements(row)?.checked_mul(tensor.datatype.size()?)?;
        u64::try_from(bytes).ok()?.checked_next_multiple_of(ALIGNMENT)?.checked_mul(rows)
    };
    let bytes: Option<Vec<u64>> = tensors.iter().map(of_tensor).collect();
    bytes?.into_iter().try_fold(0_u64, u64::checked_add)?.checked_next_multiple_of(PAGE_BYTES)
}

/// The size of a page of memory, in bytes, to which the sizes are rounded up.
const PAGE_BYTES: u64 = 4096;

#[cfg(test)]
mod tests {
    use shadowslice_shared::tensor::Datatype;

    use super::*;

    fn metadata(max_batch: u32, output: &[i64], datatype: Datatype) -> Metadata {
        let tensor = |name: &str, datatype, shape: &[i64]| TensorSpec {
            name: name.to_owned(),
            datatype,
            shape: shape.to_vec(),
        };
        Metadata {
            name: "model".to_owned(),
            version: "1".into(),
            platform: "onnxruntime_onnx",
            max_batch,
            streams: None,
            inputs: vec![tensor("x", Datatype::Fp32, &[-1, 1000])],
            optional: Vec::new(),
            outputs: vec![tensor("y", datatype, output)],
        }
    }

    #[test]
    fn fixed_tensors_give_the_sizes_and_others_leave_them() {
        let whole = SlabSizes { response_slot: 64 << 20, pinned_requests: 256 << 20 };
        // An input row of 4,000 bytes takes 4,032 with its alignment.
        let pinned_requests = (8 * 4032_u64).next_multiple_of(4096) * 8;
        let fixed = whole.fitting(&metadata(8, &[-1, 10], Datatype::Fp32));
        assert_eq!(fixed, SlabSizes { response_slot: 4096, pinned_requests });
        let strings = whole.fitting(&metadata(8, &[-1, 10], Datatype::Bytes));
        assert_eq!(strings, SlabSizes { pinned_requests, ..whole });
        let open = whole.fitting(&metadata(8, &[-1, -1], Datatype::Fp32));
        assert_eq!(open.response_slot, whole.response_slot);
        let unbatched = whole.fitting(&metadata(0, &[2, 10], Datatype::Fp32));
        assert_eq!(unbatched, SlabSizes { response_slot: 4096, ..whole }, "the input has an open axis");
        let small = SlabSizes { response_slot: 100, pinned_requests: 100 };
        assert_eq!(small.fitting(&metadata(8, &[-1, 10], Datatype::Fp32)), small);
    }
}
