//! The inputs of the proof. They are made-up values, or values that the model or the operator
//! supplies.

use std::os::fd::AsFd;

use shadowslice_shared::batch::{BatchRequest, Extent};
use shadowslice_shared::boot::{BootRefusal, ElementValue, InputValues, WarmUp};
use shadowslice_shared::errors::chain;
use shadowslice_shared::slab::{ALIGNMENT, ReadableSlab, SlabError, WritableSlab};
use shadowslice_shared::tensor::{Datatype, TensorSpec, elements};

use super::made_up::{self, InputDraw, InputSettings};
use super::{ProofBatch, Prover};
use crate::engine::{Constants, TensorData};

/// The maximum number of elements of a made-up input. An input of this size takes several
/// gigabytes.
const MAX_ELEMENTS: usize = 1 << 30;

/// The inputs of one batch of the proof, in their own slab.
#[derive(Debug)]
pub struct ProofInputs {
    /// The prover's settings when these inputs were made up.
    pub(super) settings: InputSettings,
    pub(super) slab: ReadableSlab,
    pub(super) shapes: Vec<Vec<i64>>,
    pub(super) requests: Vec<BatchRequest>,
}

impl Prover<'_> {
    pub(super) fn make_up(&self, run: ProofBatch) -> Result<ProofInputs, BootRefusal> {
        let tensors = self.tensors(run)?;
        self.laid_out(run, std::iter::once((run.size, tensors.as_slice())))
    }

    /// Returns alternatives for the inputs that hold strings or integers, with values from the
    /// model's file. The prover tries the alternatives one by one. Values that the operator
    /// supplies do not change.
    pub(super) fn values_of_file(&self) -> Vec<Vec<Option<InputValues>>> {
        let Some(file) = self.file else { return Vec::new() };
        let Constants { whole, texts } = Constants::of(file);
        let texts: Vec<ElementValue> = texts.into_iter().map(ElementValue::Text).collect();
        let way = |number: Option<i64>| {
            let number = number.map(ElementValue::Whole);
            let values = |(at, spec): (usize, &TensorSpec)| {
                let listed = match spec.datatype {
                    Datatype::Bytes => texts.clone(),
                    Datatype::Int32 | Datatype::Int64 => number.clone().into_iter().collect(),
                    _ => Vec::new(),
                };
                let given = self.settings.values.get(at).cloned().flatten();
                given.or_else(|| (!listed.is_empty()).then_some(InputValues::Listed(listed)))
            };
            self.signature.inputs.iter().enumerate().map(values).collect::<Vec<_>>()
        };
        let mut ways: Vec<_> = std::iter::once(None).chain(whole.into_iter().map(Some)).map(way).collect();
        ways.dedup();
        ways.retain(|way| *way != self.settings.values);
        ways
    }

    /// Returns the inputs of a batch, each with all of its rows. Their shapes omit the batch axis.
    pub(super) fn tensors(&self, run: ProofBatch) -> Result<Vec<TensorData>, BootRefusal> {
        self.try_tensors(run).map_err(|why| unmakeable(run.size, &why))
    }

    /// Writes requests into a new slab. Each request has a number of rows and its tensors.
    pub(super) fn laid_out<'t>(
        &self,
        run: ProofBatch,
        requests: impl Iterator<Item = (u32, &'t [TensorData])>,
    ) -> Result<ProofInputs, BootRefusal> {
        let (mut bytes, mut shapes, mut laid_out) = (Vec::new(), Vec::new(), Vec::new());
        for (rows, tensors) in requests {
            let mut inputs = Vec::with_capacity(tensors.len());
            for tensor in tensors {
                bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
                inputs.push(Extent { offset: bytes.len() as u64, len: tensor.bytes.len() as u64 });
                bytes.extend(&tensor.bytes);
            }
            shapes = tensors.iter().map(|tensor| tensor.shape.clone()).collect();
            laid_out.push(BatchRequest { rows, inputs });
        }
        // This byte is needed because a slab cannot be empty.
        bytes.push(0);
        let len = bytes.len() as u64;
        let setup = |fault: SlabError| unmakeable(run.size, &chain(&fault));
        let slab = WritableSlab::create("shadowslice-warmup", len).map_err(setup)?;
        slab.write(0, &bytes).expect("the slab has room for these bytes");
        let slab = ReadableSlab::map(slab.as_fd(), len).map_err(setup)?;
        Ok(ProofInputs { settings: self.settings.clone(), slab, shapes, requests: laid_out })
    }

    fn try_tensors(&self, ProofBatch { size, draw, .. }: ProofBatch) -> Result<Vec<TensorData>, String> {
        let InputSettings { fill, open_axis, values } = &self.settings;
        let WarmUp { shapes, batched, .. } = self.warm_up;
        let inputs = self.given.as_ref().map_or(shapes.len(), Vec::len);
        if inputs != self.signature.inputs.len() {
            return Err("the number of given inputs does not match the model".to_owned());
        }
        if let Some(given) = &self.given {
            return given.iter().map(|input| repeated(input, *batched, size)).collect();
        }
        let tensor = |(index, (spec, shape)): (usize, (&TensorSpec, &Vec<i64>))| {
            let shape: Vec<i64> =
                shape.iter().map(|&axis| if axis < 0 { *open_axis } else { axis }).collect();
            let count = elements(&shape).and_then(|row| row.checked_mul(size as usize));
            let count = count
                .filter(|&count| count <= MAX_ELEMENTS)
                .ok_or_else(|| format!("input `{}` of shape {shape:?} has too many elements", spec.name))?;
            let draw = InputDraw { input: index, fill: *fill, draw };
            let bytes = match values.get(index).and_then(Option::as_ref) {
                Some(values) => made_up::given(spec.datatype, count, size, draw, values),
                None => made_up::tensor(spec.datatype, count, size, draw),
            };
            Ok(TensorData { shape, bytes })
        };
        self.signature.inputs.iter().zip(shapes).enumerate().map(tensor).collect()
    }
}

fn unmakeable(size: u32, why: &str) -> BootRefusal {
    BootRefusal::Setup(format!("cannot create the warm-up inputs for batch size {size}: {why}"))
}

/// Repeats the given row `size` times.
fn repeated(
    TensorData { shape, bytes }: &TensorData,
    batched: bool,
    size: u32,
) -> Result<TensorData, String> {
    match (batched, &shape[..]) {
        (false, _) => Ok(TensorData { shape: shape.clone(), bytes: bytes.clone() }),
        (true, [1, row @ ..]) => Ok(TensorData { shape: row.to_vec(), bytes: bytes.repeat(size as usize) }),
        (true, _) => Err(format!("an input of shape {shape:?} does not have one row")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_is_repeated_along_the_batch_axis_if_there_is_one() {
        let input = |shape: &[i64]| TensorData { shape: shape.to_vec(), bytes: vec![1, 2] };
        let tensor = |bytes: &[u8]| Ok(TensorData { shape: vec![2], bytes: bytes.to_vec() });
        assert_eq!(repeated(&input(&[1, 2]), true, 3), tensor(&[1, 2, 1, 2, 1, 2]));
        assert_eq!(repeated(&input(&[2]), false, 1), tensor(&[1, 2]));
        assert!(repeated(&input(&[2, 1]), true, 3).is_err());
        assert!(repeated(&input(&[]), true, 3).is_err());
    }
}
