//! The report of the policy's decisions and of their reasons, for `shadowslice plan`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use shadowslice_config::{ControllerConfig, OnLate};
use shadowslice_control::controller::{
    Explained, Mechanism, ModelDecision, NotOrdered, Planned, ReportedVerdict,
};
use shadowslice_datapath::pipeline::Rates;
use shadowslice_datapath::pipeline::TrafficWindow;
use shadowslice_policy::sharing::{
    AdmissionPolicy, Blocker, Choice, LayoutReport, LayoutStage, MissRate, Observation, Pattern, PolicyName,
    Verdict, VerdictReason,
};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::ms;

/// The last decision of the policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    #[serde(serialize_with = "as_word", deserialize_with = "of_word")]
    pub policy: Choice,
    /// True if decisions are applied.
    pub act: bool,
    pub interval_ms: f64,
    /// The number of decisions since the start. It is always 0 with the policy `static`.
    pub decisions: u64,
    /// All models in the order of the configuration. It is empty before the first decision.
    pub models: Vec<ModelPlan>,
}

/// The policy's decision about one model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelPlan {
    pub name: String,
    pub gpu: usize,
    pub share_percent: u32,
    pub sms: u32,
    pub wanted_percent: u32,
    pub wanted_sms: u32,
    pub mechanism: Mechanism,
    /// The reason why the share cannot change inside the worker.
    pub no_partition: Option<String>,
    /// The groups of SMs on which batches run, if the share changes inside the worker.
    pub groups: Option<String>,
    /// The models that also use some of these groups.
    pub groups_shared_with: Vec<String>,
    pub held: bool,
    pub verdict: ReportedVerdict,
    /// The reason for the verdict.
    pub why: String,
    /// The reason why a wanted change is not ordered.
    pub not_ordered: Option<String>,
    /// The reason for the policy's last order. `None` before its first order.
    #[serde(default)]
    pub last_order_why: Option<String>,
    #[serde(rename = "door")]
    pub admission: AdmissionReport,
    #[serde(rename = "seen")]
    pub observed: ObservationReport,
    #[serde(default)]
    pub recent: RecentReport,
    /// The reason why no share is sufficient, if more requests arrive than a copy can answer.
    #[serde(default)]
    pub overload: Option<String>,
    /// The pauses of the model's batches for other models since the start, as text.
    #[serde(default)]
    pub paused: Option<String>,
    /// The streams of the model, as text.
    #[serde(default)]
    pub streams: Option<String>,
}

/// The admission and batching of a model's requests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AdmissionReport {
    /// The largest batch, in rows.
    pub max_batch: u32,
    /// The longest time for which a batch that is not full waits for requests, in ms.
    pub max_delay_ms: f64,
    /// True if requests that cannot be answered in time are refused.
    pub refuse_late: bool,
}

/// The figures of a model between the last two decisions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ObservationReport {
    /// The number of requests per second, including refused requests.
    pub arrival_rate: f64,
    /// The 99th percentile of the latency, in ms. It is 0 without answers.
    pub p99_ms: f64,
    /// The fraction of the offered requests that were answered in time, as in `status`. It is 1 without
    /// requests.
    pub attainment: f64,
    /// The fraction of the time in which a batch executed.
    pub busy: f64,
    pub queued: usize,
}

fn as_word<S: Serializer>(choice: &Choice, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(choice)
}

fn of_word<'de, D: Deserializer<'de>>(from: D) -> Result<Choice, D::Error> {
    String::deserialize(from)?.parse().map_err(de::Error::custom)
}

/// The figures of a model over the last ten seconds. A single interval may contain no request.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RecentReport {
    /// The time that the figures cover, in seconds. It is shorter after the start.
    pub span_s: f64,
    /// The number of requests per second, including refused requests, as in `status`.
    pub arrival_rate: f64,
    /// The fraction of the offered requests that were answered in time. `None` without requests.
    pub attainment: Option<f64>,
    /// The fraction of the time in which a batch executed.
    pub busy: f64,
}

