//! Answers from the cache of a model.

use super::*;

fn cached() -> Stage {
    Stage::with(|settings| settings.cache = Some(1 << 20))
}

#[tokio::test]
async fn a_repeated_request_gets_the_same_answer_without_a_worker() {
    let stage = cached();
    let worker = stage.enter(1);
    let data = |byte| Bytes::from(vec![byte; 4]);
    let first = stage.request_with(data(1));
    worker.answer_well(&worker.batch().await);
    assert_eq!(first.await.unwrap(), Ok(good()));
    // The worker answers nothing more.
    assert_eq!(stage.request_with(data(1)).await.unwrap(), Ok(good()));
    let other = stage.request_with(data(2));
    worker.answer(worker.batch().await.id, Err(RunFailure::Engine("broken".into())));
    assert!(other.await.unwrap().is_err());
    // A failure is not stored.
    let again = stage.request_with(data(2));
    worker.answer_well(&worker.batch().await);
    assert_eq!(again.await.unwrap(), Ok(good()));
    let (counts, totals) = (stage.pipeline.report().counts, stage.pipeline.totals());
    assert_eq!((counts.accepted, counts.succeeded, counts.failed), (4, 3, 1));
    let cache = totals.cache.unwrap();
    assert_eq!((cache.hits.count, cache.misses.count, totals.batch_execution.count), (1, 3, 2));
    assert_eq!(totals.latency.count(), 3);
}

#[tokio::test]
async fn the_cache_answers_while_no_worker_runs() {
    let stage = cached();
    let worker = stage.enter(1);
    let first = stage.request();
    worker.answer_well(&worker.batch().await);
    first.await.unwrap().unwrap();
    drop(worker);
    assert_eq!(stage.request().await.unwrap(), Ok(good()));
}

#[tokio::test]
async fn a_model_that_is_not_ready_answers_nothing_from_its_cache() {
    let stage = cached();
    let worker = stage.enter(1);
    let first = stage.request();
    worker.answer_well(&worker.batch().await);
    first.await.unwrap().unwrap();
    stage.pipeline.shut("it ends");
    assert!(matches!(stage.request().await.unwrap(), Err(RequestFailure::Unavailable(_))));
}

#[tokio::test]
async fn without_a_cache_every_request_reaches_the_worker() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    for _ in 0..2 {
        let request = stage.request();
        worker.answer_well(&worker.batch().await);
        request.await.unwrap().unwrap();
    }
    assert_eq!(stage.pipeline.totals().cache, None);
}
