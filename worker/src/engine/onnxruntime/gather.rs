//! A buffer that gathers the bytes of one input from all requests of a batch.

use shadowslice_shared::slab::ALIGNMENT;

use crate::inputs::Inputs;

/// A buffer for the bytes of an input, which all batches reuse.
#[derive(Debug, Default)]
pub(super) struct GatherBuffer {
    bytes: Vec<u8>,
}

impl GatherBuffer {
    /// Returns the bytes of the input as one aligned slice. If the bytes already form such a slice,
    /// returns them in place. Otherwise copies them to this buffer.
    pub(super) fn whole<'b>(&'b mut self, inputs: &Inputs<'b>, input: usize) -> &'b [u8] {
        let first = inputs.part(0, input);
        if inputs.requests() == 1 && is_aligned(first) { first } else { self.gathered(inputs, input) }
    }

    /// Returns an input's booleans as bytes that are 0 or 1. Other bytes become 1, as in C.
    pub(super) fn booleans(&mut self, inputs: &Inputs<'_>, input: usize) -> &mut [u8] {
        let bytes = self.gathered(inputs, input);
        bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
        bytes
    }

    pub(super) fn gathered(&mut self, inputs: &Inputs<'_>, input: usize) -> &mut [u8] {
        let parts = || (0..inputs.requests()).map(|request| inputs.part(request, input));
        let len = parts().map(<[u8]>::len).sum::<usize>();
        // The extra bytes guarantee that the buffer contains an aligned start address, wherever the
        // allocator places the buffer.
        self.bytes.resize(self.bytes.len().max(len + ALIGNMENT as usize), 0);
        let start = self.bytes.as_ptr().align_offset(ALIGNMENT as usize);
        let whole = &mut self.bytes[start..start + len];
        let mut rest = &mut *whole;
        for part in parts() {
            let (place, after) = rest.split_at_mut(part.len());
            place.copy_from_slice(part);
            rest = after;
        }
        whole
    }
}

fn is_aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(ALIGNMENT as usize)
}
