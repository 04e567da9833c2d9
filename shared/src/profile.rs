//! Profiles: what a model costs on a device. Emulation, simulation and policies read them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::units::Sms;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProfileSource {
    Illustrative,
    Measured {
        device: String,
        driver: String,
        /// ISO 8601.
        date: String,
    },
}

impl ProfileSource {
    /// Whether the times are those of a real device.
    pub fn is_measured(&self) -> bool {
        matches!(self, Self::Measured { .. })
    }
}

/// Of one process of the model, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProcessMemory {
    pub context: u64,
    pub weights: u64,
    pub activations: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StartTimes {
    /// From the spawn to the first word.
    pub process: Duration,
    pub load: Duration,
    /// Running every batch size once.
    pub warm: Duration,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    pub source: ProfileSource,
    pub memory: ProcessMemory,
    pub start: StartTimes,
    /// The part of the memory bandwidth that the model uses alone on the whole GPU, 0 to 1.
    pub bandwidth: f64,
    /// With which it was measured, of inputs that have free axes besides the batch, without that.
    pub shapes: BTreeMap<String, Vec<i64>>,
    pub execution: Execution,
}

/// Execution time over batch size and SMs. There is at least one row and one column, all times are
/// positive and finite, and batch sizes and SM counts ascend.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Execution {
    sms: Vec<Sms>,
    rows: Vec<ExecutionRow>,
    /// The kernels of one batch, if they were counted.
    kernels: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExecutionRow {
    pub batch: u32,
    /// Milliseconds, one for each SM count.
    pub ms: Vec<f64>,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TableError {
    #[error("no SM counts; give `sms: [14, 66, 132]`, say")]
    NoColumns,
    #[error("no batch size; give `1: [..]` with a time in ms for each SM count")]
    NoRows,
    #[error("SM counts must ascend from at least 1")]
    ColumnsOutOfOrder,
    #[error("batch sizes must differ and be at least 1")]
    RowsOutOfOrder,
    #[error("batch size {batch} has {got} times for {want} SM counts")]
    Ragged { batch: u32, got: usize, want: usize },
    #[error("batch size {batch}: {ms} is not an execution time; give milliseconds above 0 and below 1000000")]
    NotATime { batch: u32, ms: f64 },
}

const MAX_MS: f64 = 1e6;

/// The mean length of a kernel of a batch of one row on all SMs, in s, where kernels were not
/// counted: ten models on an H200 had 3 to 13 us.
const KERNEL_S: f64 = 5e-6;

/// Some eleven days, which leaves room for sums and products in nanoseconds.
const LONGEST_MS: f64 = 1e9;

impl Execution {
    /// All that keeps this from being a table; rows may come in any order.
    pub fn faults(sms: &[Sms], rows: &[ExecutionRow]) -> Vec<TableError> {
        let mut faults = Vec::new();
        match sms.first() {
            None => faults.push(TableError::NoColumns),
            Some(first) if *first < Sms(1) || !sms.is_sorted_by(|a, b| a < b) => {
                faults.push(TableError::ColumnsOutOfOrder);
            }
            Some(_) => {}
        }
        let batches: BTreeSet<u32> = rows.iter().map(|row| row.batch).collect();
        match batches.first() {
            None => faults.push(TableError::NoRows),
            Some(0) => faults.push(TableError::RowsOutOfOrder),
            Some(_) if batches.len() < rows.len() => faults.push(TableError::RowsOutOfOrder),
            Some(_) => {}
        }
        for &ExecutionRow { batch, ref ms } in rows {
            if ms.len() != sms.len() && !sms.is_empty() {
                faults.push(TableError::Ragged { batch, got: ms.len(), want: sms.len() });
            }
            if let Some(&ms) = ms.iter().find(|&&ms| !(ms > 0.0 && ms < MAX_MS)) {
                faults.push(TableError::NotATime { batch, ms });
            }
        }
        faults
    }

    /// Rows may come in any order.
    pub fn new(sms: Vec<Sms>, mut rows: Vec<ExecutionRow>) -> Result<Self, TableError> {
        rows.sort_by_key(|row| row.batch);
        match Self::faults(&sms, &rows).into_iter().next() {
            Some(bad) => Err(bad),
            None => Ok(Self { sms, rows, kernels: None }),
        }
    }

    /// Sets how many kernels a batch has, of whatever size.
    #[must_use]
    pub fn with_kernels(mut self, kernels: u32) -> Self {
        self.kernels = Some(kernels);
        self
    }

    /// Returns the kernels of a batch, at least one: as counted, or as many of a usual length as a
    /// batch of one row takes on the most SMs of the table.
    pub fn kernels(&self) -> f64 {
        let widest = self.sms.last().map_or(1.0, |sms| f64::from(sms.0));
        let usual = || self.ms(1, widest) / 1e3 / KERNEL_S;
        self.kernels.map_or_else(usual, f64::from).max(1.0)
    }

    /// Linear between the table's points; `sms` may be a fraction, under contention. With fewer SMs
    /// than the first column the time grows in inverse proportion, with more than the last it stays
    /// the same. Smaller batches take as long as the first row, larger ones more in proportion, up
    /// to some eleven days.
    pub fn time(&self, batch: u32, sms: f64) -> Duration {
        Duration::from_secs_f64(self.ms(batch, sms).min(LONGEST_MS) / 1e3)
    }

    fn ms(&self, batch: u32, sms: f64) -> f64 {
        let above = self.rows.partition_point(|row| row.batch < batch);
        let Some(upper) = self.rows.get(above) else {
            let last = &self.rows[above - 1];
            return self.row_ms(last, sms) * f64::from(batch) / f64::from(last.batch);
        };
        if above == 0 || upper.batch == batch {
            return self.row_ms(upper, sms);
        }
        let lower = &self.rows[above - 1];
        let part = f64::from(batch - lower.batch) / f64::from(upper.batch - lower.batch);
        lerp(self.row_ms(lower, sms), self.row_ms(upper, sms), part)
    }

    fn row_ms(&self, row: &ExecutionRow, sms: f64) -> f64 {
        let column = |index: usize| f64::from(self.sms[index].0);
        let above = self.sms.partition_point(|s| f64::from(s.0) < sms);
        if above == self.sms.len() {
            return row.ms[above - 1];
        }
        if above == 0 {
            // With no SMs left at all, a thousandth of an SM bounds the result.
            return row.ms[0] * column(0) / sms.max(1e-3);
        }
        let part = (sms - column(above - 1)) / (column(above) - column(above - 1));
        lerp(row.ms[above - 1], row.ms[above], part)
    }

    /// The least that a batch takes of the GPU, in SM·s: the smallest product of SMs and time.
    pub fn work(&self, batch: u32) -> f64 {
        let columns = self.sms.iter().map(|sms| f64::from(sms.0));
        columns.map(|sms| sms * self.ms(batch, sms) / 1e3).fold(f64::INFINITY, f64::min)
    }

    pub fn sms(&self) -> &[Sms] {
        &self.sms
    }

    pub fn rows(&self) -> &[ExecutionRow] {
        &self.rows
    }
}

fn lerp(from: f64, to: f64, part: f64) -> f64 {
    from + (to - from) * part
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Execution {
        let row = |batch, ms: &[f64]| ExecutionRow { batch, ms: ms.to_vec() };
        Execution::new(
            vec![Sms(10), Sms(20), Sms(40)],
            vec![row(8, &[40.0, 20.0, 16.0]), row(1, &[10.0, 6.0, 5.0])],
        )
        .unwrap()
    }

    #[test]
    fn times_between_below_and_above_the_points() {
        let ms = |batch, sms| table().ms(batch, sms);
        assert_eq!(ms(1, 20.0), 6.0);
        assert_eq!(ms(1, 15.0), 8.0);
        assert_eq!(ms(1, 5.0), 20.0, "fewer SMs: inverse proportion");
        assert_eq!(ms(1, 132.0), 5.0, "more SMs: flat");
        assert_eq!(ms(16, 20.0), 40.0, "larger batches: in proportion");
        assert!((ms(4, 10.0) - (10.0 + 30.0 * 3.0 / 7.0)).abs() < 1e-9, "between two batch sizes");
        assert!(ms(1, 0.0).is_finite());
    }

    #[test]
    fn times_far_from_the_table_can_still_be_added_up() {
        let slow = ExecutionRow { batch: 1, ms: vec![999_999.0] };
        let table = Execution::new(vec![Sms(1_000_000)], vec![slow]).unwrap();
        assert!(table.time(u32::MAX, 0.0).as_nanos() < u128::from(u64::MAX / 10_000));
    }

    #[test]
    fn tables_that_are_none() {
        let bad = |sms: &[u32], rows: Vec<ExecutionRow>| {
            Execution::new(sms.iter().map(|&s| Sms(s)).collect(), rows).unwrap_err()
        };
        let row = |batch, ms: &[f64]| ExecutionRow { batch, ms: ms.to_vec() };
        assert_eq!(bad(&[], vec![]), TableError::NoColumns);
        assert_eq!(bad(&[2], vec![]), TableError::NoRows);
        assert_eq!(bad(&[4, 2], vec![row(1, &[1.0, 1.0])]), TableError::ColumnsOutOfOrder);
        assert_eq!(bad(&[0, 2], vec![row(1, &[1.0, 1.0])]), TableError::ColumnsOutOfOrder);
        assert_eq!(bad(&[2], vec![row(1, &[1.0]), row(1, &[2.0])]), TableError::RowsOutOfOrder);
        assert_eq!(bad(&[2], vec![row(1, &[])]), TableError::Ragged { batch: 1, got: 0, want: 1 });
        assert_eq!(bad(&[2], vec![row(1, &[0.0])]), TableError::NotATime { batch: 1, ms: 0.0 });
        assert!(matches!(bad(&[2], vec![row(1, &[f64::NAN])]), TableError::NotATime { .. }));
    }
}
