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

/// The same with a line a span: what all models together had answered within their SLOs, and what part each.
pub(super) fn mixes(figures: &Value) -> String {
    let mut text = String::new();
    for (mix, policies) in entries(&figures["mixes"]) {
        let first = entries(policies).next().map_or(&Value::Null, |(_, spans)| &spans[0]["models"]);
        let models: Vec<&str> = entries(first).map(|(model, _)| model).collect();
        let mut table = Table::new(&[&["policy, span", "within SLO/s"][..], &models].concat());
        for (policy, spans) in entries(policies) {
            for (n, span) in spans.as_array().into_iter().flatten().enumerate() {
                let seconds = span["seconds"].as_f64().unwrap_or(f64::NAN);
                let of = |model: &&str| &span["models"][*model];
                let within = |of: &Value| {
                    of["within_slo"].as_f64().unwrap_or(0.0) * of["offered"].as_f64().unwrap_or(0.0)
                };
                let together: f64 = models.iter().map(of).map(within).sum();
                let parts = models.iter().map(of).map(|of| {
                    format!("{} ({})", percent(&of["within_slo"]), percent(&of["counted_within_slo"]))
                });
                let cells = std::iter::once(format!("{:.0}", together / seconds)).chain(parts);
                table.row(&format!("{policy}, {}", n + 1), cells);
            }
        }
        write!(text, "### {mix}\n\n{}\n", table.text()).expect("a string takes everything");
    }
    text
}

fn percent(part: &Value) -> String {
    part.as_f64().map_or_else(|| "-".into(), |part| format!("{:.1}", part * 100.0))
}

fn row(model: &str, of: &Value) -> impl Iterator<Item = String> {
    let failed: u64 = entries(&of["failed"]).filter_map(|(_, count)| count.as_u64()).sum();
    let plain = |key: &str| cell(&of[key]);
    [
        model.to_owned(),
        plain("answered_per_s"),
        plain("p50_ms"),
        plain("p90_ms"),
        plain("p99_ms"),
        percent(&of["within_slo"]),
        percent(&of["counted_within_slo"]),
        failed.to_string(),
        plain("share_percent"),
    ]
    .into_iter()
}

fn entries(map: &Value) -> impl Iterator<Item = (&str, &Value)> {
    map.as_object().into_iter().flatten().map(|(key, value)| (key.as_str(), value))
}
