//! Formats the table of models.

use super::snapshot::TopModel;
use crate::figures;
use crate::status::table::{LongCell, TableColumn, aligned, left, right};
use crate::status::{in_slo, latency, share, state};
use shadowslice_control::controller::{ChangeOutcome, Mechanism};
use shadowslice_datapath::pipeline::Rates;

/// Returns the table's head and a row for each model. Omits columns that do not fit, according to
/// their rank.
pub(super) fn table(models: &[TopModel], width: usize) -> Vec<String> {
    aligned(&COLUMNS, models, width, LongCell::Cut)
}

const COLUMNS: [TableColumn<TopModel>; 18] = [
    left(0, "MODEL", |model| model.status.name.clone()),
    left(0, "M", |model| model.key.to_string()),
    left(1, "STATE", |model| state(&model.status)),
    right(0, "SHARE", |model| share(&model.status)),
    right(4, "SMS", |model| model.status.sms.to_string()),
    left(6, "BY", by),
    right(0, "REQ/S", requests),
    right(7, "P50 MS", |model| busy(model, || latency(&model.status, model.status.latency_ms.p50))),
    right(2, "P99 MS", |model| busy(model, || latency(&model.status, model.status.latency_ms.p99))),
    right(1, "IN SLO", |model| busy(model, || in_slo(&model.status))),
    right(5, "QUEUE", |model| figures::count(model.status.queue as u64)),
    right(3, "REF/S", |model| rate(model, |rates| rates.refused)),
    right(8, "WAIT MS", |model| {
        model.since.and_then(|since| since.wait_ms).map_or("-".to_owned(), figures::ms)
    }),
    right(9, "FAIL/S", |model| rate(model, |rates| rates.failed)),
    right(10, "SLO MS", |model| figures::ms(model.status.slo.latency_ms)),
    left(11, "LAST CHANGE", last_change),
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

fn requests(model: &TopModel) -> String {
    match model.status.rates {
        _ if model.status.slo.attainment.is_none() => "-".to_owned(),
        _ if model.is_idle() => "idle".to_owned(),
        Some(rates) => figures::rate(rates.requests),
        None => "...".to_owned(),
    }
}

fn rate(model: &TopModel, of: fn(&Rates) -> f64) -> String {
    let rate = model.status.rates.as_ref().map(of).filter(|_| !model.is_idle());
    rate.map_or("-".to_owned(), figures::rate)
}

fn busy(model: &TopModel, figure: impl Fn() -> String) -> String {
    if model.is_idle() { "-".to_owned() } else { figure() }
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