impl From<TrafficWindow> for RecentReport {
    fn from(recent: TrafficWindow) -> Self {
        Self {
            span_s: recent.span.as_secs_f64(),
            arrival_rate: Rates::from(recent).requests,
            attainment: recent.counts.attainment(),
            busy: recent.busy(),
        }
    }
}

impl PlanReport {
    /// Returns the report of the last decision, or of no decision.
    pub(crate) fn of(settings: &ControllerConfig, planned: Option<&Planned>) -> Self {
        let decisions = planned.map_or(&[][..], |planned| &planned.models);
        Self {
            policy: settings.policy,
            act: settings.act,
            interval_ms: ms(settings.interval),
            decisions: planned.map_or(0, |planned| planned.took.count),
            models: decisions.iter().map(|decision| ModelPlan::of(decision, decisions)).collect(),
        }
    }

    /// Returns true if shares change only by commands.
    pub(crate) fn is_static(&self) -> bool {
        self.policy == Choice::of(PolicyName::Static)
    }
}

impl ModelPlan {
    fn of(decision: &ModelDecision, all: &[ModelDecision]) -> Self {
        let ModelDecision { model, report, snapshot, .. } = decision;
        Self {
            name: model.name.clone(),
            gpu: model.gpu,
            share_percent: report.share.get(),
            sms: snapshot.share.0,
            wanted_percent: decision.wanted.get(),
            wanted_sms: decision.wanted_sms.0,
            mechanism: report.mechanism,
            no_partition: report.no_partition.clone(),
            groups: report.partition.as_ref().map(|(_, groups)| groups.to_string()),
            groups_shared_with: neighbours(decision, all),
            held: snapshot.held,
            verdict: decision.verdict.kind(),
            why: explanation(&decision.verdict),
            not_ordered: decision.not_ordered.as_ref().map(obstacle),
            last_order_why: decision.last_order.as_ref().map(explanation),
            admission: AdmissionReport::of(&decision.admission, model.queue.on_late, model.batch.max_delay),
            observed: ObservationReport::of(&snapshot.observation),
            recent: decision.recent.into(),
            overload: None,
            paused: None,
            streams: None,
        }
    }
}

/// Returns the models that have groups in common with this model. Models on the whole GPU do not count.
fn neighbours(own: &ModelDecision, all: &[ModelDecision]) -> Vec<String> {
    let part = |decision: &ModelDecision| {
        let (_, groups) = decision.report.partition.as_ref()?;
        Some(*groups).filter(|groups| *groups != Groups::WHOLE)
    };
    let Some(groups) = part(own) else { return Vec::new() };
    let others =
        all.iter().filter(|other| other.model.gpu == own.model.gpu && other.model.name != own.model.name);
    let meets = |other: &&ModelDecision| part(other).is_some_and(|part| part.common(groups) != Groups::NONE);
    others.filter(meets).map(|other| other.model.name.clone()).collect()
}

impl ObservationReport {
    fn of(seen: &Observation) -> Self {
        Self {
            arrival_rate: seen.arrival_rate(),
            p99_ms: ms(seen.p99_latency),
            attainment: seen.attainment.unwrap_or(1.0),
            busy: seen.busy,
            queued: seen.queued,
        }
    }
}

impl AdmissionReport {
    /// Creates the report. With `on_late: serve`, late requests are not refused.
    fn of(admission: &AdmissionPolicy, on_late: OnLate, configured_delay: Duration) -> Self {
        let AdmissionPolicy { max_batch, refuse_late, .. } = *admission;
        Self {
            max_batch,
            max_delay_ms: ms(configured_delay),
            refuse_late: refuse_late && on_late == OnLate::Reject,
        }
    }
}

