//! Formats the table of models.

use super::snapshot::TopModel;
use crate::figures;
use crate::history::ModelSample;
use crate::status::table::{LongCell, TableColumn, aligned, left, right};
use crate::status::{share, state};
use shadowslice_control::controller::{ChangeOutcome, Mechanism};

/// Returns the table's head and a row for each model. Omits columns that do not fit, according to
/// their rank.
pub(super) fn table(models: &[TopModel], width: usize) -> Vec<String> {
    aligned(&COLUMNS, models, width, LongCell::Cut)
}

const COLUMNS: [TableColumn<TopModel>; 19] = [
    left(0, "MODEL", |model| model.status.name.clone()),
    left(0, "M", |model| model.key.to_string()),
    left(1, "STATE", |model| state(&model.status)),
    right(0, "SHARE", |model| share(&model.status)),
    right(4, "SMS", |model| model.status.sms.to_string()),
    left(6, "BY", by),
    right(0, "REQ/S", requests),
    right(7, "P50 MS", |model| sampled(model, |sample| sample.p50_ms.map(figures::ms))),
    right(2, "P99 MS", |model| sampled(model, |sample| sample.p99_ms.map(figures::ms))),
    right(1, "IN SLO", |model| sampled(model, |sample| sample.attainment().map(figures::percent))),
    right(5, "QUEUE", |model| figures::count(model.status.queue as u64)),
    right(3, "REF/S", |model| sampled(model, |sample| Some(figures::rate(sample.refusals)))),
    right(8, "WAIT MS", |model| sampled(model, |sample| sample.wait_ms.map(figures::ms))),
    right(9, "FAIL/S", |model| sampled(model, |sample| Some(figures::rate(sample.failed)))),
    right(10, "SLO MS", |model| figures::ms(model.status.slo.latency_ms)),
    left(11, "LAST CHANGE", last_change),
    right(14, "GPU/H", used),
    right(12, "DONE", |model| figures::count(model.status.requests.succeeded)),
    right(13, "DEATHS", |model| figures::count(model.status.worker_deaths)),
];

/// Returns the mechanism that changes the share.
fn by(model: &TopModel) -> String {
    match model.status.mechanism {
        Mechanism::InProcess => "inside".to_owned(),
        other => other.to_string(),
    }
}

/// Returns the part of the GPU's SM time that the model used in the last hour.
fn used(model: &TopModel) -> String {
    let sample = model.sample.as_ref();
    sample.map_or_else(|| "...".to_owned(), |sample| figures::percent(sample.hour_percent / 100.0))
}

fn requests(model: &TopModel) -> String {
    match &model.sample {
        _ if model.status.slo.attainment.is_none() => "-".to_owned(),
        _ if model.is_idle() => "idle".to_owned(),
        Some(sample) => figures::rate(sample.rate),
        None => "...".to_owned(),
    }
}

/// Returns a figure of the last sample, or `-` if the model is idle or has no such figure.
fn sampled(model: &TopModel, figure: impl Fn(&ModelSample) -> Option<String>) -> String {
    let sample = model.sample.as_ref().filter(|_| !model.is_idle());
    sample.and_then(figure).unwrap_or_else(|| "-".to_owned())
}

/// Describes the last change of the share. Shows the age of the new share if it is in force, and
/// otherwise the outcome of the change.
fn last_change(model: &TopModel) -> String {
    let status = &model.status;
    let Some(last) = &status.handovers.last else {
        return "-".to_owned();
    };
    let change = format!("{}>{}% {}", last.from_percent, last.to_percent, last.cause);
    let in_force = matches!(last.outcome, ChangeOutcome::Completed | ChangeOutcome::TakenOver);
    match status.share_age_s.filter(|_| in_force) {
        Some(age) => format!("{change}, {} ago", figures::span(age)),
        None => format!("{change}, {}", last.outcome),
    }
}
