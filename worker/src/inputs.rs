//! The inputs of a batch. They are checked against the model and the slab before the batch runs.

use shadowslice_shared::batch::{Batch, Extent, IN_FLIGHT, MAX_REQUESTS, OptionalTensor, RunFailure};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::slab::ReadableSlab;
use shadowslice_shared::tensor::{TensorSpec, elements};

/// The inputs of a batch. All parts lie in the slab, and have the lengths that their shapes
/// require.
#[derive(Debug)]
pub struct Inputs<'a> {
    batch: &'a Batch,
    slab: &'a ReadableSlab,
    specs: &'a [TensorSpec],
    optional: &'a [TensorSpec],
    rows: Option<u32>,
}

/// An optional input that a request contains.
#[derive(Debug, Clone, Copy)]
pub struct OptionalInput<'a> {
    pub spec: &'a TensorSpec,
    /// The complete shape. Optional inputs have no batch axis.
    pub shape: &'a [i64],
    pub bytes: &'a [u8],
}

impl<'a> Inputs<'a> {
    /// Checks a batch. `optional` are the inputs that a request can omit. `batched` is true if the
    /// shapes of all other inputs begin with a batch axis.
    pub fn check(
        batch: &'a Batch,
        slab: &'a ReadableSlab,
        (specs, optional): (&'a [TensorSpec], &'a [TensorSpec]),
        batched: bool,
    ) -> Result<Self, RunFailure> {
        check_counts(batch, specs.len(), batched)?;
        let rows = batch.requests.iter().try_fold(0_u32, |sum, request| sum.checked_add(request.rows));
        let rows = rows.ok_or_else(|| bad("the number of rows overflows"))?;
        let inputs = Self { batch, slab, specs, optional, rows: batched.then_some(rows) };
        for (input, spec) in specs.iter().enumerate() {
            inputs.check_input(input, spec)?;
        }
        if batch.requests.len() > 1 && !batch.optional.is_empty() {
            return Err(bad("only a batch of one request can have optional inputs"));
        }
        batch.optional.iter().try_for_each(|given| inputs.check_optional(given))?;
        Ok(inputs)
    }

    fn check_input(&self, input: usize, spec: &TensorSpec) -> Result<(), RunFailure> {
        let row = elements(&self.batch.shapes[input])
            .ok_or_else(|| bad(&format!("the shape of input `{}` is invalid", spec.name)))?;
        for request in &self.batch.requests {
            let extent = request.inputs[input];
            self.slab.bytes(extent.offset, extent.len).map_err(|outside| bad(&outside.to_string()))?;
            let wanted = row.checked_mul(request.rows as usize);
            let fits = match spec.datatype.size() {
                Some(size) => {
                    wanted.and_then(|wanted| wanted.checked_mul(size)) == usize::try_from(extent.len).ok()
                }
                // The engine reads the length of each string from the bytes. Each string takes at
                // least four bytes, which hold its length.
                None => wanted
                    .and_then(|wanted| wanted.checked_mul(4))
                    .is_some_and(|least| least as u64 <= extent.len),
            };
            if !fits {
                return Err(bad(&format!("the length of input `{}` does not match its shape", spec.name)));
            }
        }
        Ok(())
    }

    fn check_optional(
        &self,
        OptionalTensor { input, shape, part }: &OptionalTensor,
    ) -> Result<(), RunFailure> {
        let spec = self.optional.get(*input as usize);
        let spec = spec.ok_or_else(|| bad(&format!("the model has no optional input {input}")))?;
        self.slab.bytes(part.offset, part.len).map_err(|outside| bad(&outside.to_string()))?;
        let bytes =
            elements(shape).zip(spec.datatype.size()).and_then(|(count, size)| count.checked_mul(size));
        if bytes.is_none_or(|bytes| bytes as u64 != part.len) {
            return Err(bad(&format!("the length of input `{}` does not match its shape", spec.name)));
        }
        Ok(())
    }

    /// Returns the optional inputs that this batch's request contains.
    pub fn optional(&self) -> impl Iterator<Item = OptionalInput<'a>> {
        self.batch.optional.iter().map(|OptionalTensor { input, shape, part }| {
            let bytes = self.slab.bytes(part.offset, part.len).expect("`check` found it inside the slab");
            OptionalInput { spec: &self.optional[*input as usize], shape, bytes }
        })
    }

    pub fn id(&self) -> u64 {
        self.batch.id
    }

    pub fn slot(&self) -> u8 {
        self.batch.slot
    }

    pub fn groups(&self) -> Groups {
        self.batch.groups
    }

    pub fn requests(&self) -> usize {
        self.batch.requests.len()
    }

    pub fn rows_of(&self, request: usize) -> u32 {
        self.batch.requests[request].rows
    }

    /// Returns the number of rows, or `None` for a model without a batch axis.
    pub fn rows(&self) -> Option<u32> {
        self.rows
    }

    pub fn specs(&self) -> &'a [TensorSpec] {
        self.specs
    }

    pub fn row_shape(&self, input: usize) -> &'a [i64] {
        &self.batch.shapes[input]
    }

    /// Returns the shape, including the batch axis.
    pub fn shape(&self, input: usize) -> impl Iterator<Item = i64> + 'a {
        self.rows.map(i64::from).into_iter().chain(self.row_shape(input).iter().copied())
    }

    pub fn part(&self, request: usize, input: usize) -> &'a [u8] {
        let Extent { offset, len } = self.batch.requests[request].inputs[input];
        self.slab.bytes(offset, len).expect("`check` found it inside the slab")
    }
}

