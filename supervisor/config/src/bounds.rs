//! Checks the bounds of a client's changes to a model. A client cannot take more resources from
//! other models than the operator's file allows. This module does no I/O.

use super::types::{BatchConfig, ModelConfig, OnLate};
use super::units::show_size;

/// A key that a client is allowed to change within the bounds of the operator's file.
struct Bound {
    key: &'static str,
    /// True if the client changes the value. A value that the client does not change is accepted
    /// even if it is out of bounds. It may be out of bounds after a failed reload.
    differs: bool,
    within: bool,
    /// The allowed values, as the error message shows them.
    allowed: String,
}

/// Returns a message for each key that is out of bounds. `old` is the current model, and `written`
/// is the model in the operator's file.
pub(super) fn beyond(old: &ModelConfig, new: &ModelConfig, written: &ModelConfig) -> Vec<String> {
    let bounds = of_the_gpu(old, new, written).into_iter().chain(of_requests(old, new, written));
    let beyond = bounds.filter(|bound| bound.differs && !bound.within);
    beyond.map(|Bound { key, allowed, .. }| format!("{key}: a client may only set {allowed}")).collect()
}

fn of_the_gpu(old: &ModelConfig, new: &ModelConfig, written: &ModelConfig) -> [Bound; 5] {
    let batch = |model: &ModelConfig| model.batch.max.unwrap_or(BatchConfig::DEFAULT_MAX);
    [
        Bound {
            key: "share.min",
            differs: new.share.min != old.share.min,
            within: new.share.min == written.share.min,
            allowed: format!("the configured value, {}", written.share.min),
        },
        Bound {
            key: "share.max",
            differs: new.share.max != old.share.max,
            within: new.share.max <= written.share.max,
            allowed: format!("at most the configured value, {}", written.share.max),
        },
        Bound {
            key: "priority",
            differs: new.priority != old.priority,
            within: new.priority >= written.priority,
            allowed: format!("the configured value, {}, or a larger number", written.priority),
        },
        Bound {
            key: "standby",
            differs: new.standby != old.standby,
            within: !new.standby || written.standby,
            allowed: "the configured value, \"off\"".to_owned(),
        },
        Bound {
            key: "batch.max",
            differs: new.batch.max != old.batch.max,
            within: batch(new) <= batch(written),
            allowed: format!("at most the configured value, {}", batch(written)),
        },
    ]
}

fn of_requests(old: &ModelConfig, new: &ModelConfig, written: &ModelConfig) -> [Bound; 3] {
    let (was, queue, most) = (old.queue, new.queue, written.queue);
    [
        Bound {
            key: "queue.max_requests",
            differs: queue.max_requests != was.max_requests,
            within: queue.max_requests <= most.max_requests,
            allowed: format!("at most the configured value, {}", most.max_requests),
        },
        Bound {
            key: "queue.memory",
            differs: queue.memory != was.memory,
            within: queue.memory <= most.memory,
            allowed: format!("at most the configured value, {}", show_size(most.memory)),
        },
        Bound {
            key: "queue.on_late",
            differs: queue.on_late != was.on_late,
            within: queue.on_late == OnLate::Reject || most.on_late == OnLate::Serve,
            allowed: "the configured value, \"reject\"".to_owned(),
        },
    ]
}
