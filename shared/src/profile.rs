//! Profiles: the execution times, memory use and start-up times of a model on a device. The emulated
//! device, the simulator and the policies use profiles.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::units::Sms;

/// The origin of a profile's figures.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProfileSource {
    /// The figures are made up.
    Illustrative,
    /// The figures were measured on a real device.
    Measured {
        /// The name of the device.
        device: String,
        /// The version of the device's driver.
        driver: String,
        /// The date of the measurement, in ISO 8601.
        date: String,
    },
}

impl ProfileSource {
    /// Returns whether the figures were measured on a real device.
    pub fn is_measured(&self) -> bool {
        matches!(self, Self::Measured { .. })
    }
}

/// The GPU memory that one worker process of the model uses, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// The size of the device context and of the libraries, in bytes.
    pub context: u64,
    /// The size of the weights, in bytes.
    pub weights: u64,
    /// The size of the activations and scratch buffers, in bytes.
    pub activations: u64,
}

/// The rate at which a GPU copies weights from host memory, in bytes per second (measured on an H200).
const WAKE_BYTES_PER_SECOND: f64 = 47e9;

/// The time to allocate and map GPU memory when a model wakes (measured on an H200).
const WAKE_SETUP: Duration = Duration::from_micros(300);

impl ProcessMemory {
    /// Returns the memory of a worker, in bytes.
    pub fn total(&self) -> u64 {
        self.without_weights().saturating_add(self.weights)
    }

    /// Returns the memory of a worker that has released its weights, or shares those of another worker, in
    /// bytes.
    pub fn without_weights(&self) -> u64 {
        self.context.saturating_add(self.activations)
    }

    /// Returns the time that the model needs to wake, if its weights wait in host memory.
    pub fn wake_time(&self) -> Duration {
        wake_time(self.weights)
    }
}

/// Returns the time in which a GPU gets weights of this size in bytes, if they wait in host memory.
pub fn wake_time(weights: u64) -> Duration {
    WAKE_SETUP + Duration::from_secs_f64(weights as f64 / WAKE_BYTES_PER_SECOND)
}

/// The durations of the phases of a worker's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StartTimes {
    /// The time from the start of the process until its first message.
    pub process: Duration,
    /// The time to load the model.
    pub load: Duration,
    /// The time to run one batch of every batch size.
    pub warm: Duration,
}

/// The execution times, memory use and start-up times of a model on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// The origin of the figures.
    pub source: ProfileSource,
    /// The GPU memory that one worker process uses.
    pub memory: ProcessMemory,
    /// The durations of the phases of a worker's start.
    pub start: StartTimes,
    /// The fraction of the GPU's memory bandwidth that the model uses, from 0 to 1, if it runs alone on
    /// the whole GPU.
    pub bandwidth: f64,
    /// The shapes with which the model was measured, by the name of the input and without the batch
    /// axis. An input has an entry only if it has free axes in addition to the batch axis.
    pub shapes: BTreeMap<String, Vec<i64>>,
    /// The execution times.
    pub execution: Execution,
}

/// A table of execution times by batch size (rows) and number of SMs (columns). The table has at least
/// one row and one column. All times are positive and finite. Batch sizes and SM counts ascend.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Execution {
    sms: Vec<Sms>,
    rows: Vec<ExecutionRow>,
    /// The number of kernels that one batch launches, or `None` if they were not counted.
    kernels: Option<u32>,
}

/// The execution times of one batch size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExecutionRow {
    /// The batch size in rows.
    pub batch: u32,
    /// The times in ms, one for each SM count.
    pub ms: Vec<f64>,
}

/// A fault in a table of execution times.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TableError {
    /// The table has no SM counts.
    #[error("no SM counts; use for example `sms: [14, 66, 132]`")]
    NoColumns,
    /// The table has no batch sizes.
    #[error("no batch size; give `1: [..]` with a time in ms for each SM count")]
    NoRows,
    /// The SM counts do not ascend, or an SM count is 0.
    #[error("SM counts must ascend and be at least 1")]
    ColumnsOutOfOrder,
    /// A batch size appears twice or is 0.
    #[error("batch sizes must differ and be at least 1")]
    RowsOutOfOrder,
    /// A row does not have one time for each SM count.
    #[error("batch size {batch} has {got} times for {want} SM counts; give one time for each SM count")]
    Ragged {
        /// The batch size in rows.
        batch: u32,
        /// The number of times in the row.
        got: usize,
        /// The number of SM counts in the table.
        want: usize,
    },
    /// A time is outside the valid range: above 0 and below 1,000,000 ms.
    #[error("batch size {batch}: invalid execution time {ms}; give milliseconds above 0 and below 1000000")]
    NotATime {
        /// The batch size in rows.
        batch: u32,
        /// The time in ms.
        ms: f64,
    },
}

