//! The output of commands that send a request to the supervisor.

use shadowslice_shared::exit::{self, fail};

use super::{ControlReply, ControlRequest};
use crate::{figures, status};
use shadowslice_control::controller::HandoverReport;
use shadowslice_control::models::{ModelChange, ReloadReport};

/// Prints the reply to a request, as JSON if `json` is true. Returns the exit code.
pub fn show(request: &ControlRequest, reply: ControlReply, json: bool) -> u8 {
    match (request, reply) {
        (_, ControlReply::Status(status)) if json => print(&as_json(&status)),
        (_, ControlReply::Status(status)) => print(status::text(&status).trim_end()),
        (_, ControlReply::Plan(report)) if json => print(&as_json(&report)),
        (_, ControlReply::Plan(report)) => print(status::plan(&report).trim_end()),
        (_, ControlReply::Handover { report, held }) => {
            let printed =
                print(&if json { as_json(&report) } else { handover_text(&report) + held_suffix(held) });
            report.why.map_or(printed, |why| unchanged(&why))
        }
        (_, ControlReply::Unchanged { why, held }) if json => {
            print(&as_json(&serde_json::json!({"outcome": "unchanged", "why": why, "held": held})))
        }
        (_, ControlReply::Unchanged { why, held }) => print(&(why + held_suffix(held))),
        (_, ControlReply::Reloaded(report)) => {
            let printed = print(&if json { as_json(&report) } else { reload_text(&report) });
            match report.models.iter().filter(|model| model.why.is_some()).count() {
                0 => printed,
                failed => {
                    let why = format!(
                        "the supervisor could not apply {failed} of the changes; see the reasons above"
                    );
                    fail(&why, exit::REFUSED)
                }
            }
        }
        (ControlRequest::Move { model, .. }, ControlReply::Placed { gpu, news }) => {
            print(&format!("{model} {} on GPU {gpu}", if news { "is ready" } else { "was already" }))
        }
        (_, ControlReply::RolloutBegun { candidate, former }) => print(&format!(
            "version {candidate} of {} starts beside version {former}; see `shadowslice status`",
            model_of(request)
        )),
        (_, ControlReply::RolloutChanged { version, stage, took_ms }) => {
            print(&rollout_text(request, version, &stage, took_ms))
        }
        (_, ControlReply::Upgraded { pid }) => print(&format!("process {pid} has taken over")),
        (_, ControlReply::Faulty(faults)) => {
            exit::print_error(&faults);
            fail("the configuration has errors, so nothing changed", exit::CONFIG)
        }
        (ControlRequest::Hold { model, .. }, ControlReply::Held { held, news }) => {
            print(&held_text(model, held, news))
        }
        (ControlRequest::Drain { model, .. }, ControlReply::Drained { drained, news }) => {
            print(&drained_text(model.as_deref(), drained, news))
        }
        (ControlRequest::Sleep { model, .. }, ControlReply::Slept { asleep, news, took_ms }) => {
            print(&slept_text(model, asleep, news, took_ms))
        }
        (ControlRequest::Resize { .. }, ControlReply::Refused(why)) => unchanged(&why),
        (_, ControlReply::Refused(why)) => fail(&why, exit::REFUSED),
        (_, other) => unexpected(&other),
    }
}

/// Reports a reply that does not belong to the request. Returns the exit code.
fn unexpected(reply: &ControlReply) -> u8 {
    let why =
        "the supervisor sent an unexpected reply; use the `shadowslice` program that the supervisor runs";
    fail(&format!("{why} ({reply:?})"), exit::REFUSED)
}

fn model_of(request: &ControlRequest) -> &str {
    request.command().map_or("the model", |(_, model)| model)
}

fn rollout_text(request: &ControlRequest, version: u32, stage: &str, took_ms: f64) -> String {
    let model = model_of(request);
    match request {
        ControlRequest::Rollback { .. } => {
            format!("version {version} of {model} answers all requests, after {} ms", figures::ms(took_ms))
        }
        _ => format!("version {version} of {model}: {stage}"),
    }
}

fn held_text(model: &str, held: bool, news: bool) -> String {
    let how = if news { "is" } else { "was already" };
    let state = match held {
        true => "held: no policy changes its share",
        false => "released: the policy may change its share",
    };
    format!("{model} {how} {state}")
}

fn drained_text(model: Option<&str>, drained: bool, news: bool) -> String {
    let name = model.unwrap_or("the host");
    let how = if news { "is" } else { "was already" };
    let state = match drained {
        true => "drained: requests are still served, but health checks report not ready",
        false => "undrained",
    };
    format!("{name} {how} {state}")
}

fn slept_text(model: &str, asleep: bool, news: bool, took_ms: Option<f64>) -> String {
    let how = if news { "is" } else { "was already" };
    let state = if asleep { "asleep: its next request wakes it" } else { "awake" };
    let took = took_ms.filter(|_| news).map(|took| format!(", after {} ms", figures::ms(took)));
    format!("{model} {how} {state}{}", took.unwrap_or_default())
}

/// Reports that a share was not changed. Returns the exit code.
fn unchanged(why: &str) -> u8 {
    fail(&format!("the share was not changed: {why}"), exit::REFUSED)
}

fn held_suffix(held: bool) -> &'static str {
    if held { "; held until `shadowslice release`" } else { "" }
}

/// Returns a line for each model that changes, and a summary.
fn reload_text(report: &ReloadReport) -> String {
    let line = |model: &ModelChange| {
        let ModelChange { name, change, keys, why } = model;
        let keys = if keys.is_empty() { String::new() } else { format!(" ({})", keys.join(", ")) };
        let how = why.as_ref().map(|why| format!(", but not applied: {why}")).unwrap_or_default();
        format!("{name}: {change}{keys}{how}\n")
    };
    let settings = report.settings.iter().map(|key| format!("{key}: changed\n"));
    let lines: String = report.models.iter().map(line).chain(settings).collect();
    format!(
        "{lines}{}: {} changed, {} unchanged",
        report.file.display(),
        report.models.len(),
        report.unchanged
    )
}

fn handover_text(report: &HandoverReport) -> String {
    let HandoverReport { outcome, from_percent, from_sms, to_percent, to_sms, stall_us, .. } = report;
    let effect = report
        .effect_ms
        .map(|ms| format!(", first batch at the new share after {}", figures::span(ms / 1e3)));
    format!(
        "{outcome}: {from_percent}% ({from_sms} SMs) -> {to_percent}% ({to_sms} SMs){}, longest stall {}",
        effect.unwrap_or_default(),
        figures::span(stall_us / 1e6)
    )
}

fn as_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
}

fn print(text: &str) -> u8 {
    exit::print(&format!("{text}\n"))
}
