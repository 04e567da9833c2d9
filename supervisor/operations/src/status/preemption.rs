//! The pauses of a model's batches for batches of other models, in `shadowslice status` and `plan`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shadowslice_datapath::pipeline::{PauseTotal, Pipeline};
use shadowslice_shared::units::ms;

use crate::figures;

/// The pauses of a model's batches since the start.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PreemptionStatus {
    /// The number of pieces into which the worker cuts the largest batch. `None` if batches never pause.
    pub pieces: Option<u32>,
    /// The reason why batches never pause.
    pub uncut: Option<String>,
    /// The pauses by the models for which batches paused.
    pub paused: Vec<PreemptedFor>,
}

/// The pauses for one other model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreemptedFor {
    /// The model for which batches paused.
    #[serde(rename = "for")]
    pub model: String,
    /// The number of pauses.
    pub count: u64,
    /// The total time of the pauses, in ms.
    pub total_ms: f64,
    /// The longest pause, in ms.
    pub longest_ms: f64,
}

impl PreemptionStatus {
    pub(super) fn of(pieces: Result<u32, String>, pauses: &[(Arc<str>, PauseTotal)]) -> Self {
        let paused = |(model, total): &(Arc<str>, PauseTotal)| PreemptedFor {
            model: model.to_string(),
            count: total.count,
            total_ms: ms(total.time),
            longest_ms: ms(total.longest),
        };
        let uncut = pieces.as_ref().err().cloned();
        Self { pieces: pieces.ok(), uncut, paused: pauses.iter().map(paused).collect() }
    }

    /// Describes the pauses. Returns `None` if there were none.
    pub(crate) fn describe(&self) -> Option<String> {
        let texts: Vec<_> = self.paused.iter().map(PreemptedFor::describe).collect();
        (!texts.is_empty()).then(|| format!("batches paused {}", texts.join(" and ")))
    }
}

/// Describes the pauses of a model's batches. Returns `None` if there were none.
pub(crate) fn pauses(pipeline: &Pipeline) -> Option<String> {
    PreemptionStatus::of(Ok(0), &pipeline.report().pauses).describe()
}

impl PreemptedFor {
    fn describe(&self) -> String {
        let Self { model, count, total_ms, longest_ms } = self;
        let mean = figures::ms(total_ms / (*count).max(1) as f64);
        let (count, longest) = (figures::count(*count), figures::ms(*longest_ms));
        format!("{count} times for {model} ({mean} ms on average, at most {longest} ms)")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn pauses_are_counted_by_the_model_for_which_they_were() {
        let total =
            PauseTotal { count: 4, time: Duration::from_millis(6), longest: Duration::from_millis(3) };
        let status = PreemptionStatus::of(Ok(8), &[("search".into(), total), ("ads".into(), total)]);
        assert_eq!((status.pieces, status.paused[1].total_ms), (Some(8), 6.0));
        let text = status.describe().unwrap();
        assert!(
            text.starts_with("batches paused 4 times for search (1.5 ms on average, at most 3"),
            "{text}"
        );
        assert!(text.contains(" and 4 times for ads"), "{text}");
    }

    #[test]
    fn a_model_that_is_not_cut_says_why() {
        let status = PreemptionStatus::of(Err("no recordings".to_owned()), &[]);
        assert_eq!((status.pieces, status.uncut.as_deref()), (None, Some("no recordings")));
        assert_eq!(status.describe(), None);
    }
}
