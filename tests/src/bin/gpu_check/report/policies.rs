//! The sections of the page about policies, which have a table for each mix.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;

use super::table::{Table, cell};
use crate::numbers::mean;
use crate::policies::ROUND;

const HEADS: [&str; 10] = [
    "policy, span",
    "model",
    "requests/s",
    "p50 ms",
    "p90 ms",
    "p99 ms",
    "within SLO %",
    "supervisor's count %",
    "refused or failed",
    "share % at the end",
];

/// Renders the section of the stage `policies`.
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
        write!(text, "### {scenario}\n\n{}\n{}", table.text(), means(policies))
            .expect("writing to a string cannot fail");
    }
    text
}

/// Renders the section of the stage `mixes`, which has a summary of each span and a table of all
/// models.
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
                    let (within, counted) = (percent(&of["within_slo"]), percent(&of["counted_within_slo"]));
                    format!("{within} ({counted}), {}, {}", cell(&of["p50_ms"]), cell(&of["p99_ms"]))
                });
                let cells = std::iter::once(format!("{:.0}", together / seconds)).chain(parts);
                table.row(&format!("{policy}, {}", n + 1), cells);
            }
        }
        let brief = super::brief(mix, Some(policies));
        write!(text, "### {mix}\n\n```text\n{brief}```\n\n{}\n{}", table.text(), means(policies))
            .expect("writing to a string cannot fail");
    }
    text
}

/// Averages a figure over the models of a span, weighted by the number of requests. If `first` is
/// true, includes only the models with the highest priority. If `part` is not empty, uses only that
/// part of the span.
pub(super) fn of_all(span: &Value, first: bool, part: &str, figure: &str) -> f64 {
    let models = || entries(&span["models"]).map(|(_, of)| of);
    let highest = models().filter_map(|of| of["priority"].as_u64()).min();
    let (mut offered, mut within) = (0.0, 0.0);
    for of in models().filter(|of| !first || of["priority"].as_u64() == highest) {
        let of = if part.is_empty() { of } else { &of[part] };
        let came = of["offered"].as_f64().unwrap_or(0.0);
        offered += came;
        within += came * of[figure].as_f64().unwrap_or(0.0);
    }
    within / offered
}

/// Renders the mean fraction of requests within the SLO, for policies that ran more than once.
fn means(policies: &Value) -> String {
    let mut runs: BTreeMap<&str, Vec<&Value>> = BTreeMap::new();
    for (name, spans) in entries(policies) {
        let policy = name.split_once(ROUND).map_or(name, |(policy, _)| policy);
        runs.entry(policy).or_default().push(spans);
    }
    runs.retain(|_, runs| runs.len() > 1);
    if runs.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&["policy", "runs", "within SLO %", "supervisor's count %"]);
    for (policy, runs) in &runs {
        let mean = |figure: &str| {
            let parts: Vec<f64> = runs.iter().map(|spans| part_of_all(spans, figure) * 100.0).collect();
            mean(&parts).map_or_else(|| "-".into(), |(mean, error)| format!("{mean:.1} ± {:.1}", 2.0 * error))
        };
        table.row(
            policy,
            [runs.len().to_string(), mean("within_slo"), mean("counted_within_slo")].into_iter(),
        );
    }
    format!("All models and spans together, ± two standard errors of the mean:\n\n{}\n", table.text())
}

/// Averages a figure over all models and spans, weighted by the number of requests.
fn part_of_all(spans: &Value, figure: &str) -> f64 {
    let models = spans.as_array().into_iter().flatten().flat_map(|span| entries(&span["models"]));
    let (mut offered, mut within) = (0.0, 0.0);
    for (_, of) in models {
        let came = of["offered"].as_f64().unwrap_or(0.0);
        offered += came;
        within += came * of[figure].as_f64().unwrap_or(0.0);
    }
    within / f64::max(offered, 1.0)
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

pub(super) fn entries(map: &Value) -> impl Iterator<Item = (&str, &Value)> {
    map.as_object().into_iter().flatten().map(|(key, value)| (key.as_str(), value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn policies_that_ran_more_than_once_have_a_mean() {
        let run = |parts: [f64; 2]| {
            let model = |part: f64, offered: u32| json!({"offered": offered, "within_slo": part, "counted_within_slo": 1.0});
            json!([{"models": {"a": model(parts[0], 100), "b": model(parts[1], 300)}}])
        };
        let once = json!({"half": run([0.5, 0.5])});
        assert_eq!(means(&once), "");
        let twice = json!({"adaptive": run([1.0, 1.0]), "adaptive, round 2": run([1.0, 0.6]), "half": run([0.5, 0.5])});
        let table = means(&twice);
        assert!(
            table.contains("| adaptive | 2 | 85.0 ± 30.0 | 100.0 ± 0.0 |") && !table.contains("half"),
            "{table}"
        );
    }
}
