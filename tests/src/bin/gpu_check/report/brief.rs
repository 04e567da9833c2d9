//! The summary of a mix for a terminal, which has one line for each policy and span.

use std::fmt::Write;

use serde_json::Value;

use super::policies::{entries, of_all};

/// The columns of [`rows`], from left to right:
///
/// * the percentage of requests within the SLO, for all models and for those with the highest
///   priority: in the whole span, after its first 3 s, and in its first 3 s
/// * the percentage within the SLO that the supervisor counts, and the percentage of refused
///   requests
/// * the number of share changes
/// * the delay with which clients sent requests in ms (p99, maximum)
/// * the busy cores of the host and of the clients
/// * the used memory of the GPU, in MiB
const HEAD: &str = "policy                       span    all  first | 3 s on  first |  start  first | counted refused changes | \
                    late p99    max | cores clients |    MiB";

/// Formats all policies of a mix.
pub(crate) fn brief(mix: &str, policies: Option<&Value>) -> String {
    let rows = policies.into_iter().flat_map(entries).map(|(policy, spans)| rows(policy, Some(spans)));
    format!("{mix}\n{HEAD}\n{}", rows.collect::<String>())
}

/// Formats one policy of a mix. The columns `first` are for the models with the highest priority.
pub(crate) fn rows(policy: &str, spans: Option<&Value>) -> String {
    let mut text = String::new();
    for (n, span) in spans.and_then(Value::as_array).into_iter().flatten().enumerate() {
        let percent = |first: bool, part: &str, figure: &str| match of_all(span, first, part, figure) {
            none if none.is_nan() => "-".to_owned(),
            share => format!("{:.1}", 100.0 * share),
        };
        let [all, first] = [false, true].map(|first| percent(first, "", "within_slo"));
        let [then, then_first] = [false, true].map(|first| percent(first, "then", "within_slo"));
        let [start, start_first] = [false, true].map(|first| percent(first, "first", "within_slo"));
        let models = || entries(&span["models"]).map(|(_, of)| of);
        let sum = |figure: &str| models().filter_map(|of| of[figure].as_u64()).sum::<u64>();
        let late =
            |figure: &str| models().filter_map(|of| of["sent_late_ms"][figure].as_f64()).fold(0.0, f64::max);
        let refused = 100.0 * sum("refused") as f64 / sum("offered").max(1) as f64;
        let number = |key: &str| span[key].as_f64().unwrap_or(f64::NAN);
        writeln!(
            text,
            "{policy:28} {:4} {all:>6} {first:>6} | {then:>6} {then_first:>6} | {start:>6} {start_first:>6} | {:>7} {refused:7.1} {:7} | \
             {:8.1} {:6.1} | {:5.1} {:7.1} | {:>6}",
            n + 1,
            percent(false, "", "counted_within_slo"),
            sum("share_changes"),
            late("p99"),
            late("max"),
            number("host_cores"),
            number("client_cores"),
            span["gpu_memory_mib"].as_u64().map_or_else(String::new, |used| used.to_string()),
        )
        .expect("writing to a string cannot fail");
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_line_shows_the_first_priority_and_both_parts() {
        let model = |priority: u32, part: f64| {
            json!({"priority": priority, "offered": 100, "within_slo": part, "counted_within_slo": 1.0, "refused": 3,
                   "share_changes": 2, "sent_late_ms": {"p99": 0.5, "max": 2.0},
                   "first": {"offered": 30, "within_slo": 0.1}, "then": {"offered": 70, "within_slo": 0.9}})
        };
        let span = json!({"models": {"a": model(1, 1.0), "b": model(2, 0.5)}, "host_cores": 3.0, "client_cores": 1.0,
                          "gpu_memory_mib": 4000});
        let line = rows("adaptive", Some(&json!([span])));
        let words: Vec<&str> = line.split_whitespace().filter(|word| *word != "|").collect();
        let wanted = [
            "adaptive", "1", "75.0", "100.0", "90.0", "90.0", "10.0", "10.0", "100.0", "3.0", "4", "0.5",
            "2.0", "3.0", "1.0", "4000",
        ];
        assert_eq!(words, wanted);
        assert!(brief("mix", Some(&json!({"adaptive": [span]}))).contains("adaptive"));
    }
}
