//! What counts as a miss, and what does not.

use super::*;

/// What the model's SLO and its sharing policy have to say: attainment, and misses.
fn judged(stage: &Stage) -> (f64, u64) {
    (stage.pipeline.report().latencies.attainment, stage.pipeline.observe().missed())
}

#[tokio::test]
async fn an_input_that_the_engine_refuses_is_its_clients_fault() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let good_one = stage.ask();
    worker.answer_well(&worker.batch().await);
    assert_eq!(good_one.await.unwrap(), Ok(good()));
    let bad_one = stage.ask();
    worker.answer(worker.batch().await.id, Err(RunFailure::Input("no such token".to_owned())));
    let refused = bad_one.await.unwrap();
    assert!(
        matches!(&refused, Err(RequestFailure::Invalid(why)) if why.contains("no such token")),
        "{refused:?}"
    );
    assert_eq!(judged(&stage), (1.0, 0));
    let broken = stage.ask();
    worker.answer(worker.batch().await.id, Err(RunFailure::Engine("it broke".to_owned())));
    assert!(matches!(broken.await.unwrap(), Err(RequestFailure::Internal(_))));
    assert_eq!(judged(&stage).0, 0.5);
    let counts = stage.pipeline.report().counts;
    assert_eq!((counts.succeeded, counts.invalid, counts.failed, counts.rejected), (1, 1, 1, 0));
}

#[tokio::test]
async fn so_is_a_request_that_never_fits() {
    let stage = Stage::new();
    let too_large = stage.ask_with(Bytes::from(vec![0; MEMORY_BYTES + 1])).await.unwrap();
    assert!(matches!(too_large, Err(RequestFailure::Invalid(_))), "{too_large:?}");
    assert_eq!(judged(&stage), (1.0, 0));
}

#[tokio::test]
async fn what_is_refused_as_not_ready_is_a_miss_of_the_slo_and_tells_the_policy_nothing() {
    let stage = Stage::new();
    let waits = stage.ask();
    stage.until((1, 0)).await;
    stage.pipeline.shut("it broke");
    for refused in [waits.await.unwrap(), stage.ask().await.unwrap()] {
        assert!(
            matches!(&refused, Err(RequestFailure::Unavailable(why)) if why.contains("broke")),
            "{refused:?}"
        );
    }
    let counts = stage.pipeline.report().counts;
    assert_eq!((counts.accepted, counts.failed, counts.rejected), (1, 0, 2));
    assert_eq!(judged(&stage), (0.0, 0));
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
