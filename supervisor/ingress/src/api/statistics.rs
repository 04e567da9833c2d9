//! The statistics of models, in the form of Triton.

use std::time::SystemTime;

use super::model::find;
use crate::admission::RequestError;
use crate::proto;
use shadowslice_datapath::pipeline::{Total, Totals};
use shadowslice_datapath::router::{Route, Router};

/// Returns the statistics of a model, or of all models if the name is empty.
pub(super) fn of(
    router: &Router,
    name: &str,
    version: &str,
) -> Result<proto::ModelStatisticsResponse, RequestError> {
    let models = match name {
        "" => router.all_versions(),
        name => vec![(name.to_owned(), find(router, name, version)?)],
    };
    let models = models.into_iter().map(|(name, route)| model(name, &route));
    Ok(proto::ModelStatisticsResponse { model_stats: models.collect() })
}

fn model(name: String, route: &Route) -> proto::ModelStatistics {
    let totals = &route.pipeline().totals();
    let cache = totals.cache.unwrap_or_default();
    let sums = &totals.durations;
    let part = |time| duration(Total { count: sums.count, time });
    let batch_stats = totals.by_rows.iter().map(|(&rows, steps)| proto::InferBatchStatistics {
        batch_size: rows.into(),
        compute_input: duration(steps.input),
        compute_infer: duration(steps.infer),
        compute_output: duration(steps.output),
    });
    proto::ModelStatistics {
        name,
        version: route.pipeline().version().to_string(),
        last_inference: last_inference(totals),
        inference_count: totals.rows,
        execution_count: totals.batch_execution.count,
        inference_stats: Some(proto::InferStatistics {
            success: part(sums.request),
            fail: duration(totals.fail),
            queue: part(sums.queue),
            compute_input: part(sums.compute_input),
            compute_infer: part(sums.compute_infer),
            compute_output: part(sums.compute_output),
            cache_hit: duration(cache.hits),
            cache_miss: duration(cache.misses),
        }),
        batch_stats: batch_stats.collect(),
        ..Default::default()
    }
}

fn duration(Total { count, time }: Total) -> Option<proto::StatisticDuration> {
    let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    Some(proto::StatisticDuration { count, ns })
}

/// Returns the time of the last answer in ms since 1970, or 0 before the first answer.
fn last_inference(totals: &Totals) -> u64 {
    let since = totals.last.and_then(|last| last.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
