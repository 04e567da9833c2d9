//! The proof that a row's answer does not depend on the other rows of its batch.
//!
//! The first axis of a model's inputs may be a sequence instead of a batch, even if it can have any
//! length. A model may also compute a mean, a softmax or a normalisation over its rows. The answers
//! to different clients would then be mixed without any error. The reference worker therefore also
//! runs the rows of one batch alone, in the opposite order, and next to a row of extreme values.
//! The extreme row reveals dependencies that only large values trigger, such as a maximum or the
//! scale of a dynamic quantization.

use std::time::Duration;

use shadowslice_shared::boot::{BootRefusal, WarmTime};
use shadowslice_shared::compare::compare;
use shadowslice_shared::tensor::{Datatype, byte_strings, push_byte_string};

use super::extremes::{Extreme, extreme, neighbour};
use super::made_up::{Draw, Fill};
use super::{ProofBatch, Prover};
use crate::engine::{ProofBasis, TensorData};
use shadowslice_shared::groups::Groups;

/// The factor on the usual tolerance when a row in a batch is compared with the same row alone. It
/// applies only if the operator configures batches. Models with dynamic quantization use one scale
/// for the whole batch, which causes errors of some hundredths among similar rows. Rows that depend
/// on each other cause much larger errors.
const TOLERANCE_FACTOR: f64 = 10.0;

/// The maximum number of rows to compare if a batch of several rows is quick. More than two are
/// needed, because a row of a sequence may depend on the row before the previous one.
const MAX_COMPARED_ROWS: u32 = 4;

/// The maximum time of a quick batch. If no batch is quick, the smallest batch with several rows is
/// compared.
const MAX_QUICK_TIME: Duration = Duration::from_secs(1);

