//! The page and the JSON file of the comparison.

use serde::Serialize;
use serde_json::json;

use crate::machine::HostInfo;
use crate::report::{Report, number, spread, table, verdict};
use crate::spread::Spread;

use super::case::{CHANGE_CONNECTIONS, CaseWork, LiveChange, Side};
use super::comparisons::ComparisonResult;
use super::many_models::{self, ManyModelsResult};
use super::results::{CaseResult, ChangeResult};
use super::{CaseRounds, VsTritonOptions};

/// The versions of the measured software.
#[derive(Debug, Serialize)]
pub(crate) struct Versions {
    pub(crate) ours: String,
    pub(crate) triton: String,
    pub(crate) onnxruntime: String,
    pub(crate) triton_onnxruntime: String,
    /// The versions of Python and its packages, as Triton's Python client reports them.
    pub(crate) python: String,
}

/// Returns the figures of all rounds.
pub(crate) fn figures(
    options: &VsTritonOptions,
    versions: &Versions,
    compared: &[ComparisonResult],
    trials: &[CaseRounds],
    many: &[ManyModelsResult],
) -> serde_json::Value {
    let trials: Vec<_> =
        trials.iter().map(|trial| json!({"case": trial.case, "rounds": trial.rounds})).collect();
    json!({
        "machine": HostInfo::here(), "versions": versions, "seconds_per_round": options.seconds.as_secs_f64(),
        "rounds": options.rounds, "compared": compared, "cases": trials,
        "many_models": {"seconds": options.many_seconds.as_secs_f64(), "loads": many},
    })
}

pub(crate) fn report(
    options: &VsTritonOptions,
    versions: &Versions,
    compared: &[ComparisonResult],
    trials: &[CaseRounds],
    many: &[ManyModelsResult],
) -> Report {
    let mut results = vec![("Summary", summary(compared)), ("Changes", changes(trials))];
    if !many.is_empty() {
        let section = many_models::section(many, options.many_seconds.as_secs_f64());
        results.push(("More models than fit", section));
    }
    results.push(("Rounds", quiet(trials)));
    let results: Vec<_> = results.into_iter().map(|(title, text)| format!("## {title}\n\n{text}")).collect();
    Report {
        title: "Comparison with NVIDIA Triton",
        about: "`make vs-triton` starts shadowslice and Triton on one machine, sends the same requests to both in \
                turn, and writes this page; do not\nedit it. The figures of all rounds are in \
                [vs-triton.json](vs-triton.json)."
            .to_owned(),
        processes: "both servers and the load generator",
        method: method(options, versions),
        results: results.join("\n"),
    }
}

fn method(options: &VsTritonOptions, versions: &Versions) -> String {
    let Versions { ours, triton, onnxruntime, triton_onnxruntime, python } = versions;
    let (rounds, seconds) = (options.rounds, options.seconds.as_secs_f64());
    format!(
        "\
shadowslice {ours} with ONNX Runtime {onnxruntime}; Triton {triton} with ONNX Runtime {triton_onnxruntime}; {python}.

**Triton runs its Python backend**, because PyPI offers no other one. Its `model.py` calls ONNX Runtime from Python, in one stub process
for each model. Results with Triton's C++ backend for ONNX Runtime would differ. Both servers use the same file, a model that returns
its input, on one CPU thread, in batches of up to 32 rows without a delay (dynamic batching is on). The model costs almost nothing, so
the figures show the cost of the servers.

A figure is the median of {rounds} rounds of {seconds} s, with the smallest and the largest in brackets. `x` is shadowslice's median divided by
Triton's. The cases take turns, in reverse order every other time. A round is quiet if other programs used at most 10 % of the machine.
Only rounds that were quiet for both servers count, or all rounds if there are none (see *Rounds*).

* Clients are closed loops: each connection sends a request, waits for its answer, compares every byte, and sends the next. The
  load generator is that of `make bench`. It uses the same cores as the servers, so its CPU time also limits the requests per second.
* Requests go over TCP on the loop-back device, unless the row names another transport. Triton supports no Unix sockets.
* Requests and answers are binary FP32 tensors of 64 bytes or 600 kB.
* Server CPU is the user and system time of all of a server's processes: supervisor and workers, or `tritonserver` and stubs.
* *Live update*: {CHANGE_CONNECTIONS} connections send requests over HTTP and TCP while the model is reloaded by the repository extension or resized.
  Triton ignores a load without changes, so each load changes a parameter. All requests count that ended between the start of the
  change and {seconds} s after its end.
* *Killed worker*: the same, with a SIGKILL to shadowslice's worker or to the stub of Triton's Python backend, for {seconds} s. A client that fails
  retries after 10 ms on a new connection. If the model doesn't answer at the end of the round, it is reloaded for the next one."
    )
}

