//! The comparison as a page, and as JSON.

use serde::Serialize;
use serde_json::json;
use shadowslice_benches::MeasureError;
use shadowslice_benches::machine::HostInfo;
use shadowslice_benches::spread::Spread;

use crate::case::{CHANGED_UNDER, CaseWork, LiveChange, Side};
use crate::comparisons::ComparisonResult;
use crate::results::{CaseResult, ChangeResult};
use crate::{CaseRounds, Options};

/// The versions of the measured software.
#[derive(Debug, Serialize)]
pub(crate) struct Versions {
    pub(crate) ours: String,
    pub(crate) triton: String,
    pub(crate) onnxruntime: String,
    pub(crate) triton_onnxruntime: String,
    /// Python's and its packages', as it says.
    pub(crate) python: String,
}

/// Everything that was found, round by round.
pub(crate) fn json(
    options: &Options,
    machine: &HostInfo,
    versions: &Versions,
    compared: &[ComparisonResult],
    trials: &[CaseRounds],
) -> Result<String, MeasureError> {
    let trials: Vec<_> =
        trials.iter().map(|trial| json!({"case": trial.case, "rounds": trial.rounds})).collect();
    let all = json!({
        "machine": machine, "versions": versions, "seconds_per_round": options.seconds.as_secs_f64(),
        "rounds": options.rounds, "compared": compared, "cases": trials,
    });
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

/// The whole page.
pub(crate) fn of(
    options: &Options,
    machine: &HostInfo,
    versions: &Versions,
    compared: &[ComparisonResult],
    trials: &[CaseRounds],
) -> String {
    let HostInfo { cpu, cores, kernel, date, commit, .. } = machine;
    let Versions { ours, triton, onnxruntime, triton_onnxruntime, python } = versions;
    let (rounds, seconds) = (options.rounds, options.seconds.as_secs_f64());
    format!(
        "# Beside NVIDIA Triton

`make vs-triton` starts this server and Triton on one machine, sends both the same requests in turns, and writes this page; nothing
here is written by hand. All rounds' figures are in [vs-triton.json](vs-triton.json).

{cpu}, {cores} cores that hold both servers and the load generator, Linux {kernel}, no GPU. {date}, commit {commit}.
shadowslice {ours} with ONNX Runtime {onnxruntime}; Triton {triton} with ONNX Runtime {triton_onnxruntime}; {python}.

**Which Triton this is.** The one that PyPI has: with its *Python backend*, whose `model.py` calls ONNX Runtime from Python, in one
stub process for each model. Triton's own C++ backend for ONNX Runtime is not to be had there; beside that one the figures would be others.
Both serve the same file, a model that answers with its input, on one thread of the CPU, in batches of up to 32 rows without a delay
(dynamic batching is on). So the model costs next to nothing, and what is left is what the servers cost.

## In short

{}
A figure is the median of {rounds} rounds of {seconds} s, with the smallest and the largest in brackets; `x` is our median over Triton's. The
cases take turns, every other time in reverse. Of a row's rounds those count in which others took at most 10 % of the machine on both
sides, or all where there were none (see *Rounds* below), so that a quiet round is never held against a disturbed one. Aims that are not met are shown as such.

## How it is measured

* Clients are closed loops: each connection sends a request, waits for its answer, compares every byte of it, and sends the next. The
  generator is that of `make bench`'s echo, on the same cores as the servers, so requests per second are bounded by what it takes, too.
* Both are asked over TCP on the loop-back device where the row says so. Triton has no Unix sockets; rows with ours over one say so.
* Requests are 64 bytes of FP32, or 600 kB, sent and answered as binary tensors.
* Server CPU is user and system time, as the kernel accounts it to all of a server's processes: supervisor and workers, `tritonserver` and stubs.
* *Live update*: {CHANGED_UNDER} connections over HTTP and TCP ask a model while it is loaded anew by the protocol's repository (Triton with another
  parameter in its configuration, since it would do nothing otherwise; ours is replaced in any case), or resized. Requests count that ended
  between the order and {seconds} s after it was in force.
* *Killed worker*: the same, with SIGKILL to our worker, or to the stub of Triton's Python backend; {seconds} s are looked at. A client that was
  refused asks again after 10 ms on a new connection. Where the model does not answer by itself at the end of that, it is loaded anew for the next round.

## Changes

{}
## Rounds

{}",
        table(compared),
        changes(trials),
        quiet(trials)
    )
}

/// All comparisons.
pub(crate) fn table(compared: &[ComparisonResult]) -> String {
    let row = |it: &ComparisonResult| {
        let met = match it.met {
            Some(true) => "met",
            Some(false) => "**not met**",
            None => "",
        };
        let ratio = it.ratio.map_or("-".to_owned(), |ratio| {
            let decimals = if ratio < 0.1 { 3 } else { 2 };
            format!("{ratio:.decimals$}")
        });
        vec![
            it.what.to_owned(),
            it.figure.name().to_owned(),
            shown(it.ours),
            shown(it.triton),
            ratio,
            it.aim.clone(),
            met.to_owned(),
        ]
    };
    lines(&["", "figure", "shadowslice", "Triton", "x", "aim", ""], compared.iter().map(row))
}

/// Further results of the changes.
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
    let heads = [
        "",
        "",
        "in force after, ms",
        "answered meanwhile",
        "answers at the end of the round",
        "the first failure",
    ];
    lines(&heads, rows)
}

fn aftermath(measured: &CaseResult) -> Option<&ChangeResult> {
    match measured {
        CaseResult::Change(after) => Some(after),
        CaseResult::Load(_) | CaseResult::Python(_) => None,
    }
}

/// How much of the machine other programs had.
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
            let spread = Spread::of(others.iter().copied());
            vec![trial.case.to_string(), format!("{quiet} of {}", others.len()), spread.whole()]
        })
    });
    lines(&["case", "quiet", "others %"], rows)
}

/// With a decimal where that says something.
fn shown(spread: Spread) -> String {
    if spread.min == spread.max {
        format!("{:.0}", spread.median)
    } else if spread.median < 100.0 {
        spread.tenths()
    } else {
        spread.whole()
    }
}

fn lines(heads: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let heads: Vec<String> = heads.iter().map(|&head| head.to_owned()).collect();
    let rule = vec!["---".to_owned(); heads.len()];
    let body: String = rows.map(|cells| line(&cells)).collect();
    line(&heads) + &line(&rule) + &body
}
