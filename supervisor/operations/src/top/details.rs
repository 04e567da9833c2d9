//! Formats the details of the selected model.

use super::snapshot::TopModel;
use crate::figures::{self, span};
use crate::status::table::wrapped;
use crate::status::{ModelStatus, WorkerStatus, change_text, latency, notes, plan_why, sleep_note};
use shadowslice_control::controller::Mechanism;

/// Returns the lines. The most important lines come first, because a small screen shows only the
/// first lines.
pub(super) fn lines(model: &TopModel, width: usize) -> Vec<String> {
    let status = &model.status;
    let mut lines = vec![head(model)];
    lines.extend(notes(status));
    if !runs_here(status) {
        return lines.iter().flat_map(|line| wrapped(line, width, 4)).collect();
    }
    lines.extend(sleep_note(status));
    lines.push(last_change(model));
    if let Some(plan) = &model.plan {
        lines.push(format!(
            "plan: the policy wants {}% ({}): {}",
            plan.wanted_percent,
            plan.verdict,
            plan_why(plan)
        ));
    }
    lines.push(requests(model));
    lines.extend(status.workers.iter().map(worker));
    lines.push(place(status));
    lines.extend(status.rollout.as_ref().map(|rollout| format!("rollout: {}", rollout.text())));
    lines.iter().flat_map(|line| wrapped(line, width, 4)).collect()
}

/// Returns true if the model is neither unloaded nor moved to the next supervisor.
fn runs_here(status: &ModelStatus) -> bool {
    status.mechanism != Mechanism::Absent
}

fn head(model: &TopModel) -> String {
    let status = &model.status;
    let slo = &status.slo;
    let age = if runs_here(status) { format!(" for {}", span(status.state_age_s)) } else { String::new() };
    let mut text = format!(
        "{} ({}) on GPU {}: {}{age}; SLO {} for {}%",
        status.name,
        model.key,
        status.gpu,
        crate::status::state(status),
        span(slo.latency_ms / 1e3),
        slo.percentile
    );
    if let Some(slack) = slo.slack {
        text.push_str(&format!(", slack {:.0}%", slack * 100.0));
    }
    if model.is_idle() && model.is_ready() {
        text.push_str("; idle");
    }
    if slo.slack.is_some() {
        let (p50, p99) = (latency(status, status.latency_ms.p50), latency(status, status.latency_ms.p99));
        text.push_str(&format!(
            "; over the last minutes p50 {p50} ms, p99 {p99} ms, {} in SLO",
            crate::status::in_slo(status)
        ));
    }
    text
}

/// Describes the last change of the share and its reason.
fn last_change(model: &TopModel) -> String {
    let status = &model.status;
    let Some(last) = &status.handovers.last else {
        return "last change: none since the start".to_owned();
    };
    let mut text = format!("last change: {}", change_text(last, model.plan.as_ref()));
    if let Some(age) = status.share_age_s {
        text.push_str(&format!("; share in force for {}", span(age)));
    }
    text
}

fn requests(model: &TopModel) -> String {
    let status = &model.status;
    let counts = &status.requests;
    let named = counts.refused.by_reason().filter(|(_, count)| *count > 0);
    let named: Vec<_> =
        named.map(|(why, count)| format!("{} {}", why.replace('_', " "), figures::count(count))).collect();
    let reasons = if named.is_empty() { String::new() } else { format!(" ({})", named.join(", ")) };
    let refused = counts.refused.by_reason().map(|(_, count)| count).sum();
    let mut text = format!(
        "requests: {} queued, {} in flight, {} done, {} failed, {} refused{reasons}",
        figures::count(status.queue as u64),
        status.in_flight,
        figures::count(counts.succeeded),
        figures::count(counts.failed),
        figures::count(refused)
    );
    if let Some(wait) = model.sample.as_ref().and_then(|sample| sample.wait_ms) {
        text.push_str(&format!("; mean wait {}", span(wait / 1e3)));
    }
    text
}

fn worker(worker: &WorkerStatus) -> String {
    let WorkerStatus { report, memory_mib } = worker;
    let mut text = format!(
        "worker {} ({}): {}, {}% ({} SMs)",
        report.pid, report.role, report.phase, report.share_percent, report.sms
    );
    if let Some(name) = &report.shared {
        text.push_str(&format!(", shared worker {name}"));
    }
    let all = memory_mib.map(|all| format!("memory {}", figures::mib(all)));
    let kinds = report.memory.map(|memory| {
        format!("weights {}, scratch {}", figures::mib(memory.weights_mib), figures::mib(memory.scratch_mib))
    });
    [all, kinds].into_iter().flatten().for_each(|part| text.push_str(&format!(", {part}")));
    text
}

fn place(status: &ModelStatus) -> String {
    let mut text = format!("share changes: {}", status.mechanism);
    match status.groups.as_deref() {
        Some("all") => text.push_str(", all groups of SMs"),
        Some(groups) => text.push_str(&format!(", groups {groups}")),
        None => {}
    }
    if let Some(why) = &status.no_partition {
        text.push_str(&format!(", not in-process: {why}"));
    }
    let changes = &status.handovers;
    text.push_str(&format!(
        "; {} completed, {} failed; {} workers died",
        changes.completed,
        changes.aborted + changes.rolled_back,
        status.worker_deaths
    ));
    text
}