pub(crate) fn summary(compared: &[ComparisonResult]) -> String {
    let row = |it: &ComparisonResult| {
        let ratio = it.ratio.map_or("-".to_owned(), |ratio| number(ratio, if ratio < 0.1 { 3 } else { 2 }));
        vec![
            it.what.to_owned(),
            it.figure.name().to_owned(),
            shown(it.ours),
            shown(it.triton),
            ratio,
            it.target.clone(),
            it.met.map_or("", verdict).to_owned(),
        ]
    };
    table(&["", "figure", "shadowslice", "Triton", "x", "target", ""], compared.iter().map(row))
}

/// Returns the table with the details of each change, such as its duration and its first failure.
fn changes(trials: &[CaseRounds]) -> String {
    let rows = trials.iter().filter_map(|trial| {
        let CaseWork::Change(change) = trial.case.what else { return None };
        let rounds: Vec<&ChangeResult> = trial.rounds.iter().filter_map(aftermath).collect();
        let serves = rounds.iter().filter(|after| after.serves).count();
        let took = Spread::of(rounds.iter().map(|after| after.change_ms));
        let first = rounds.iter().find_map(|after| after.first_failure.clone());
        Some(vec![
            match trial.case.side {
                Side::Ours => "shadowslice".to_owned(),
                Side::Triton => "Triton".to_owned(),
            },
            match change {
                LiveChange::Load => "loaded".to_owned(),
                LiveChange::Resize => "resized".to_owned(),
                LiveChange::Kill => "worker killed".to_owned(),
            },
            if change == LiveChange::Kill { String::new() } else { shown(took) },
            shown(Spread::of(rounds.iter().map(|after| after.answered as f64))),
            format!("{serves} of {}", rounds.len()),
            first.unwrap_or_default().replace('|', "/").replace('\n', " "),
        ])
    });
    let heads =
        ["", "", "change took, ms", "answered requests", "answers at the end of the round", "first failure"];
    table(&heads, rows)
}

fn aftermath(measured: &CaseResult) -> Option<&ChangeResult> {
    match measured {
        CaseResult::Change(after) => Some(after),
        CaseResult::Load(_) | CaseResult::Python(_) => None,
    }
}

/// Returns the table with the CPU time that other programs used during each case.
fn quiet(trials: &[CaseRounds]) -> String {
    let rows = trials.iter().filter_map(|trial| {
        let others: Vec<f64> = trial
            .rounds
            .iter()
            .filter_map(|round| match round {
                CaseResult::Load(round) => Some(round.others_percent),
                CaseResult::Python(_) | CaseResult::Change(_) => None,
            })
            .collect();
        let quiet = trial.rounds.iter().filter(|round| round.is_quiet()).count();
        (!others.is_empty()).then(|| {
            let others_percent = spread(Spread::of(others.iter().copied()), 0);
            vec![trial.case.to_string(), format!("{quiet} of {}", others.len()), others_percent]
        })
    });
    table(&["case", "quiet", "others %"], rows)
}

/// Formats a spread as text. Uses one decimal if the median is below 100 and the values differ.
fn shown(of: Spread) -> String {
    spread(of, usize::from(of.median < 100.0 && of.min < of.max))
}
