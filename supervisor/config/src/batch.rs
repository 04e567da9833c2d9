//! Reads the keys `batch` and `queue` of models.

use std::time::Duration;

use super::keys::ON_LATE;
use super::reader::{Fields, Value};
use super::types::{BatchConfig, LimitsConfig, QueueConfig, SloTarget, batch_sizes};
use super::{Context, units};

/// Reads the batching settings. If neither `max` nor `sizes` is set, a model of the emulated engine
/// gets the default of `max`, because that engine can always batch. For other engines, `max` stays
/// `None`.
pub(super) fn batch(
    model: &Fields<'_>,
    is_emulated: bool,
    slo: &SloTarget,
    context: &Context<'_>,
) -> BatchConfig {
    let fields = model.section("batch");
    let max = fields.optional("max", Value::whole);
    let sizes = fields.optional("sizes", |value| sizes(value, max));
    let max = max.or_else(|| sizes.as_ref()?.last().copied());
    let max = max.or(is_emulated.then_some(BatchConfig::DEFAULT_MAX));
    let sizes = sizes.or_else(|| max.filter(|max| *max > 0).map(batch_sizes));
    let max_delay = fields.read("max_delay", |value| max_delay(value, slo, context));
    BatchConfig { max, sizes, max_delay }
}

/// Reads `batch.max_delay`. The delay must be below the SLO, because the time that a request waits
/// for other requests counts towards its latency.
fn max_delay(value: &Value<'_>, slo: &SloTarget, context: &Context<'_>) -> Option<Duration> {
    let delay = value.duration()?;
    let latency = units::show_duration(slo.latency);
    if delay >= slo.latency {
        value.fault(format!(
            "a batch may wait for the whole SLO of {latency}, so that its requests are late; \
             use less than half of that"
        ));
    } else if delay > slo.latency / 2 {
        context.note(
            value,
            format!(
                "a batch may wait for more than half of the SLO of {latency}, \
                 which leaves little time to run it"
            ),
        );
    }
    Some(delay)
}

fn sizes(value: &Value<'_>, max: Option<u32>) -> Option<Vec<u32>> {
    let sizes: Vec<u32> = value.items().iter().map(Value::whole).collect::<Option<_>>()?;
    match (*sizes.last()?, max) {
        (_, Some(0)) => value.fault("the model has no batch axis, because batch.max is 0; remove the key"),
        _ if !sizes.is_sorted_by(|a, b| a < b) => {
            value.fault("the sizes must ascend, for example [1, 2, 4, 8]");
        }
        (last, Some(max)) if last != max => {
            value.fault(format!("the last size, {last}, must equal batch.max, {max}; correct one of them"));
        }
        _ => {}
    }
    Some(sizes)
}

/// Reads the settings of the queue. The queue's memory must hold at least one request of the
/// largest size.
pub(super) fn queue(model: &Fields<'_>, limits: &LimitsConfig) -> QueueConfig {
    let fields = model.section("queue");
    let memory = fields.read("memory", |value| {
        let memory = value.size()?;
        if memory < limits.request_bytes {
            value.fault(format!(
                "too small for the largest request; use at least limits.request_bytes, {}, or lower that",
                units::show_size(limits.request_bytes)
            ));
        }
        Some(memory)
    });
    // The default grows with the largest request.
    let memory = memory.max(limits.request_bytes);
    fields.show("memory", units::show_size(memory));
    QueueConfig {
        max_requests: fields.read("max_requests", |value| value.whole()),
        memory,
        on_late: fields.read("on_late", |value| value.one_of(&ON_LATE)),
    }
}