impl Prover<'_> {
    /// Compares the answers to a batch of several rows with the answers to each row alone.
    pub(super) fn check_rows(&mut self, basis: &ProofBasis, times: &[WarmTime]) -> Result<(), BootRefusal> {
        let Some(size) =
            rows_to_compare(times).filter(|_| self.warm_up.batched && self.signature.streams.is_none())
        else {
            return Ok(());
        };
        if !basis.deterministic {
            return match self.warm_up.batch_is_given {
                true => Ok(()),
                false => Err(BootRefusal::RowsDepend(
                    "the model's answers are random, so shadowslice cannot tell whether rows depend on each \
                     other; if they do not, set batch.max"
                        .to_owned(),
                )),
            };
        }
        let run = ProofBatch { size, draw: Draw::Proof, slot: 0, groups: Groups::WHOLE };
        let rows = self.rows_of(run)?;
        let varied = self.varied(&rows);
        // A model may refuse the changed values, for example because it looks them up in a table.
        // In that case, the rows are compared without changes.
        let (rows, alone) = match self.run_alone(run, &varied) {
            Ok(alone) => (varied, alone),
            Err(_) if varied != rows => {
                let alone = self.run_alone(run, &rows)?;
                (rows, alone)
            }
            Err(refusal) => return Err(refusal),
        };
        let orders = [(0..rows.len()).collect::<Vec<_>>(), (0..rows.len()).rev().collect()];
        for order in orders {
            let batch: Vec<&Vec<TensorData>> = order.iter().map(|&row| &rows[row]).collect();
            let together = self.run_rows(run, &batch)?;
            let expected = joined(order.iter().map(|&row| &alone[row]));
            self.compare_rows(&expected, &together, size)?;
        }
        if self.warm_up.batch_is_given {
            return Ok(());
        }
        self.check_beside_extremes(run, &rows, &joined(alone[..rows.len() - 1].iter()))
    }

    /// Runs each row as a separate batch.
    fn run_alone(
        &mut self,
        run: ProofBatch,
        rows: &[Vec<TensorData>],
    ) -> Result<Vec<Vec<TensorData>>, BootRefusal> {
        rows.iter().map(|row| self.run_rows(run, &[row])).collect()
    }

    /// Changes every second row of an input if its strings or integers are equal in all rows. Equal
    /// rows would not show whether they depend on each other.
    fn varied(&self, rows: &[Vec<TensorData>]) -> Vec<Vec<TensorData>> {
        let mut varied = rows.to_vec();
        for (input, spec) in self.signature.inputs.iter().enumerate() {
            let are_equal = rows.iter().all(|row| row[input] == rows[0][input]);
            let is_made_up = self.is_made_up(input);
            // The fill draws both 0 and 1, so the model accepts both.
            let is_safe = is_made_up && self.settings.fill == Fill::Bits;
            if are_equal && (is_safe || self.survives_any_value()) {
                for row in varied.iter_mut().skip(1).step_by(2) {
                    row[input].bytes = neighbour(spec.datatype, &row[input].bytes, is_safe);
                }
            }
        }
        varied
    }

    /// Returns true if an input holds made-up values, which have no meaning for the model.
    fn is_made_up(&self, input: usize) -> bool {
        self.given.is_none() && self.settings.values.get(input).is_none_or(Option::is_none)
    }

    /// Runs the batch with an extreme row in place of the last row. `alone` are the answers that
    /// the other rows get alone.
    fn check_beside_extremes(
        &mut self,
        run: ProofBatch,
        rows: &[Vec<TensorData>],
        alone: &[TensorData],
    ) -> Result<(), BootRefusal> {
        let Some((last, others)) = rows.split_last() else { return Ok(()) };
        for which in [Extreme::Floats, Extreme::Integers] {
            let Some(extreme) = self.extreme_row(which, last) else { continue };
            let batch: Vec<&Vec<TensorData>> = others.iter().chain([&extreme]).collect();
            // A model may refuse extreme values, for example because it looks them up in a table.
            // In that case, this kind of extreme is skipped.
            let Ok(mut together) = self.run_rows(run, &batch) else { continue };
            for (spec, output) in self.signature.outputs.iter().zip(&mut together) {
                output.bytes = split(spec.datatype, &output.bytes, rows.len())[..others.len()].concat();
            }
            self.compare_rows(alone, &together, run.size)?;
        }
        Ok(())
    }

    /// Returns a copy of the row with extreme values, or `None` if no value of the row would
    /// change.
    fn extreme_row(&self, which: Extreme, row: &[TensorData]) -> Option<Vec<TensorData>> {
        let inputs = self.signature.inputs.iter().zip(row).enumerate();
        let changed = inputs.map(|(input, (spec, TensorData { shape, bytes }))| {
            let may_change = self.is_made_up(input) && self.survives_any_value();
            let with = extreme(which, spec.datatype, bytes, may_change.then_some(self.settings.fill));
            TensorData { shape: shape.clone(), bytes: with }
        });
        let changed: Vec<TensorData> = changed.collect();
        (changed != row).then_some(changed)
    }

    fn compare_rows(
        &self,
        alone: &[TensorData],
        together: &[TensorData],
        size: u32,
    ) -> Result<(), BootRefusal> {
        let outputs = self.signature.outputs.iter().zip(alone).zip(together);
        for ((spec, alone), together) in outputs {
            let slack = if self.warm_up.batch_is_given { TOLERANCE_FACTOR } else { 1.0 };
            compare(spec.datatype, alone.view(), together.view(), slack).map_err(|wrong| {
                BootRefusal::RowsDepend(format!(
                    "an answer depends on the other rows of its batch: unlike for the same rows alone, in a \
                     batch of {size} rows output `{}` {wrong}",
                    spec.name
                ))
            })?;
        }
        Ok(())
    }

    /// Splits the inputs of a batch into its rows.
    fn rows_of(&self, run: ProofBatch) -> Result<Vec<Vec<TensorData>>, BootRefusal> {
        let mut rows = vec![Vec::new(); run.size as usize];
        let tensors = self.tensors(run)?;
        for (spec, TensorData { shape, bytes }) in self.signature.inputs.iter().zip(tensors) {
            for (row, bytes) in rows.iter_mut().zip(split(spec.datatype, &bytes, run.size as usize)) {
                row.push(TensorData { shape: shape.clone(), bytes });
            }
        }
        Ok(rows)
    }

    /// Runs rows as one batch, in which each row is a request.
    fn run_rows(
        &mut self,
        run: ProofBatch,
        rows: &[&Vec<TensorData>],
    ) -> Result<Vec<TensorData>, BootRefusal> {
        let made_up = self.laid_out(run, rows.iter().map(|row| (1, row.as_slice())))?;
        Ok(self.run_on(run, &made_up)?.0)
    }
}

/// Returns the number of rows to compare, which depends on the times of the batches. Returns `None`
/// if no batch has several rows.
fn rows_to_compare(times: &[WarmTime]) -> Option<u32> {
    let several = || times.iter().filter(|time| time.rows > 1);
    let quick = several().rfind(|time| time.rows <= MAX_COMPARED_ROWS && time.took <= MAX_QUICK_TIME);
    quick.or_else(|| several().next()).map(|time| time.rows)
}

/// Returns the outputs. Each output contains the rows of all answers, in sequence.
fn joined<'a>(answers: impl Iterator<Item = &'a Vec<TensorData>>) -> Vec<TensorData> {
    let mut joined: Vec<TensorData> = Vec::new();
    for answer in answers {
        for (at, output) in answer.iter().enumerate() {
            match joined.get_mut(at) {
                Some(all) => all.bytes.extend(&output.bytes),
                None => joined.push(TensorData { shape: output.shape.clone(), bytes: output.bytes.clone() }),
            }
        }
    }
    joined
}

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
        let answer = |bytes: &[u8]| vec![TensorData { shape: vec![1], bytes: bytes.to_vec() }];
        let joined = joined([answer(&[1]), answer(&[2, 3])].iter());
        assert_eq!(joined, answer(&[1, 2, 3]));
    }
}
