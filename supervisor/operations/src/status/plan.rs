//! `shadowslice plan` shows the changes that the policy would make, as text of 80 columns.

use super::table::{LongCell, TableColumn, WIDTH, aligned, block, left, right, wrapped};
use crate::figures;
use crate::plan::{ModelPlan, PlanReport};
use shadowslice_control::controller::ReportedVerdict;

pub(crate) fn plan(report: &PlanReport) -> String {
    let PlanReport { policy, act, interval_ms, decisions, models } = report;
    if report.is_static() {
        return "policy: static: shares change only by `shadowslice resize`\n".to_owned();
    }
    let act = if *act { "decisions are applied" } else { "decisions are not applied (act: false)" };
    let head = format!("policy: {policy}, every {interval_ms:.0} ms, {decisions} decisions; {act}");
    let mut lines = wrapped(&head, WIDTH, 2);
    if !models.is_empty() {
        let span = models.iter().map(|model| model.recent.span_s).fold(0.0, f64::max);
        lines.push(format!("REQ/S to BUSY cover the last {}:", figures::span(span)));
        let mut rows = aligned(&COLUMNS, models, WIDTH, LongCell::OwnLine).into_iter();
        lines.extend(rows.next());
        for (row, model) in rows.zip(models) {
            lines.push(row);
            lines.extend(block(&format!("{}; {}", why(model), place(model)), WIDTH));
        }
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Returns the policy's reason, and the reason why the change is not made.
pub(crate) fn why(model: &ModelPlan) -> String {
    let mut text = model.why.clone();
    if let Some(obstacle) = &model.not_ordered {
        text.push_str(&format!("; not ordered: {obstacle}"));
    }
    if let Some(overload) = &model.overload {
        text.push_str(&format!("; overloaded: {overload}"));
    }
    if let Some(paused) = &model.paused {
        text.push_str(&format!("; {paused}"));
    }
    if let Some(streams) = &model.streams {
        text.push_str(&format!("; {streams}"));
    }
    if model.held {
        text.push_str("; held");
    }
    text
}

/// Describes the mechanism of the change and the model's groups of SMs.
fn place(model: &ModelPlan) -> String {
    let mut text = model.mechanism.to_string();
    match model.groups.as_deref() {
        Some("all") => text.push_str(", all groups"),
        Some(groups) => text.push_str(&format!(", groups {groups}")),
        None => {}
    }
    if !model.groups_shared_with.is_empty() {
        text.push_str(&format!(", partly shared with {}", model.groups_shared_with.join(" and ")));
    }
    if let Some(why) = &model.no_partition {
        text.push_str(&format!(", not in-process: {why}"));
    }
    text
}

const COLUMNS: [TableColumn<ModelPlan>; 11] = [
    left(0, "MODEL", |model| model.name.clone()),
    right(0, "SHARE", |model| format!("{}%", model.share_percent)),
    right(0, "SMS", |model| model.sms.to_string()),
    right(0, "WANTED", |model| format!("{}%", model.wanted_percent)),
    right(0, "SMS", |model| model.wanted_sms.to_string()),
    left(0, "VERDICT", |model| model.verdict.to_string()),
    right(0, "REQ/S", |model| match idle(model) {
        true => "idle".to_owned(),
        false => figures::rate(model.recent.arrival_rate),
    }),
    right(0, "MISSED", |model| {
        model.recent.attainment.map_or("-".to_owned(), |met| figures::percent(1.0 - met))
    }),
    right(0, "BUSY", |model| format!("{:.0}%", model.recent.busy * 100.0)),
    left(0, "REFUSES", |model| if model.admission.refuse_late { "late" } else { "-" }.to_owned()),
    left(0, "KEPT BY", |model| kept_by(model).to_owned()),
];

fn idle(model: &ModelPlan) -> bool {
    model.recent.arrival_rate == 0.0 && model.recent.attainment.is_none() && model.observed.queued == 0
}

/// Returns one word for the reason why a wanted change is not made.
fn kept_by(model: &ModelPlan) -> &'static str {
    match (model.verdict, &model.not_ordered) {
        (_, Some(_)) => "obstacle",
        _ if model.held => "hold",
        (ReportedVerdict::Wait, None) => "hand-over",
        _ => "-",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{AdmissionReport, ObservationReport, RecentReport};
    use shadowslice_control::controller::Mechanism;
    use shadowslice_policy::sharing::{Choice, PolicyName};

    fn model(name: &str) -> ModelPlan {
        ModelPlan {
            name: name.to_owned(),
            gpu: 0,
            share_percent: 100,
            sms: 132,
            wanted_percent: 79,
            wanted_sms: 104,
            mechanism: Mechanism::InProcess,
            no_partition: None,
            groups: Some("0-12".to_owned()),
            groups_shared_with: vec!["digits".to_owned()],
            held: false,
            verdict: ReportedVerdict::Shrink,
            why: "it makes room for digits, which missed 23.5 % of its requests before that".to_owned(),
            not_ordered: None,
            last_order_why: None,
            admission: AdmissionReport { max_batch: 1, max_delay_ms: 0.0, refuse_late: true },
            observed: ObservationReport {
                arrival_rate: 0.0,
                p99_ms: 0.0,
                attainment: 1.0,
                busy: 0.0,
                queued: 0,
            },
            recent: RecentReport { span_s: 14.2, arrival_rate: 99.0, attainment: Some(0.8), busy: 0.97 },
            overload: None,
            paused: None,
            streams: None,
        }
    }

    fn output(models: Vec<ModelPlan>) -> String {
        let (policy, act) = (Choice::of(PolicyName::Adaptive), true);
        plan(&PlanReport { policy, act, interval_ms: 100.0, decisions: 94, models })
    }

    #[test]
    fn each_model_has_a_row_and_its_reason_below() {
        let output = output(vec![model("speech")]);
        let lines: Vec<_> = output.lines().collect();
        assert_eq!(lines[1], "REQ/S to BUSY cover the last 14 s:");
        assert_eq!(lines[2], "MODEL  SHARE SMS WANTED SMS VERDICT REQ/S MISSED BUSY REFUSES KEPT BY");
        assert_eq!(lines[3], "speech  100% 132    79% 104 shrink     99  20.0%  97% late    -");
        assert!(lines[4].starts_with("  it makes room for digits"), "{output}");
        let shared = lines[4..].join(" ").split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            lines[5].starts_with("  ") && shared.contains("groups 0-12, partly shared with digits"),
            "{output}"
        );
    }

    #[test]
    fn an_overload_follows_the_reason() {
        let overload = Some("a copy serves 9 requests/s within the SLO at most".to_owned());
        let output = output(vec![ModelPlan { overload, ..model("speech") }]);
        let output = output.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(output.contains("before that; overloaded: a copy serves 9 requests/s"), "{output}");
    }

    #[test]
    fn pauses_for_other_models_follow_the_reason() {
        let paused = Some("batches paused 4 times for search".to_owned());
        let output = output(vec![ModelPlan { paused, ..model("speech") }]);
        let output = output.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(output.contains("before that; batches paused 4 times for search; in-process"), "{output}");
    }

    #[test]
    fn an_idle_model_is_idle_and_all_fits_80_columns() {
        let recent = RecentReport { span_s: 14.2, ..RecentReport::default() };
        let name = "a-model-with-a-name-that-is-rather-long".to_owned();
        let not_ordered = Some("the last order failed (no memory); tried again in 4 s ".repeat(4));
        let output = output(vec![ModelPlan { recent, name, not_ordered, ..model("") }, model("other")]);
        assert!(output.contains(" idle "), "{output}");
        assert!(output.contains("obstacle") && output.contains("tried again in 4 s"), "{output}");
        assert_eq!(output.lines().find(|line| line.chars().count() > WIDTH), None, "{output}");
    }
}
