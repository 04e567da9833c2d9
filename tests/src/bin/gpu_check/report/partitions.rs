//! The section of the page about shares that change inside the workers.

use serde_json::Value;

use super::table::{Table, cell};

/// The headings of a table of changes, and the JSON pointers to its figures.
const CHANGES: [(&str, &str); 9] = [
    ("changes", "/done"),
    ("in effect p50", "/in_force_ms/p50"),
    ("p99", "/in_force_ms/p99"),
    ("stall, us", "/stall_us/max"),
    ("requests", "/offered"),
    ("lost", "/lost"),
    ("wrong", "/wrong"),
    ("p99 ms", "/p99_ms"),
    ("twin's p99 ms", "/twin_p99_ms"),
];

pub(super) fn show(figures: &Value) -> String {
    let of = &figures["partitions"];
    let mut text = String::new();
    for (kind, title) in [("announced", "Partitions kept ready"), ("unannounced", "Partitions not ready")] {
        let heads: Vec<&str> = [title].into_iter().chain(CHANGES.map(|(head, _)| head)).collect();
        let mut table = Table::new(&heads);
        for (model, figures) in of[kind]["models"].as_object().into_iter().flatten() {
            let value = |path| figures.pointer(path).unwrap_or(&Value::Null);
            table.row(model, CHANGES.iter().map(|(_, path)| cell(value(path))));
        }
        text.push_str(&table.text());
        text.push('\n');
    }
    let mut table =
        Table::new(&["mobilenet-v2 beside vgg19", "p50 ms", "p90 ms", "p99 ms", "neighbour's requests/s"]);
    for (place, figures) in of["isolation"].as_object().into_iter().flatten() {
        table.row(place, ["p50", "p90", "p99", "neighbours_rate"].iter().map(|part| cell(&figures[*part])));
    }
    text.push_str(&table.text());
    for (model, start) in of["starts"].as_object().into_iter().flatten() {
        if let Some(why) = start["no_partition"].as_str() {
            text.push_str(&format!("\n{model} cannot change its share inside the worker: {why}\n"));
        }
    }
    if let Some(why) = of["half_by_percentage"]["why"].as_str() {
        let model = cell(&of["half_by_percentage"]["model"]);
        text.push_str(&format!("\n{model} at 60 % by percentage is refused: {why}\n"));
    }
    text
}
