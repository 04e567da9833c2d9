//! The text format of Prometheus, version 0.0.4.

/// A metric, and how it is read off its subject.
pub(super) struct Metric<S> {
    pub(super) name: &'static str,
    pub(super) kind: MetricType,
    /// No backslash and no line end: it is written as it is.
    pub(super) help: &'static str,
    pub(super) samples: fn(&S) -> Vec<Sample>,
}

/// The kind of a metric's values, which says what may be done with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MetricType {
    Counter,
    Gauge,
    Histogram,
}

/// One value of a metric.
pub(super) struct Sample {
    /// The text after the metric's name; empty except for histograms.
    pub(super) suffix: &'static str,
    /// Labels beyond the subject's own, of subjects that have some.
    pub(super) labels: Vec<(&'static str, String)>,
    pub(super) value: f64,
}

impl MetricType {
    fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Writes metrics of all their subjects; `labels` gives a subject's own labels, if it has any.
pub(super) fn write_all<S>(
    text: &mut String,
    metrics: &[Metric<S>],
    subjects: &[S],
    labels: fn(&S) -> String,
) {
    for metric in metrics {
        write(text, metric, subjects, labels);
    }
}

fn write<S>(text: &mut String, metric: &Metric<S>, subjects: &[S], labels: fn(&S) -> String) {
    let Metric { name, kind, help, samples } = metric;
    text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {}\n", kind.name()));
    for subject in subjects {
        let own = labels(subject);
        for Sample { suffix, labels, value } in samples(subject) {
            let more: String = labels.iter().map(|(key, of)| format!(",{key}=\"{}\"", escaped(of))).collect();
            let braced = if own.is_empty() { String::new() } else { format!("{{{own}{more}}}") };
            text.push_str(&format!("{name}{suffix}{braced} {value}\n"));
        }
    }
}

/// A label's value, between its quotes.
pub(super) fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}
