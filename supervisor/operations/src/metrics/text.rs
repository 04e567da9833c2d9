//! The text format of Prometheus, version 0.0.4.

/// A metric, and how it is read off its subject.
pub(super) struct Metric<S> {
    pub(super) name: &'static str,
    pub(super) kind: &'static str,
    /// No backslash and no line end: it is written as it is.
    pub(super) help: &'static str,
    pub(super) samples: fn(&S) -> Vec<Sample>,
}

/// A metric that only grows.
pub(super) const fn counter<S>(
    name: &'static str,
    help: &'static str,
    samples: fn(&S) -> Vec<Sample>,
) -> Metric<S> {
    Metric { name, kind: "counter", help, samples }
}

/// A metric that goes up and down.
pub(super) const fn gauge<S>(
    name: &'static str,
    help: &'static str,
    samples: fn(&S) -> Vec<Sample>,
) -> Metric<S> {
    Metric { name, kind: "gauge", help, samples }
}

/// A metric in buckets.
pub(super) const fn histogram<S>(
    name: &'static str,
    help: &'static str,
    samples: fn(&S) -> Vec<Sample>,
) -> Metric<S> {
    Metric { name, kind: "histogram", help, samples }
}

/// One value of a metric.
pub(super) struct Sample {
    /// The text after the metric's name; empty except for histograms.
    pub(super) suffix: &'static str,
    /// Labels beyond the subject's own, of subjects that have some.
    pub(super) labels: Vec<(&'static str, String)>,
    pub(super) value: f64,
}

/// Writes metrics of all their subjects; `labels` gives a subject's own labels, if it has any.
pub(super) fn write_all<S>(
    text: &mut String,
    metrics: &[Metric<S>],
    subjects: &[S],
    labels: fn(&S) -> String,
) {
    for Metric { name, kind, help, samples } in metrics {
        text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        for subject in subjects {
            let own = labels(subject);
            for Sample { suffix, labels, value } in samples(subject) {
                let more: String =
                    labels.iter().map(|(key, of)| format!(",{key}=\"{}\"", escaped(of))).collect();
                let braced = if own.is_empty() { String::new() } else { format!("{{{own}{more}}}") };
                text.push_str(&format!("{name}{suffix}{braced} {value}\n"));
            }
        }
    }
}

/// A label's value, between its quotes.
pub(super) fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}
