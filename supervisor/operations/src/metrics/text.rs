//! Writes the Prometheus text format, version 0.0.4.

/// A metric: its description, and the function that returns the samples of a subject `S`.
pub(super) struct Metric<S> {
    pub(super) name: &'static str,
    pub(super) kind: &'static str,
    /// The help text. It must not contain a backslash or a line break, because it is written
    /// without escapes.
    pub(super) help: &'static str,
    pub(super) samples: fn(&S) -> Vec<MetricSample>,
}

/// Defines the functions that define a metric of each kind. A summary has a sum and a count, but no
/// quantiles.
macro_rules! kinds {
    ($($kind:ident),*) => {$(
        pub(super) const fn $kind<S>(
            name: &'static str,
            help: &'static str,
            samples: fn(&S) -> Vec<MetricSample>,
        ) -> Metric<S> {
            Metric { name, kind: stringify!($kind), help, samples }
        }
    )*};
}

kinds!(counter, gauge, histogram, summary);

pub(super) struct MetricSample {
    /// The text after the metric's name. It is empty except for histograms and summaries.
    pub(super) suffix: &'static str,
    pub(super) labels: Vec<(&'static str, String)>,
    pub(super) value: f64,
}

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
            for MetricSample { suffix, labels, value } in samples(subject) {
                let more = labels.iter().map(|(key, of)| format!("{key}=\"{}\"", escaped(of)));
                let all: Vec<String> =
                    Some(own.clone()).filter(|own| !own.is_empty()).into_iter().chain(more).collect();
                let braced = if all.is_empty() { String::new() } else { format!("{{{}}}", all.join(",")) };
                text.push_str(&format!("{name}{suffix}{braced} {value}\n"));
            }
        }
    }
}

pub(super) fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}
