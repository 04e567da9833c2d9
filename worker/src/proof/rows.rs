//! The proof that a row's answer is the same whatever rows are in its batch.
//!
//! A first axis of any length may be a sequence instead of a batch, or a model may compute a mean,
//! a softmax or a normalisation over its rows. The answers to different clients would be mixed
//! silently. So the rows of one batch also run alone and in the opposite order.

use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::tensor::{Datatype, byte_strings, push_byte_string};

use super::compare::compare;
use super::inputs::Tensor;
use super::made_up::{Draw, Fill};
use super::reference::ReferenceOutput;
use super::{Run, Trial};
use crate::engine::Basis;
use shadowslice_shared::groups::Groups;

/// How many times as far as from the reference a row's answer may lie from that of the row alone.
/// Models with dynamic quantization scale by the whole batch, which costs some hundredths; rows
/// that depend on each other are off by much more.
const SLACK: f64 = 10.0;

impl Trial<'_> {
    /// Runs the smallest batch of several rows.
    pub(super) fn check_rows(&mut self, basis: &Basis, fill: Fill) -> Result<(), BootRefusal> {
        let several = self.warm_up.sizes.iter().copied().find(|&size| size > 1);
        let Some(size) = several.filter(|_| self.warm_up.batched && self.signature.streams == 0) else {
            return Ok(());
        };
        if !basis.deterministic {
            return Ok(());
        }
        let run = Run { size, fill, draw: Draw::Proof, slot: 0, groups: Groups::WHOLE };
        let rows = self.rows_of(run)?;
        let mut alone = Vec::with_capacity(rows.len());
        for row in &rows {
            alone.push(self.run_rows(run, &[row])?);
        }
        let orders = [(0..rows.len()).collect::<Vec<_>>(), (0..rows.len()).rev().collect()];
        for order in orders {
            let batch: Vec<&Vec<Tensor>> = order.iter().map(|&row| &rows[row]).collect();
            let together = self.run_rows(run, &batch)?;
            let expected = joined(order.iter().map(|&row| &alone[row]));
            self.compare_rows(&expected, &together, size)?;
        }
        Ok(())
    }

    fn compare_rows(
        &self,
        alone: &[ReferenceOutput],
        together: &[ReferenceOutput],
        size: u32,
    ) -> Result<(), BootRefusal> {
        let outputs = self.signature.outputs.iter().zip(alone).zip(together);
        for ((spec, alone), together) in outputs {
            compare(spec.datatype, alone, together, SLACK).map_err(|wrong| {
                BootRefusal::RowsDepend(format!(
                    "an answer depends on the other rows of its batch: in a batch of {size} rows, output \
                     `{}` {wrong} for the same rows alone",
                    spec.name
                ))
            })?;
        }
        Ok(())
    }

    /// Splits the inputs of a batch into its rows.
    fn rows_of(&self, run: Run) -> Result<Vec<Vec<Tensor>>, BootRefusal> {
        let mut rows = vec![Vec::new(); run.size as usize];
        let tensors = self.tensors(run)?;
        for (spec, (shape, bytes)) in self.signature.inputs.iter().zip(tensors) {
            for (row, bytes) in rows.iter_mut().zip(split(spec.datatype, &bytes, run.size as usize)) {
                row.push((shape.clone(), bytes));
            }
        }
        Ok(rows)
    }

    /// Each row is a request.
    fn run_rows(&mut self, run: Run, rows: &[&Vec<Tensor>]) -> Result<Vec<ReferenceOutput>, BootRefusal> {
        let made_up = self.laid_out(run, rows.iter().map(|row| (1, row.as_slice())))?;
        Ok(self.run_on(run, &made_up)?.0)
    }
}

/// Returns the same outputs with the rows of all answers, one after the other.
fn joined<'a>(answers: impl Iterator<Item = &'a Vec<ReferenceOutput>>) -> Vec<ReferenceOutput> {
    let mut joined: Vec<ReferenceOutput> = Vec::new();
    for answer in answers {
        for (at, output) in answer.iter().enumerate() {
            match joined.get_mut(at) {
                Some(all) => all.bytes.extend(&output.bytes),
                None => {
                    joined.push(ReferenceOutput { shape: output.shape.clone(), bytes: output.bytes.clone() })
                }
            }
        }
    }
    joined
}

/// Splits a tensor into its rows.
fn split(datatype: Datatype, bytes: &[u8], rows: usize) -> Vec<Vec<u8>> {
    if datatype.size().is_some() {
        let row = bytes.len() / rows;
        return (0..rows).map(|at| bytes[at * row..(at + 1) * row].to_vec()).collect();
    }
    let strings = byte_strings(bytes).unwrap_or_default();
    let row = strings.len() / rows;
    let encoded = |strings: &[&[u8]]| {
        let mut bytes = Vec::new();
        strings.iter().for_each(|string| push_byte_string(&mut bytes, string));
        bytes
    };
    (0..rows).map(|at| encoded(&strings[at * row..(at + 1) * row])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_split_into_rows_and_answers_joined_again() {
        assert_eq!(split(Datatype::Int16, &[1, 2, 3, 4, 5, 6, 7, 8], 2), [[1, 2, 3, 4], [5, 6, 7, 8]]);
        assert_eq!(split(Datatype::Fp32, &[], 2), [Vec::<u8>::new(), Vec::new()]);
        let strings = |strings: &[&str]| {
            let mut bytes = Vec::new();
            strings.iter().for_each(|string| push_byte_string(&mut bytes, string.as_bytes()));
            bytes
        };
        let rows = split(Datatype::Bytes, &strings(&["a", "bcd", "", "e"]), 2);
        assert_eq!(rows, [strings(&["a", "bcd"]), strings(&["", "e"])]);
        let answer = |bytes: &[u8]| vec![ReferenceOutput { shape: vec![1], bytes: bytes.to_vec() }];
        let joined = joined([answer(&[1]), answer(&[2, 3])].iter());
        assert_eq!(joined, answer(&[1, 2, 3]));
    }
}
