//! The text format of Prometheus, version 0.0.4.

/// What metrics are told of.
pub(super) trait Subject {
    /// Its own labels, as they are written.
    fn labels(&self) -> String;
}

/// A metric, and how it is read off its subject.
pub(super) struct Metric<S> {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// No backslash and no line end: it is written as it is.
    pub(super) help: &'static str,
    pub(super) samples: fn(&S) -> Vec<Sample>,
}

/// What may be done with a metric's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// One value of a metric.
pub(super) struct Sample {
    /// What follows the metric's name; empty but for histograms.
    pub(super) suffix: &'static str,
    /// Labels beyond the subject's own.
    pub(super) labels: Vec<(&'static str, String)>,
    pub(super) value: f64,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Writes one metric of all its subjects.
pub(super) fn write<S: Subject>(text: &mut String, metric: &Metric<S>, subjects: &[S]) {
    let Metric { name, kind, help, samples } = metric;
    text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {}\n", kind.name()));
    for subject in subjects {
        let own = subject.labels();
        for Sample { suffix, labels, value } in samples(subject) {
            let more: String = labels.iter().map(|(key, of)| format!(",{key}=\"{}\"", escaped(of))).collect();
            text.push_str(&format!("{name}{suffix}{{{own}{more}}} {value}\n"));
        }
    }
}

/// A label's value, between its quotes.
pub(super) fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}
