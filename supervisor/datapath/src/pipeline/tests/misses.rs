//! Tests which requests count as misses of the SLO.

use super::*;

/// Returns the attainment of the model's SLO, and the number of misses that the sharing policy
/// observes.
fn attainment_and_misses(stage: &Stage) -> (f64, u64) {
    (
        stage.pipeline.report().latencies.traffic.counts.attainment().unwrap_or(1.0),
        stage.pipeline.observe().missed(),
    )
}

#[tokio::test]
async fn an_input_that_the_engine_refuses_is_its_clients_fault() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let good_one = stage.request();
    worker.answer_well(&worker.batch().await);
    assert_eq!(good_one.await.unwrap(), Ok(good()));
    let bad_one = stage.request();
    worker.answer(worker.batch().await.id, Err(RunFailure::Input("no such token".to_owned())));
    let refused = bad_one.await.unwrap();
    assert!(
        matches!(&refused, Err(RequestFailure::Invalid(why)) if why.contains("no such token")),
        "{refused:?}"
    );
    assert_eq!(attainment_and_misses(&stage), (1.0, 0));
    let broken = stage.request();
    worker.answer(worker.batch().await.id, Err(RunFailure::Engine("it broke".to_owned())));
    assert!(matches!(broken.await.unwrap(), Err(RequestFailure::Internal(_))));
    assert_eq!(attainment_and_misses(&stage).0, 0.5);
    let counts = stage.pipeline.report().counts;
    assert_eq!((counts.succeeded, counts.invalid, counts.failed, counts.rejected), (1, 1, 1, 0));
}

#[tokio::test]
async fn a_request_that_never_fits_is_its_clients_fault() {
    let stage = Stage::new();
    let too_large = stage.request_with(Bytes::from(vec![0; MEMORY_BYTES + 1])).await.unwrap();
    assert!(matches!(too_large, Err(RequestFailure::Invalid(_))), "{too_large:?}");
    assert_eq!(attainment_and_misses(&stage), (1.0, 0));
}

#[tokio::test]
async fn a_refusal_as_not_ready_misses_the_slo_and_is_hidden_from_the_policy() {
    let stage = Stage::new();
    let waits = stage.request();
    stage.until((1, 0)).await;
    stage.pipeline.shut("it broke");
    for refused in [waits.await.unwrap(), stage.request().await.unwrap()] {
        assert!(
            matches!(&refused, Err(RequestFailure::Unavailable(why)) if why.contains("broke")),
            "{refused:?}"
        );
    }
    let counts = stage.pipeline.report().counts;
    assert_eq!((counts.accepted, counts.failed, counts.rejected), (1, 0, 2));
    assert_eq!(attainment_and_misses(&stage), (0.0, 0));
}

#[test]
fn a_request_for_a_model_that_no_worker_has_described_yet_counts() {
    let pipeline = Pipeline::new(settings(), Clock::start(), mpsc::channel(1).0).unwrap();
    let refused = pipeline.metadata_or_refuse(None).unwrap_err();
    assert_eq!(refused.to_string(), "model 'm' is not ready: the model is being loaded");
    pipeline.shut("its file is broken");
    let refused = pipeline.metadata_or_refuse(None).unwrap_err();
    assert_eq!(refused.to_string(), "model 'm' is not ready: its file is broken");
    assert_eq!((pipeline.report().counts.rejected, pipeline.totals().fail.count), (2, 2));
}

#[tokio::test]
async fn a_malformed_request_counts_as_invalid_and_in_no_statistics() {
    let stage = Stage::new();
    stage.pipeline.count_malformed();
    assert_eq!(stage.pipeline.report().counts.invalid, 1);
    assert_eq!(stage.pipeline.totals().fail.count, 0);
}