fn check_counts(batch: &Batch, inputs: usize, batched: bool) -> Result<(), RunFailure> {
    let requests = batch.requests.len();
    if usize::from(batch.slot) >= IN_FLIGHT {
        return Err(bad(&format!("slot {} does not exist", batch.slot)));
    }
    if requests == 0 || requests > MAX_REQUESTS {
        return Err(bad(&format!("a batch of {requests} requests is not allowed")));
    }
    if !batched && (requests != 1 || batch.requests[0].rows != 1) {
        return Err(bad("a model without a batch axis takes one request of one row"));
    }
    if batch.shapes.len() != inputs || batch.requests.iter().any(|request| request.inputs.len() != inputs) {
        return Err(bad(&format!("the model has {inputs} inputs, and a request has another number of them")));
    }
    Ok(())
}

fn bad(why: &str) -> RunFailure {
    RunFailure::BadBatch(why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowslice_shared::batch::BatchRequest;
    use shadowslice_shared::slab::WritableSlab;
    use shadowslice_shared::tensor::Datatype;
    use std::os::fd::AsFd;

    fn slab() -> ReadableSlab {
        let slab = WritableSlab::create("test", 4096).unwrap();
        ReadableSlab::map(slab.as_fd(), 4096).unwrap()
    }

    fn specs() -> Vec<TensorSpec> {
        vec![TensorSpec { name: "x".into(), datatype: Datatype::Fp32, shape: vec![-1, 4] }]
    }

    fn batch(change: impl FnOnce(&mut Batch)) -> Batch {
        let request = |offset| BatchRequest { rows: 2, inputs: vec![Extent { offset, len: 32 }] };
        let requests = vec![request(0), request(64)];
        let (groups, shapes) = (Groups::WHOLE, vec![vec![4]]);
        let mut batch = Batch { id: 1, slot: 0, sent_ns: 0, groups, shapes, requests, optional: Vec::new() };
        change(&mut batch);
        batch
    }

    #[test]
    fn a_good_batch_is_seen_whole() {
        let (slab, specs, batch) = (slab(), specs(), batch(|_| {}));
        let inputs = Inputs::check(&batch, &slab, (&specs, &[]), true).unwrap();
        assert_eq!(inputs.rows(), Some(4));
        assert_eq!(inputs.shape(0).collect::<Vec<_>>(), [4, 4]);
        assert_eq!(inputs.part(1, 0).len(), 32);
    }

    #[test]
    fn a_batch_that_lies_is_refused() {
        let (slab, specs) = (slab(), specs());
        let lies: [fn(&mut Batch); 12] = [
            |batch| batch.slot = 2,
            |batch| batch.requests.clear(),
            |batch| batch.requests = vec![batch.requests[0].clone(); MAX_REQUESTS + 1],
            |batch| batch.shapes.clear(),
            |batch| batch.shapes.push(vec![4]),
            |batch| batch.requests[1].inputs.clear(),
            |batch| batch.requests[1].inputs[0].len = 31,
            |batch| batch.requests[1].inputs[0].offset = 4090,
            |batch| batch.requests[1].inputs[0].offset = u64::MAX,
            |batch| batch.shapes[0] = vec![-4],
            |batch| batch.shapes[0] = vec![i64::MAX, i64::MAX],
            |batch| batch.requests.iter_mut().for_each(|request| request.rows = u32::MAX),
        ];
        for (number, lie) in lies.into_iter().enumerate() {
            let batch = batch(lie);
            let refused = Inputs::check(&batch, &slab, (&specs, &[]), true);
            assert!(matches!(refused, Err(RunFailure::BadBatch(_))), "lie {number}: {refused:?}");
        }
        let two = batch(|_| {});
        let refused = Inputs::check(&two, &slab, (&specs, &[]), false);
        assert!(refused.is_err(), "two requests, no batch axis");
    }

    #[test]
    fn optional_inputs_are_those_of_one_request() {
        let (slab, specs) = (slab(), specs());
        let optional = [TensorSpec { name: "b".into(), datatype: Datatype::Fp32, shape: vec![2] }];
        let tensor = |input, len| OptionalTensor { input, shape: vec![2], part: Extent { offset: 128, len } };
        let check = |requests: usize, tensor: OptionalTensor| {
            let batch = batch(|batch| {
                batch.requests.truncate(requests);
                batch.optional.push(tensor);
            });
            Inputs::check(&batch, &slab, (&specs, &optional), true).map(|inputs| {
                inputs
                    .optional()
                    .map(|given| (given.spec.name.clone(), given.shape.to_vec(), given.bytes.len()))
                    .collect()
            })
        };
        assert_eq!(check(1, tensor(0, 8)), Ok(vec![("b".to_owned(), vec![2], 8)]));
        for (requests, tensor) in [(2, tensor(0, 8)), (1, tensor(1, 8)), (1, tensor(0, 4))] {
            assert!(matches!(check(requests, tensor), Err(RunFailure::BadBatch(_))));
        }
        let outside = OptionalTensor { part: Extent { offset: 4090, len: 8 }, ..tensor(0, 8) };
        assert!(check(1, outside).is_err());
    }
}
