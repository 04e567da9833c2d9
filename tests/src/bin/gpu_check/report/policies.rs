//! Policies side by side: a table a scenario.

use std::fmt::Write;

use serde_json::Value;

use super::table::{Table, cell};

const HEADS: [&str; 10] = [
    "policy, span",
    "model",
    "requests/s",
    "p50 ms",
    "p90 ms",
    "p99 ms",
    "within the SLO %",
    "as the supervisor counts %",
    "refused or failed",
    "share % at its end",
];

/// All scenarios.
pub(super) fn policies(figures: &Value) -> String {
    let mut text = String::new();
    for (scenario, policies) in entries(&figures["policies"]) {
        let mut table = Table::new(&HEADS);
        for (policy, spans) in entries(policies) {
            for (n, span) in spans.as_array().into_iter().flatten().enumerate() {
                for (model, of) in entries(&span["models"]) {
                    let name = format!("{policy}, {}: {} s", n + 1, cell(&span["seconds"]));
                    table.row(&name, row(model, of));
                }
            }
        }
        write!(text, "### {scenario}\n\n{}\n", table.text()).expect("a string takes everything");
    }
    text
}

fn row(model: &str, of: &Value) -> impl Iterator<Item = String> {
    let failed: u64 = entries(&of["failed"]).filter_map(|(_, count)| count.as_u64()).sum();
    let percent =
        |key: &str| of[key].as_f64().map_or_else(|| "-".into(), |part| format!("{:.1}", part * 100.0));
    let plain = |key: &str| cell(&of[key]);
    [
        model.to_owned(),
        plain("answered_per_s"),
        plain("p50_ms"),
        plain("p90_ms"),
        plain("p99_ms"),
        percent("within_slo"),
        percent("counted_within_slo"),
        failed.to_string(),
        plain("share_percent"),
    ]
    .into_iter()
}

fn entries(map: &Value) -> impl Iterator<Item = (&str, &Value)> {
    map.as_object().into_iter().flatten().map(|(key, value)| (key.as_str(), value))
}
