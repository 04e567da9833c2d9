//! Formats `shadowslice status` as text of 80 columns.

use super::sleep::sleep_notes;
use super::table::{LongCell, TableColumn, WIDTH, aligned, left, right, wrapped};
use super::{HostStatus, ModelStatus, StreamStatus, SupervisorStatus, gpus, tenants};
use crate::figures;
use crate::plan::ModelPlan;
use shadowslice_control::controller::{ChangeCause, HandoverReport, ReportedState};
use shadowslice_datapath::readiness::HostState;

pub(crate) fn text(status: &HostStatus) -> String {
    let mut lines = aligned(&COLUMNS, &status.models, WIDTH, LongCell::OwnLine);
    let mut say = |line: &str| lines.extend(wrapped(line, WIDTH, 2));
    match status.host {
        HostState::Serving if status.ready => {}
        HostState::Serving => say(&unready_host(&status.models)),
        HostState::Drained => say("the host is drained until `shadowslice undrain`"),
        HostState::Stopping => say("the host is stopping"),
    }
    if status.upgrading {
        say("an upgrade is in progress: models move to the next supervisor one after the other");
    }
    for model in &status.models {
        if model.drained && status.host == HostState::Serving {
            say(&format!("{0} is drained until `shadowslice undrain {0}`", model.name));
        }
        notes(model).iter().for_each(|note| say(note));
        if let Some(wanted) = model.wanted_percent.filter(|&wanted| wanted != model.share_percent) {
            let verdict = model.verdict.as_deref().unwrap_or("no reason is known");
            say(&format!("{}: the policy wants {wanted}%: {verdict}", model.name));
        }
    }
    sleep_notes(&status.models).iter().for_each(|note| say(note));
    for gpu in &status.gpus {
        gpus::notes(gpu).iter().for_each(|note| say(note));
        if let Some(line) = gpus::line(gpu) {
            say(&line);
        }
    }
    status.supervisor.iter().for_each(|own| say(&supervisor(own)));
    if !status.tenants.is_empty() {
        lines.extend(aligned(&tenants::COLUMNS, &status.tenants, WIDTH, LongCell::Cut));
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// The largest number of models that the text names as the cause if the host is not ready.
const MAX_NAMED: usize = 5;

fn unready_host(models: &[ModelStatus]) -> String {
    let unready: Vec<&str> = models
        .iter()
        .filter(|model| model.state != ReportedState::Ready || model.drained)
        .map(|model| model.name.as_str())
        .collect();
    let more = match unready.len().saturating_sub(MAX_NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    match unready.is_empty() {
        true => "the host is not ready".to_owned(),
        false => format!(
            "the host is not ready because of these models: {}{more}",
            unready[..unready.len().min(MAX_NAMED)].join(", ")
        ),
    }
}

pub(crate) fn supervisor(own: &SupervisorStatus) -> String {
    let SupervisorStatus { version, pid, age_s, config } = own;
    format!("supervisor {version}, pid {pid}, up {}, with {}", figures::span(*age_s), config.display())
}

/// Returns the problems of a model, and whether its share is held.
pub(crate) fn notes(model: &ModelStatus) -> Vec<String> {
    let name = &model.name;
    let why = model.why.as_ref().map(|why| format!("{name} is {}{}: {why}", model.state, next_try(model)));
    let no_change = model.cannot_resize.as_ref().map(|why| format!("{name} cannot resize: {why}"));
    let no_standby = model.no_standby.as_ref().map(|why| format!("{name} has no standby: {why}"));
    let files = model.files_changed.then(|| {
        format!("the files of {name} changed after it was loaded; run `shadowslice reload` to load them")
    });
    let batches = model.batch_limit.as_ref().map(|why| format!("{name} has small batches: {why}"));
    let stalled = model.stalled.as_ref().map(|what| format!("{name}: {what}"));
    let overload = model.overload.as_ref().map(|why| format!("{name} is overloaded: {why}"));
    let malformed = model.requests.invalid;
    let malformed = (malformed > 0).then(|| {
        format!(
            "{name} received {} invalid requests; see the clients' error messages, or `access_log`",
            figures::count(malformed)
        )
    });
    let held = model
        .held
        .then(|| format!("{name} is held at {}% until `shadowslice release {name}`", model.share_percent));
    let streams = model.streams.as_ref().and_then(StreamStatus::text);
    let streams = streams.map(|text| format!("{name}: {text}"));
    let rollout = model.rollout.as_ref().filter(|_| model.role.is_released());
    let rollout = rollout.map(|rollout| format!("{name}: {}", rollout.text()));
    [why, overload, stalled, files, no_change, batches, malformed, no_standby, held, streams, rollout]
        .into_iter()
        .flatten()
        .collect()
}

/// Describes for how long a model has been unready, and when the supervisor tries to start it
/// again.
fn next_try(model: &ModelStatus) -> String {
    if model.state != ReportedState::Unready {
        return String::new();
    }
    let next = match model.next_try_s {
        None => "next try when its files or its configuration change".to_owned(),
        Some(0.0) => "a try is in progress".to_owned(),
        Some(next) => format!("next try in {next:.0} s"),
    };
    format!(" for {:.0} s ({next})", model.state_age_s)
}

/// Describes a change of the share, whether completed or failed, and its reason.
pub(crate) fn change_text(last: &HandoverReport, plan: Option<&ModelPlan>) -> String {
    let reason = match last.cause {
        ChangeCause::Hand => "by hand".to_owned(),
        ChangeCause::Policy => {
            let why = plan.and_then(|plan| plan.last_order_why.as_deref());
            format!("by the policy: {}", why.unwrap_or("no reason is known"))
        }
        ChangeCause::Death => "after a worker's death".to_owned(),
        ChangeCause::Worker | ChangeCause::Unknown => "the worker could not keep its share".to_owned(),
    };
    let HandoverReport { from_percent, to_percent, to_sms, outcome, .. } = last;
    let why = last.why.as_ref().map(|why| format!("; {why}")).unwrap_or_default();
    format!("{from_percent}% -> {to_percent}% ({to_sms} SMs), {outcome}; {reason}{why}")
}

pub(crate) fn state(model: &ModelStatus) -> String {
    match model.state {
        ReportedState::Ready if model.drained => "drained".to_owned(),
        ReportedState::Ready if model.sleeps() => "asleep".to_owned(),
        ReportedState::Ready => model.version_state().unwrap_or_else(|| ReportedState::Ready.to_string()),
        state => state.to_string(),
    }
}

/// Returns the current share. The suffix `h` marks a held share.
pub(crate) fn share(model: &ModelStatus) -> String {
    format!("{}%{}", model.share_percent, if model.held { "h" } else { "" })
}

/// Returns the percentage of requests that were answered within the SLO, or `-` if there were no
/// requests.
pub(crate) fn in_slo(model: &ModelStatus) -> String {
    let part = model.slo.attainment.filter(|_| !model.is_idle());
    part.map_or("-".to_owned(), figures::percent)
}

/// Returns a latency in ms, or `-` if no request was answered.
pub(crate) fn latency(model: &ModelStatus, ms: f64) -> String {
    model.slo.slack.map_or("-".to_owned(), |_| figures::ms(ms))
}

const COLUMNS: [TableColumn<ModelStatus>; 11] = [
    left(0, "MODEL", |model| model.name.clone()),
    left(0, "STATE", state),
    right(0, "SHARE", share),
    right(0, "SMS", |model| model.sms.to_string()),
    right(0, "QUEUE", |model| figures::count(model.queue as u64)),
    right(0, "DONE", |model| figures::count(model.requests.succeeded)),
    right(0, "FAILED", |model| figures::count(model.requests.failed)),
    right(0, "REFUSED", |model| figures::count(model.requests.rejected)),
    right(0, "P50 MS", |model| match model.is_idle() {
        true => "idle".to_owned(),
        false => latency(model, model.latency_ms.p50),
    }),
    right(0, "P99 MS", |model| latency(model, model.latency_ms.p99)),
    right(0, "IN SLO", in_slo),
];

#[cfg(test)]
mod tests {
    use super::super::{Latency, SloStatus};
    use super::*;

    fn model(name: &str) -> ModelStatus {
        let slo = SloStatus { latency_ms: 20.0, percentile: 99.0, attainment: Some(1.0), slack: None };
        let (name, state) = (name.to_owned(), ReportedState::Ready);
        ModelStatus { name, state, share_percent: 100, sms: 132, slo, ..ModelStatus::default() }
    }

    fn output(models: Vec<ModelStatus>) -> String {
        let (version, config) = ("0.1.0".to_owned(), "/etc/shadowslice/shadowslice.yaml".into());
        let supervisor = Some(SupervisorStatus { version, pid: 4711, age_s: 10_000.0, config });
        let (host, gpus) = (HostState::Serving, Vec::new());
        text(&HostStatus {
            supervisor,
            host,
            ready: true,
            upgrading: false,
            models,
            gpus,
            tenants: Vec::new(),
        })
    }

    #[test]
    fn an_idle_model_shows_idle_and_a_busy_one_figures() {
        let slo = SloStatus { attainment: Some(0.9837), slack: Some(0.5), ..model("b").slo };
        let busy =
            ModelStatus { slo, latency_ms: Latency { p50: 4.26, p99: 95.2 }, held: true, ..model("busy") };
        let output = output(vec![model("quiet"), busy]);
        let lines: Vec<_> = output.lines().collect();
        assert_eq!(lines[1].split_whitespace().skip(8).collect::<Vec<_>>(), ["idle", "-", "-"]);
        assert_eq!(lines[2].split_whitespace().skip(8).collect::<Vec<_>>(), ["4.3", "95", "98.3%"]);
        assert!(lines[2].contains(" 100%h "), "{output}");
        assert!(lines[3].starts_with("busy is held at 100%"), "{output}");
        assert_eq!(
            lines[4..],
            ["supervisor 0.1.0, pid 4711, up 3 h, with /etc/shadowslice/shadowslice.yaml"]
        );
    }

    #[test]
    fn any_status_fits_80_columns_and_cuts_no_name() {
        let (name, state) =
            ("a-model-with-a-name.that_is-as-long-as-names-may-be".repeat(2), ReportedState::Restarting);
        let mut long = ModelStatus { state, why: Some("for ".repeat(60)), ..model(&name) };
        long.requests.succeeded = 4_000_000_000;
        (long.requests.failed, long.requests.rejected, long.queue) = (123_456, 98_765, 99_999);
        let slo = SloStatus { attainment: Some(0.9999), slack: Some(-9.0), ..long.slo.clone() };
        long = ModelStatus { slo, latency_ms: Latency { p50: 98_765.0, p99: 1e6 }, held: true, ..long };
        long.name.truncate(80);
        let output = output(vec![model("short"), long.clone()]);
        assert!(output.lines().any(|line| line == long.name), "{output}");
        assert_eq!(output.lines().find(|line| line.chars().count() > WIDTH), None, "{output}");
    }
}
