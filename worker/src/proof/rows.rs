//! The proof that a row's answer is the same whatever rows are in its batch.
//!
//! A first axis of any length may be a sequence instead of a batch, or a model may compute a mean,
//! a softmax or a normalisation over its rows. The answers to different clients would be mixed
//! silently. So the rows of one batch also run alone, in the opposite order, and beside a row of
//! extreme values, which shows what only large values change: a maximum, or the scale of a dynamic
//! quantization.

use std::time::Duration;

use shadowslice_shared::boot::{BootRefusal, WarmTime};
use shadowslice_shared::tensor::{Datatype, byte_strings, push_byte_string};

use super::compare::compare;
use super::extremes::{Extreme, extreme, neighbour};
use super::inputs::Tensor;
use super::made_up::{Draw, Fill};
use super::reference::ReferenceOutput;
use super::{Run, Trial};
use crate::engine::Basis;
use shadowslice_shared::groups::Groups;

/// How many times as far as from the reference a row's answer may lie from that of the row alone,
/// where the operator asks for batches. Models with dynamic quantization scale by the whole batch,
/// which costs some hundredths with rows of a kind; rows that depend on each other are off by much
/// more.
const SLACK: f64 = 10.0;

/// Rows that are compared, if a batch of so many is quick. Rows of a sequence may depend on the one
/// before the last.
const MOST_ROWS: u32 = 4;

/// A batch that takes longer is slow: then the smallest one must do.
const QUICK: Duration = Duration::from_secs(1);

impl Trial<'_> {
    /// Runs a batch of some rows, and each row alone.
    pub(super) fn check_rows(
        &mut self,
        basis: &Basis,
        fill: Fill,
        times: &[WarmTime],
    ) -> Result<(), BootRefusal> {
        let Some(size) =
            rows_to_compare(times).filter(|_| self.warm_up.batched && self.signature.streams == 0)
        else {
            return Ok(());
        };
        if !basis.deterministic {
            return match self.warm_up.batch_is_given {
                true => Ok(()),
                false => Err(BootRefusal::RowsDepend(
                    "its answers are random, so that nothing shows whether rows depend on each other; \
                     if they do not, set batch.max"
                        .to_owned(),
                )),
            };
        }
        let run = Run { size, fill, draw: Draw::Proof, slot: 0, groups: Groups::WHOLE };
        let rows = self.rows_of(run)?;
        let varied = self.varied(fill, &rows);
        // A model may refuse changed values, as one that looks them up in a table.
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
            let batch: Vec<&Vec<Tensor>> = order.iter().map(|&row| &rows[row]).collect();
            let together = self.run_rows(run, &batch)?;
            let expected = joined(order.iter().map(|&row| &alone[row]));
            self.compare_rows(&expected, &together, size)?;
        }
        if self.warm_up.batch_is_given {
            return Ok(());
        }
        self.check_beside_extremes(run, &rows, &joined(alone[..rows.len() - 1].iter()))
    }

    fn run_alone(
        &mut self,
        run: Run,
        rows: &[Vec<Tensor>],
    ) -> Result<Vec<Vec<ReferenceOutput>>, BootRefusal> {
        rows.iter().map(|row| self.run_rows(run, &[row])).collect()
    }

    /// Changes every second row in the inputs that hold the same text or integers in all rows, since
    /// equal rows do not show that they depend on each other.
    fn varied(&self, fill: Fill, rows: &[Vec<Tensor>]) -> Vec<Vec<Tensor>> {
        let mut varied = rows.to_vec();
        for (input, spec) in self.signature.inputs.iter().enumerate() {
            let are_equal = rows.iter().all(|row| row[input] == rows[0][input]);
            let is_made_up = self.is_made_up(input);
            // 0 and 1 are known to be valid if both were drawn.
            let is_safe = is_made_up && fill == Fill::Bits;
            if are_equal && (is_safe || self.survives_any_value()) {
                for row in varied.iter_mut().skip(1).step_by(2) {
                    row[input].1 = neighbour(spec.datatype, &row[input].1, is_safe);
                }
            }
        }
        varied
    }

    /// Returns whether the values of an input have no meaning.
    fn is_made_up(&self, input: usize) -> bool {
        self.given.is_none() && self.values.get(input).is_none_or(Option::is_none)
    }

    /// Runs the rows with an extreme one in the place of the last. `alone` has the answers to the
    /// others.
    fn check_beside_extremes(
        &mut self,
        run: Run,
        rows: &[Vec<Tensor>],
        alone: &[ReferenceOutput],
    ) -> Result<(), BootRefusal> {
        let Some((last, others)) = rows.split_last() else { return Ok(()) };
        for which in [Extreme::Floats, Extreme::Integers] {
            let Some(extreme) = self.extreme_row(which, run.fill, last) else { continue };
            let batch: Vec<&Vec<Tensor>> = others.iter().chain([&extreme]).collect();
            // A model may refuse such values, as one that looks them up in a table.
            let Ok(mut together) = self.run_rows(run, &batch) else { continue };
            for (spec, output) in self.signature.outputs.iter().zip(&mut together) {
                output.bytes = split(spec.datatype, &output.bytes, rows.len())[..others.len()].concat();
            }
            self.compare_rows(alone, &together, run.size)?;
        }
        Ok(())
    }

    /// Returns that row with extreme values; `None` if it stays as it is.
    fn extreme_row(&self, which: Extreme, fill: Fill, row: &[Tensor]) -> Option<Vec<Tensor>> {
        let inputs = self.signature.inputs.iter().zip(row).enumerate();
        let changed = inputs.map(|(input, (spec, (shape, bytes)))| {
            let may_change = self.is_made_up(input) && self.survives_any_value();
            let with = extreme(which, spec.datatype, bytes, may_change.then_some(fill));
            (shape.clone(), with)
        });
        let changed: Vec<Tensor> = changed.collect();
        (changed != row).then_some(changed)
    }

    fn compare_rows(
        &self,
        alone: &[ReferenceOutput],
        together: &[ReferenceOutput],
        size: u32,
    ) -> Result<(), BootRefusal> {
        let outputs = self.signature.outputs.iter().zip(alone).zip(together);
        for ((spec, alone), together) in outputs {
            let slack = if self.warm_up.batch_is_given { SLACK } else { 1.0 };
            compare(spec.datatype, alone, together, slack).map_err(|wrong| {
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

/// Returns how many rows are compared, of the batches that took these times.
fn rows_to_compare(times: &[WarmTime]) -> Option<u32> {
    let several = || times.iter().filter(|time| time.rows > 1);
    let quick = several().rfind(|time| time.rows <= MOST_ROWS && time.took <= QUICK);
    quick.or_else(|| several().next()).map(|time| time.rows)
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
