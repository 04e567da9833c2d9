//! What batches of a trial are made of: values that are made up, or those that the model gives.

use std::os::fd::AsFd;

use shadowslice_shared::batch::{BatchRequest, Extent};
use shadowslice_shared::boot::{BootRefusal, WarmUp};
use shadowslice_shared::errors::chain;
use shadowslice_shared::slab::{ALIGNMENT, ReadableSlab, SlabError, WritableSlab};
use shadowslice_shared::tensor::{TensorSpec, elements};

use super::made_up::{self, Fill};
use super::{Run, Trial};
use crate::engine::GivenInput;

#[derive(Debug)]
pub struct MadeUp {
    pub(super) fill: Fill,
    pub(super) slab: ReadableSlab,
    pub(super) shapes: Vec<Vec<i64>>,
    pub(super) request: BatchRequest,
}

/// Its shape without the batch axis, and its bytes.
type Tensor = (Vec<i64>, Vec<u8>);

impl Trial<'_> {
    pub(super) fn make_up(&self, run: Run) -> Result<MadeUp, BootRefusal> {
        let (mut bytes, mut extents, mut shapes) = (Vec::new(), Vec::new(), Vec::new());
        for (shape, tensor) in self.tensors(run).map_err(|why| unmakeable(run.size, &why))? {
            bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
            extents.push(Extent { offset: bytes.len() as u64, len: tensor.len() as u64 });
            bytes.extend(tensor);
            shapes.push(shape);
        }
        // A slab cannot be empty.
        bytes.push(0);
        let len = bytes.len() as u64;
        let setup = |fault: SlabError| unmakeable(run.size, &chain(&fault));
        let slab = WritableSlab::create("shadowslice-warmup", len).map_err(setup)?;
        slab.write(0, &bytes).expect("it was made for these bytes");
        let slab = ReadableSlab::map(slab.as_fd(), len).map_err(setup)?;
        let request = BatchRequest { rows: run.size, inputs: extents };
        Ok(MadeUp { fill: run.fill, slab, shapes, request })
    }

    fn tensors(&self, Run { size, fill, draw, .. }: Run) -> Result<Vec<Tensor>, String> {
        let WarmUp { shapes, batched, .. } = self.warm_up;
        let inputs = self.given.as_ref().map_or(shapes.len(), Vec::len);
        if inputs != self.signature.inputs.len() {
            return Err("the model has another number of inputs".to_owned());
        }
        if let Some(given) = &self.given {
            return given.iter().map(|input| repeated(input, *batched, size)).collect();
        }
        let tensor = |(index, (spec, shape)): (usize, (&TensorSpec, &Vec<i64>))| {
            let count = elements(shape).and_then(|row| row.checked_mul(size as usize));
            let count = count.ok_or_else(|| {
                format!("input `{}` needs a shape without unknown axes; give `warmup:` one", spec.name)
            })?;
            Ok((shape.clone(), made_up::tensor(spec.datatype, count, size, (index, fill, draw))))
        };
        self.signature.inputs.iter().zip(shapes).enumerate().map(tensor).collect()
    }
}

fn unmakeable(size: u32, why: &str) -> BootRefusal {
    BootRefusal::Setup(format!("a warm-up at batch size {size} cannot be made: {why}"))
}

/// `size` rows of the one that is given.
fn repeated(GivenInput { shape, bytes }: &GivenInput, batched: bool, size: u32) -> Result<Tensor, String> {
    match (batched, &shape[..]) {
        (false, _) => Ok((shape.clone(), bytes.clone())),
        (true, [1, row @ ..]) => Ok((row.to_vec(), bytes.repeat(size as usize))),
        (true, _) => Err(format!("an input of shape {shape:?} is not one row")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_is_repeated_along_the_batch_axis_if_there_is_one() {
        let input = |shape: &[i64]| GivenInput { shape: shape.to_vec(), bytes: vec![1, 2] };
        assert_eq!(repeated(&input(&[1, 2]), true, 3), Ok((vec![2], vec![1, 2, 1, 2, 1, 2])));
        assert_eq!(repeated(&input(&[2]), false, 1), Ok((vec![2], vec![1, 2])));
        assert!(repeated(&input(&[2, 1]), true, 3).is_err());
        assert!(repeated(&input(&[]), true, 3).is_err());
    }
}
