//! Profiles in which a batch takes longer with more SMs, or with fewer rows: by mistake, or by bad
//! luck in measuring.

use std::collections::BTreeSet;
use std::fmt;

use shadowslice_shared::profile::{Execution, Row};
use shadowslice_shared::units::Sms;

/// Times that differ by less than this factor count as equal.
const NOISE: f64 = 1.05;

/// A time of a table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub(super) batch: u32,
    sms: Sms,
    ms: f64,
}

/// A time that is longer than a time that should be at least as long.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rise {
    pub(super) longer: Point,
    than: Point,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, sms, ms } = self;
        write!(f, "{ms} ms at batch size {batch} on {sms}")
    }
}

impl fmt::Display for Rise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} are more than {}", self.longer, self.than)
    }
}

impl Rise {
    fn factor(&self) -> f64 {
        self.longer.ms / self.than.ms
    }
}

/// The steepest rise, and how many times are too long.
pub(super) fn steepest(table: &Execution) -> Option<(Rise, usize)> {
    let rises: Vec<Rise> = lines(table).iter().flat_map(|line| rises(line)).collect();
    let steepest = rises.iter().max_by(|one, other| one.factor().total_cmp(&other.factor()))?;
    // A time may stand out in its row and in its column.
    let places: BTreeSet<(u32, Sms)> =
        rises.iter().map(|rise| (rise.longer.batch, rise.longer.sms)).collect();
    Some((*steepest, places.len()))
}

/// Times that should fall: of each batch size with ever more SMs, and on each number of SMs with ever fewer rows.
fn lines(table: &Execution) -> Vec<Vec<Point>> {
    let columns = || table.sms().iter().copied().enumerate();
    let point = |row: &Row, (column, sms): (usize, Sms)| Point { batch: row.batch, sms, ms: row.ms[column] };
    let of_row = |row: &Row| columns().map(|column| point(row, column)).collect();
    let of_column = |column| table.rows().iter().rev().map(|row| point(row, column)).collect();
    table.rows().iter().map(of_row).chain(columns().map(of_column)).collect()
}

/// The points that are above the least point before them.
fn rises(line: &[Point]) -> Vec<Rise> {
    let Some(mut least) = line.first().copied() else { return Vec::new() };
    let mut rises = Vec::new();
    for &point in line {
        if point.ms > least.ms * NOISE {
            rises.push(Rise { longer: point, than: least });
        } else if point.ms < least.ms {
            least = point;
        }
    }
    rises
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(rows: &[(u32, [f64; 3])]) -> Option<(String, usize)> {
        let rows = rows.iter().map(|&(batch, ms)| Row { batch, ms: ms.to_vec() }).collect();
        let table = Execution::new(vec![Sms(10), Sms(20), Sms(40)], rows).unwrap();
        steepest(&table).map(|(rise, count)| (rise.to_string(), count))
    }

    #[test]
    fn times_may_fall_stay_and_be_off_by_a_little() {
        assert_eq!(found(&[(1, [4.0, 2.0, 2.0]), (8, [30.0, 16.0, 9.0])]), None);
        assert_eq!(found(&[(1, [4.0, 2.0, 2.09]), (8, [3.9, 2.0, 2.0])]), None);
    }

    #[test]
    fn a_time_that_rises_with_sms_or_falls_with_rows_is_found() {
        let said = |said: &str, count| Some((said.to_owned(), count));
        let with_sms = "2.5 ms at batch size 1 on 40 SMs are more than 2 ms at batch size 1 on 20 SMs";
        assert_eq!(found(&[(1, [4.0, 2.0, 2.5]), (8, [30.0, 16.0, 9.0])]), said(with_sms, 1));
        let with_rows = "4 ms at batch size 1 on 10 SMs are more than 3 ms at batch size 8 on 10 SMs";
        assert_eq!(found(&[(1, [4.0, 2.0, 1.0]), (8, [3.0, 2.0, 1.0])]), said(with_rows, 1));
    }

    #[test]
    fn small_steps_add_up_and_the_steepest_of_all_is_said() {
        let steps = "2.16 ms at batch size 1 on 40 SMs are more than 2 ms at batch size 1 on 10 SMs";
        assert_eq!(found(&[(1, [2.0, 2.08, 2.16])]), Some((steps.to_owned(), 1)));
        let (worst, count) = found(&[(1, [2.0, 3.0, 2.5])]).unwrap();
        assert!(worst.starts_with("3 ms") && count == 2, "{worst} {count}");
    }
}
