//! The section of the page about more models than fit.

use std::fmt;

use crate::report::{number, table};

use super::client::REQUEST_TIMEOUT;
use super::plan::MODELS;
use super::results::{DurationSummary, ManyModelsResult};
use super::servers::{
    AWAKE, CONTEXT_MIB, LOADED, MEMORY_MIB, REST_MIB, SESSION_TIME, TritonBackend, WEIGHTS_MIB, copy_time,
};

/// Returns the method and the table.
pub(crate) fn section(results: &[ManyModelsResult], seconds: f64) -> String {
    format!("{}\n\n{}", method(seconds), rows(results))
}

fn method(seconds: f64) -> String {
    let (copy, session) = (copy_time().as_secs_f64() * 1e3, SESSION_TIME.as_millis());
    let timeout = REQUEST_TIMEOUT.as_secs();
    format!(
        "\
{MODELS} models get requests for {seconds} s, with random arrivals in an open loop. The models follow
Zipf's law (exponent 1), and every server gets the same requests. The GPU is emulated and has
{MEMORY_MIB} MiB. A model needs {WEIGHTS_MIB} MiB for its weights and {REST_MIB} MiB more, and a server needs
{CONTEXT_MIB} MiB for its CUDA context.

* shadowslice keeps all models in one shared worker (`sleep: on-pressure`), in which {AWAKE} are awake. A
  wake contains {copy:.1} ms for the copy of the weights, which is emulated. The {REST_MIB} MiB of models
  that sleep stay on the GPU.
* Triton has no sleep. Before its client asks a model that is not on the GPU, it unloads the least
  recently used model and loads the other one. {LOADED} models fit, because an unloaded model leaves nothing
  on the GPU. Loads run in parallel, and the client doesn't wait until memory is free.
* *Minimal backend, copy*: the load of `benches/rivals/minimal_backend.c` waits for the time of the
  copy. All other time is Triton's own. Every real backend takes longer.
* *Minimal backend, copy and session*: the load waits {session} ms longer. ONNX Runtime takes this time to
  make a session of ResNet-50 (97 MiB) on one core. The wait uses no CPU time.
* *Python backend*: the load starts a process with `model.py`, which imports ONNX Runtime. Nothing is
  emulated.

All models return their input. A model is *absent* if it was not on the GPU when the request arrived.
For shadowslice, the client computes this from the order of the requests. If the number of wakes, which
the supervisor counts, is that of the absent answers, the client is right. *Lost* requests have no right
answer within {timeout} s. `x` is shadowslice's figure divided by the figure of the row."
    )
}

fn rows(results: &[ManyModelsResult]) -> String {
    let heads = [
        "requests/s",
        "server",
        "absent: answers",
        "p50, ms",
        "p99, ms",
        "x (p50, p99)",
        "present: answers",
        "p50, ms",
        "p99, ms",
        "x (p50, p99)",
        "lost",
        "loads or wakes",
        "mean, ms",
        "sent late, p99 and max, ms",
        "first failure",
    ];
    let mut sorted: Vec<&ManyModelsResult> = results.iter().collect();
    // The sort is stable, so shadowslice stays the first server of each load.
    sorted.sort_by(|one, next| one.per_second.total_cmp(&next.per_second));
    let row = |it: &&ManyModelsResult| {
        let ours = sorted.iter().find(|ours| ours.per_second == it.per_second).unwrap_or(it);
        let mut cells = vec![number(it.per_second, 0), it.server.clone()];
        cells.extend(latency_cells(ours.absent, it.absent));
        cells.extend(latency_cells(ours.present, it.present));
        cells.extend([it.failed.to_string(), it.loads.to_string(), number(it.load_ms, 1)]);
        cells.push(format!("{:.1}, {:.1}", it.late.p99_ms, it.late.max_ms));
        cells.push(it.first_failure.clone().unwrap_or_default().replace('|', "/").replace('\n', " "));
        cells
    };
    table(&heads, sorted.iter().map(row))
}

/// Returns the cells of a server's latencies, with the ratios of shadowslice's to them.
fn latency_cells(ours: DurationSummary, theirs: DurationSummary) -> [String; 4] {
    let ratio = |ours: f64, theirs: f64| {
        if theirs > 0.0 {
            number(ours / theirs, if ours / theirs < 0.1 { 3 } else { 2 })
        } else {
            "-".to_owned()
        }
    };
    [
        theirs.count.to_string(),
        number(theirs.p50_ms, 1),
        number(theirs.p99_ms, 1),
        format!("{}, {}", ratio(ours.p50_ms, theirs.p50_ms), ratio(ours.p99_ms, theirs.p99_ms)),
    ]
}

impl fmt::Display for TritonBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Minimal(load) if *load < SESSION_TIME => "Triton, minimal backend, copy",
            Self::Minimal(_) => "Triton, minimal backend, copy and session",
            Self::Python => "Triton, Python backend",
        })
    }
}

impl fmt::Display for ManyModelsResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { server, per_second, absent, present, failed, loads, load_ms, late, .. } = self;
        write!(
            f,
            "{server}, {per_second}/s: absent {}: p50 {:.1} ms, p99 {:.1} ms; \
             present {}: p50 {:.1} ms, p99 {:.1} ms; {failed} lost; \
             {loads} loads or wakes of {load_ms:.1} ms; sent up to {:.1} ms late",
            absent.count,
            absent.p50_ms,
            absent.p99_ms,
            present.count,
            present.p50_ms,
            present.p99_ms,
            late.max_ms
        )
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::results::LoadFigures;
    use super::*;

    fn result(server: &str, per_second: f64, absent_ms: u64) -> ManyModelsResult {
        let mut figures = LoadFigures::default();
        figures.absent.record(Duration::from_millis(absent_ms));
        figures.result(server.to_owned(), per_second, None)
    }

    #[test]
    fn rows_are_compared_with_shadowslice_at_the_same_load() {
        let results = [
            result("ours", 1.0, 10),
            result("ours", 20.0, 40),
            result("theirs", 1.0, 1_000),
            result("theirs", 20.0, 80),
        ];
        let text = rows(&results);
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert!(lines[0].starts_with("| 1 | ours | 1 | 10.0 | 10.0 | 1.00, 1.00 | 0 |"), "{text}");
        assert!(lines[1].starts_with("| 1 | theirs | 1 | 1000.4 | 1000.4 | 0.010, 0.010 |"), "{text}");
        assert!(lines[3].starts_with("| 20 | theirs | 1 | 80.1 | 80.1 | 0.50, 0.50 | 0 |"), "{text}");
        assert!(lines[3].contains("| 0.0 | 0.0 | -, - |"), "no answers of models that were present: {text}");
    }
}