/// Returns the reason why a change is not ordered as text.
fn obstacle(why: &NotOrdered) -> String {
    match why {
        NotOrdered::NotActing => "controller.act is false".to_owned(),
        NotOrdered::NotReady => "the model is not ready".to_owned(),
        NotOrdered::Nearest(share) => {
            format!("{share} is the nearest share that share.min, share.max and the GPU allow")
        }
        NotOrdered::Backoff { why, left } => {
            let seconds = left.as_secs_f64();
            format!("the last share change failed ({why}); next attempt in {seconds:.0} s")
        }
        NotOrdered::Pending => "a share change is in progress".to_owned(),
        NotOrdered::Full => "too many orders are queued for the model; the policy tries again".to_owned(),
    }
}

/// Returns the reason for a verdict as text.
fn explanation(Explained { verdict, beneficiary }: &Explained) -> String {
    let Verdict { from, to, blocked_by, why } = verdict;
    let why = reason(why, beneficiary.as_deref().unwrap_or("a model"));
    match blocked_by {
        None if from == to => why,
        None => format!("{to} instead of {from}: {why}"),
        Some(Blocker::Handover) => format!("{to} after the change under way: {why}"),
        Some(Blocker::Held) => format!("the share is held at {from}; the policy wants {to}: {why}"),
    }
}

fn reason(why: &VerdictReason, beneficiary: &str) -> String {
    let missed_text = |MissRate { actual, allowed }: &MissRate| {
        format!(
            "{:.1} % of recent requests missed the SLO ({:.1} % allowed)",
            actual * 100.0,
            allowed * 100.0
        )
    };
    match why {
        VerdictReason::PolicyShare => "the policy divides the GPU this way".to_owned(),
        VerdictReason::Met(missed) => missed_text(missed),
        VerdictReason::Violating(missed) => {
            format!("{}; late requests are refused, and layouts are tried next", missed_text(missed))
        }
        VerdictReason::Layout(layout) => layout_text(layout, beneficiary),
        VerdictReason::Infeasible { missed, two_batches } => format!(
            "{}; the SLO cannot be met: two batches of one row take {:.1} ms alone on the whole GPU",
            missed_text(missed),
            ms(*two_batches)
        ),
        VerdictReason::NotBatchTime { missed, two_batches } => format!(
            "{}; two batches take at most {:.1} ms, so more SMs would not help; check the host and the clients",
            missed_text(missed),
            ms(*two_batches)
        ),
    }
}

fn layout_text(layout: &LayoutReport, beneficiary: &str) -> String {
    let pattern = pattern_text(layout.pattern);
    let begins = match layout.stage {
        LayoutStage::Trying => {
            format!("trying layouts because {beneficiary} violates its SLO; now: {pattern}")
        }
        LayoutStage::Chosen => format!("{pattern}; chosen because {beneficiary} violated its SLO"),
    };
    let tried = layout.tried.iter().map(|tried| {
        format!(
            "{} {:.1} % ({:.1} %)",
            pattern_text(tried.pattern),
            tried.missed * 100.0,
            tried.missed_first_priority * 100.0
        )
    });
    let tried: Vec<String> = tried.collect();
    if tried.is_empty() {
        return begins;
    }
    format!("{begins}; missed requests by layout (first priority in brackets): {}", tried.join(", "))
}

