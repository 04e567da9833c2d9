//! The section of the page about contention.

use serde_json::Value;

use super::table::{Table, cell};

/// The headings of the table, and the keys of its figures.
const COLUMNS: [(&str, &str); 8] = [
    ("neighbour's share", "others_share"),
    ("rows", "rows"),
    ("neighbour's rows", "others_rows"),
    ("alone", "alone_ms"),
    ("mean", "mean_ms"),
    ("p99", "p99_ms"),
    ("neighbour's batches/s", "others_batches_per_s"),
    ("its execution, ms", "others_execution_ms"),
];

pub(super) fn show(figures: &Value) -> String {
    let mut text = String::new();
    for (pair, rows) in figures["contention"].as_object().into_iter().flatten() {
        let title = format!("{pair}: share");
        let heads: Vec<&str> = [title.as_str()].into_iter().chain(COLUMNS.map(|(head, _)| head)).collect();
        let mut table = Table::new(&heads);
        for row in rows.as_array().into_iter().flatten() {
            table.row(&cell(&row["share"]), COLUMNS.iter().map(|(_, figure)| cell(&row[*figure])));
        }
        text.push_str(&table.text());
        text.push('\n');
    }
    text
}