/// The upper bound of an execution time in a table, in ms.
const MAX_MS: f64 = 1e6;

/// The assumed duration of a kernel, in s, for models whose kernels were not counted. The kernels of
/// ten models on an H200 took 3 to 13 µs on average, in batches of one row on all SMs.
const KERNEL_S: f64 = 5e-6;

/// The maximum time that a table returns, in ms. This is about eleven days, which is short enough that
/// sums and products in nanoseconds do not overflow.
const LONGEST_MS: f64 = 1e9;

impl Execution {
    /// Returns all faults of a table with these columns and rows. The rows may be in any order.
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

    /// Returns the table with these columns and rows. The rows may be in any order.
    ///
    /// # Errors
    ///
    /// Returns the first of the table's [faults](Self::faults).
    pub fn new(sms: Vec<Sms>, mut rows: Vec<ExecutionRow>) -> Result<Self, TableError> {
        rows.sort_by_key(|row| row.batch);
        match Self::faults(&sms, &rows).into_iter().next() {
            Some(bad) => Err(bad),
            None => Ok(Self { sms, rows, kernels: None }),
        }
    }

    /// Sets the number of kernels that a batch launches. This number is the same for all batch sizes.
    #[must_use]
    pub fn with_kernels(mut self, kernels: u32) -> Self {
        self.kernels = Some(kernels);
        self
    }

    /// Returns the number of kernels that a batch launches, at least 1. If the kernels were not
    /// counted, estimates the number: the time of a batch of one row on the largest SM count, divided
    /// by the usual duration of a kernel (5 µs).
    pub fn kernels(&self) -> f64 {
        let widest = self.sms.last().map_or(1.0, |sms| f64::from(sms.0));
        let usual = || self.ms(1, widest) / 1e3 / KERNEL_S;
        self.kernels.map_or_else(usual, f64::from).max(1.0)
    }

    /// Returns the execution time of a batch of `batch` rows on `sms` SMs. Under contention, the number
    /// of SMs can be a fraction. The function interpolates linearly between the points of the table,
    /// with these rules outside the table:
    ///
    /// * Below the first SM count, the time is inversely proportional to the number of SMs.
    /// * Above the last SM count, the time stays constant.
    /// * Batches smaller than the first row take as long as the first row.
    /// * Above the last batch size, the time is proportional to the batch size, up to 10⁹ ms.
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
            // The minimum of a thousandth of an SM keeps the result finite if no SMs are left.
            return row.ms[0] * column(0) / sms.max(1e-3);
        }
        let part = (sms - column(above - 1)) / (column(above) - column(above - 1));
        lerp(row.ms[above - 1], row.ms[above], part)
    }

    /// Returns the minimum work of a batch in SM·s. This is the smallest product of SM count and time
    /// over the columns of the table.
    pub fn work(&self, batch: u32) -> f64 {
        let columns = self.sms.iter().map(|sms| f64::from(sms.0));
        columns.map(|sms| sms * self.ms(batch, sms) / 1e3).fold(f64::INFINITY, f64::min)
    }

    /// Returns the SM counts in ascending order, at least one.
    pub fn sms(&self) -> &[Sms] {
        &self.sms
    }

    /// Returns the rows by ascending batch size, at least one.
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
    fn sums_of_times_far_from_the_table_do_not_overflow() {
        let slow = ExecutionRow { batch: 1, ms: vec![999_999.0] };
        let table = Execution::new(vec![Sms(1_000_000)], vec![slow]).unwrap();
        assert!(table.time(u32::MAX, 0.0).as_nanos() < u128::from(u64::MAX / 10_000));
    }

    #[test]
    fn faulty_tables_are_refused() {
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
