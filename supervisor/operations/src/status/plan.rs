//! The changes that the policy would make, as text.

use super::aligned;
use shadowslice_control::controller::{ModelPlan, PlanReport};

/// The last decision: a line a model, and why.
pub fn plan(report: &PlanReport) -> String {
    let PlanReport { policy, act, interval_ms, decisions, models } = report;
    if policy == "static" {
        return "policy: static: nothing decides shares; `shadowslice resize` changes them\n".to_owned();
    }
    let act = if *act { "decisions are carried out" } else { "act: false, so nothing is carried out" };
    let mut text = format!("policy: {policy}, every {interval_ms:.0} ms, {decisions} decisions; {act}\n");
    if models.is_empty() {
        return text;
    }
    let heads = [
        "MODEL", "SHARE", "SMS", "WANTED", "SMS", "VERDICT", "RATE", "P99 MS", "MET", "BUSY", "BATCH",
        "WAIT MS", "REFUSES",
    ];
    let mut rows = vec![heads.map(str::to_owned)];
    rows.extend(models.iter().map(row));
    text.push_str(&aligned(&rows));
    for model in models {
        text.push_str(&format!("{}: {}", model.name, model.why));
        if let Some(obstacle) = &model.not_ordered {
            text.push_str(&format!("; not ordered: {obstacle}"));
        }
        if model.held {
            text.push_str("; held");
        }
        text.push_str(&format!("; {}\n", place(model)));
    }
    text
}

/// How a model's share is changed, and where it is.
fn place(model: &ModelPlan) -> String {
    let mut text = model.mechanism.clone();
    match model.groups.as_deref() {
        Some("all") => text.push_str(", all groups"),
        Some(groups) => text.push_str(&format!(", groups {groups}")),
        None => {}
    }
    if !model.groups_shared_with.is_empty() {
        text.push_str(&format!(", some of which {} has, too", model.groups_shared_with.join(" and ")));
    }
    if let Some(why) = &model.no_partition {
        text.push_str(&format!(", not in-process: {why}"));
    }
    text
}

fn row(model: &ModelPlan) -> [String; 13] {
    let percent = |part: f64| format!("{:.0}%", part * 100.0);
    [
        model.name.clone(),
        format!("{}%", model.share_percent),
        model.sms.to_string(),
        format!("{}%", model.wanted_percent),
        model.wanted_sms.to_string(),
        model.verdict.clone(),
        format!("{:.1}/s", model.seen.arrival_rate),
        format!("{:.1}", model.seen.p99_ms),
        percent(model.seen.attainment),
        percent(model.seen.busy),
        model.door.max_batch.to_string(),
        format!("{:.0}", model.door.max_delay_ms),
        if model.door.refuse_late { "late" } else { "-" }.to_owned(),
    ]
}