fn pattern_text(pattern: Pattern) -> String {
    let text = match pattern {
        Pattern::Apart(part) => return format!("the violating model alone on {part}"),
        Pattern::FirstApart(part) => return format!("the first priority alone on {part}"),
        Pattern::AtRest => "initial shares",
        Pattern::Everything => "every model on the whole GPU",
        Pattern::Pauses => "every model on the whole GPU, with pauses",
        Pattern::LowerHalves => "lower priorities in two halves",
        Pattern::LowerHalf => "lower priorities in one half",
        Pattern::Halves => "all models in two halves",
        Pattern::Thirds => "all models in thirds",
        Pattern::OwnParts => "a separate part for each model",
    };
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use shadowslice_policy::sharing::LayoutResult;
    use shadowslice_shared::units::Sms;

    use super::*;

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn every_verdict_has_words_of_its_own() {
        let beneficiary = Some("resnet50".to_owned());
        let missed = MissRate { actual: 0.123, allowed: 0.01 };
        let keep = |why| Verdict { from: Sms(40), to: Sms(40), blocked_by: None, why };
        let layout = |stage| {
            let tried = |pattern, missed, missed_first_priority| LayoutResult {
                pattern,
                missed,
                missed_first_priority,
            };
            let tried = vec![tried(Pattern::AtRest, 0.182, 0.004), tried(Pattern::LowerHalves, 0.075, 0.0)];
            VerdictReason::Layout(LayoutReport {
                stage,
                pattern: Pattern::LowerHalves,
                beneficiary: 0,
                missed,
                tried,
            })
        };
        let chosen = layout(LayoutStage::Chosen);
        let change =
            |from, to, blocked_by| Verdict { from: Sms(from), to: Sms(to), blocked_by, why: chosen.clone() };
        for (verdict, kind, expected) in [
            (keep(VerdictReason::PolicyShare), ReportedVerdict::Keep, "divides the GPU"),
            (
                keep(VerdictReason::Met(missed)),
                ReportedVerdict::Keep,
                "12.3 % of recent requests missed the SLO (1.0 % allowed)",
            ),
            (keep(VerdictReason::Violating(missed)), ReportedVerdict::Keep, "layouts are tried next"),
            (
                keep(layout(LayoutStage::Trying)),
                ReportedVerdict::Keep,
                "trying layouts because resnet50 violates",
            ),
            (
                keep(VerdictReason::Infeasible { missed, two_batches: Duration::from_millis(401) }),
                ReportedVerdict::Keep,
                "two batches of one row take 401.0 ms",
            ),
            (
                keep(VerdictReason::NotBatchTime { missed, two_batches: Duration::from_millis(2) }),
                ReportedVerdict::Keep,
                "2.0 ms, so more SMs would not help",
            ),
            (
                change(60, 40, None),
                ReportedVerdict::Shrink,
                "40 SMs instead of 60 SMs: lower priorities in two halves; chosen because resnet50 violated its SLO; \
                 missed requests by layout (first priority in brackets): initial shares 18.2 % (0.4 %), \
                 lower priorities in two halves 7.5 % (0.0 %)",
            ),
            (change(40, 60, None), ReportedVerdict::Grow, "60 SMs instead of 40 SMs"),
            (
                change(40, 60, Some(Blocker::Handover)),
                ReportedVerdict::Wait,
                "60 SMs after the change under way",
            ),
            (change(40, 60, Some(Blocker::Held)), ReportedVerdict::Wait, "held at 40 SMs"),
        ] {
            let explained = Explained { verdict, beneficiary: beneficiary.clone() };
            let text = explanation(&explained);
            assert!(text.contains(expected), "{text}");
            assert_eq!(explained.kind(), kind);
        }
    }

    #[test]
    fn who_serves_the_late_turns_nobody_away() {
        let admission = AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(4) };
        let of = |on_late| AdmissionReport::of(&admission, on_late, Duration::from_millis(5));
        assert!(of(OnLate::Reject).refuse_late && !of(OnLate::Serve).refuse_late);
        assert_eq!(of(OnLate::Serve).max_delay_ms, 5.0);
    }

    #[test]
    fn figures_of_an_idle_model_are_numbers() {
        let idle = ObservationReport::of(&Observation::default());
        assert_eq!((idle.arrival_rate, idle.attainment, idle.p99_ms), (0.0, 1.0, 0.0));
        let seen = Observation {
            span: Duration::from_millis(500),
            arrived: 100,
            answered: 60,
            attainment: Some(0.5),
            refused: 20,
            ..Observation::default()
        };
        let busy = ObservationReport::of(&seen);
        assert_eq!((busy.arrival_rate, busy.attainment), (200.0, 0.5));
    }
}
