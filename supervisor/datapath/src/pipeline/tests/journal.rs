//! The notes on requests that are traced.

use super::*;
use crate::trace::{Journal, LostReason, RouteChange, RunEnd};

/// Asks a traced request.
fn ask(stage: &Stage) -> (JoinHandle<Result<Vec<OutputTensor>, RequestFailure>>, Journal) {
    let (pipeline, journal) = (Arc::clone(&stage.pipeline), Journal::default());
    let input = InputTensor { shape: vec![1, 1], data: Bytes::from_static(&[1, 0, 0, 0]).into() };
    let noted = journal.clone();
    let asked = tokio::spawn(async move {
        pipeline
            .infer(vec![input], RequestOptions::default(), RequestArrival::now(Some(noted)))
            .await
            .map(written)
    });
    (asked, journal)
}

#[tokio::test]
async fn a_death_and_the_retry_after_it_are_noted_with_the_worker() {
    let stage = Stage::new();
    let first = stage.enter(1);
    let (asked, journal) = ask(&stage);
    first.batch().await;
    drop(first);
    stage.until((1, 0)).await;
    let second = stage.enter(2);
    second.answer_well(&second.batch().await);
    assert_eq!(asked.await.unwrap(), Ok(good()));
    let trace = journal.take();
    assert_eq!((trace.rows, trace.retries, trace.refusal), (Some(1), 1, None));
    let [died, answered] = &trace.attempts[..] else { panic!("{trace:?}") };
    let (died, answered) = (died.run.as_ref().unwrap(), answered.run.as_ref().unwrap());
    assert!(matches!(died.end, RunEnd::Lost { why: LostReason::Died, .. }), "{died:?}");
    assert!(matches!(answered.end, RunEnd::Answered { .. }), "{answered:?}");
    assert_eq!((died.location.worker, answered.location.worker), (1, 2));
    assert_eq!((answered.rows, answered.requests, answered.location.sms), (1, 1, Sms(10)));
    assert!(matches!(trace.route_change, Some(RouteChange { from: None, to: 2, .. })), "{trace:?}");
}

#[tokio::test]
async fn a_hand_over_underneath_is_noted_and_one_before_is_not() {
    let stage = Stage::new();
    let old = stage.enter(1);
    let (under, journal) = ask(&stage);
    let batch = old.batch().await;
    let new = stage.enter(2);
    old.answer_well(&batch);
    assert_eq!(under.await.unwrap(), Ok(good()));
    let route_change = journal.take().route_change;
    assert!(matches!(route_change, Some(RouteChange { from: Some(1), to: 2, .. })), "{route_change:?}");
    let (after, journal) = ask(&stage);
    new.answer_well(&new.batch().await);
    assert_eq!(after.await.unwrap(), Ok(good()));
    assert_eq!(journal.take().route_change, None);
}

#[tokio::test]
async fn a_batch_that_is_taken_back_or_fails_is_told_apart() {
    let stage = Stage::new();
    let old = stage.enter(1);
    let (asked, journal) = ask(&stage);
    old.batch().await;
    let new = stage.enter(2);
    stage.pipeline.requeue(WorkerId(1));
    let batch = new.batch().await;
    new.answer(batch.id, Err(RunFailure::Engine("no".to_owned())));
    assert!(asked.await.unwrap().is_err());
    let attempts = journal.take().attempts;
    let whys = attempts.iter().map(|one| match one.run.as_ref().unwrap().end {
        RunEnd::Lost { why, .. } => Some(why),
        _ => None,
    });
    assert_eq!(whys.collect::<Vec<_>>(), [Some(LostReason::TakenBack), Some(LostReason::Failed)]);
}

#[tokio::test]
async fn why_a_request_was_turned_away_is_noted() {
    let stage = Stage::new();
    let _worker = stage.enter(1);
    let fill: Vec<_> = (0..2).map(|_| stage.ask()).collect();
    stage.until((0, 2)).await;
    let wait: Vec<_> = (0..4).map(|_| stage.ask()).collect();
    stage.until((4, 2)).await;
    let (asked, journal) = ask(&stage);
    assert!(asked.await.unwrap().is_err());
    let trace = journal.take();
    assert_eq!((trace.refusal, trace.attempts.len()), (Some("queue_full"), 0));
    stage.pipeline.shut("it goes");
    let (asked, journal) = ask(&stage);
    assert!(asked.await.unwrap().is_err());
    assert_eq!(journal.take().refusal, Some("not_ready"));
    drop((fill, wait));
}

#[tokio::test]
async fn a_request_that_was_given_up_is_told_as_far_as_it_came() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let (asked, journal) = ask(&stage);
    let batch = worker.batch().await;
    asked.abort();
    assert!(asked.await.is_err());
    let trace = journal.take();
    assert_eq!(trace.attempts[0].run.as_ref().map(|run| run.end), Some(RunEnd::Open));
    worker.answer_well(&batch);
    stage.until((0, 0)).await;
}
