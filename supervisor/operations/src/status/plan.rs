//! The changes that the policy would make, as text.

use super::{Column, aligned};
use shadowslice_control::controller::{ModelPlan, PlanReport};

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
    text.push_str(&aligned(&COLUMNS, models));
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

const COLUMNS: [Column<ModelPlan>; 13] = [
    ("MODEL", |model| model.name.clone()),
    ("SHARE", |model| format!("{}%", model.share_percent)),
    ("SMS", |model| model.sms.to_string()),
    ("WANTED", |model| format!("{}%", model.wanted_percent)),
    ("SMS", |model| model.wanted_sms.to_string()),
    ("VERDICT", |model| model.verdict.clone()),
    ("RATE", |model| format!("{:.1}/s", model.seen.arrival_rate)),
    ("P99 MS", |model| format!("{:.1}", model.seen.p99_ms)),
    ("MET", |model| percent(model.seen.attainment)),
    ("BUSY", |model| percent(model.seen.busy)),
    ("BATCH", |model| model.door.max_batch.to_string()),
    ("WAIT MS", |model| format!("{:.0}", model.door.max_delay_ms)),
    ("REFUSES", |model| if model.door.refuse_late { "late" } else { "-" }.to_owned()),
];

fn percent(part: f64) -> String {
    format!("{:.0}%", part * 100.0)
}
