//! The trace of a policy's decisions as text, with one line for each change of a decision.

use shadowslice_policy::sharing::{
    AdmissionPolicy, Decision, LayoutReport, LayoutResult, PolicyInput, VerdictReason,
};

/// The last reported state of each model.
#[derive(Debug, Default)]
pub(super) struct Trace {
    last: Vec<String>,
}

impl Trace {
    /// Returns lines about the models whose state has changed. Models with the same state share a
    /// line.
    pub(super) fn lines(
        &mut self,
        facts: &PolicyInput,
        decision: &Decision,
        names: &[String],
    ) -> Vec<String> {
        let state = |(why, admission): (&VerdictReason, &AdmissionPolicy)| {
            let refuses = if admission.refuse_late { ", refuses" } else { "" };
            format!("{}{refuses}", described(why, names))
        };
        let now: Vec<String> =
            decision.report.iter().map(|verdict| &verdict.why).zip(&decision.admissions).map(state).collect();
        self.last.resize(now.len(), String::new());
        let at = facts.now.since_origin().as_secs_f64();
        let mut lines: Vec<(String, Vec<&str>)> = Vec::new();
        for ((before, now), name) in self.last.iter().zip(&now).zip(names) {
            if before == now {
                continue;
            }
            match lines.iter_mut().find(|(text, _)| text == now) {
                Some((_, models)) => models.push(name),
                None => lines.push((now.clone(), vec![name])),
            }
        }
        let lines =
            lines.iter().map(|(text, models)| format!("{at:8.3} s  {text}: {}", models.join(", "))).collect();
        self.last = now;
        lines
    }
}

fn described(why: &VerdictReason, names: &[String]) -> String {
    match why {
        VerdictReason::Layout(LayoutReport { stage, pattern, beneficiary, tried, .. }) => {
            let beneficiary = names.get(*beneficiary).map_or("?", String::as_str);
            let tried: Vec<String> = tried.iter().map(of).collect();
            format!("{stage:?} {pattern} for {beneficiary} [{}]", tried.join(", "))
        }
        VerdictReason::PolicyShare => "divided".to_owned(),
        VerdictReason::Met(_) => "met".to_owned(),
        VerdictReason::Violating(_) => "violating".to_owned(),
        VerdictReason::Infeasible { .. } => "cannot be kept".to_owned(),
        VerdictReason::NotBatchTime { .. } => "not its batches".to_owned(),
    }
}

/// Returns the text for a layout that the policy tried: its name, and the percentages of missed
/// requests among all requests and among those of the first priority.
fn of(tried: &LayoutResult) -> String {
    let LayoutResult { pattern, missed, missed_first_priority } = tried;
    format!("{pattern} {:.1}/{:.1}", missed * 100.0, missed_first_priority * 100.0)
}
