//! Tests the recorded steps of traced requests.

use super::*;
use crate::trace::{Journal, LostReason, RouteChange, RunEnd};

/// Sends a traced request.
fn request(stage: &Stage) -> (JoinHandle<Result<Vec<RequestOutput>, RequestFailure>>, Journal) {
    let (pipeline, journal) = (Arc::clone(&stage.pipeline), Journal::default());
    let input = RequestInput { shape: vec![1, 1], data: Bytes::from_static(&[1, 0, 0, 0]).into() };
    let noted = journal.clone();
    let reply = tokio::spawn(async move {
        pipeline
            .infer(vec![input], RequestOptions::default(), RequestArrival::now(Some(noted)))
            .await
            .map(written)
    });
    (reply, journal)
}

#[tokio::test]
async fn a_death_and_the_retry_after_it_are_recorded_with_the_worker() {
    let stage = Stage::new();
    let first = stage.enter(1);
    let (reply, journal) = request(&stage);
    first.batch().await;
    drop(first);
    stage.until((1, 0)).await;
    let second = stage.enter(2);
    second.answer_well(&second.batch().await);
    assert_eq!(reply.await.unwrap(), Ok(good()));
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
async fn a_hand_over_during_a_request_is_recorded_and_an_earlier_one_is_not() {
    let stage = Stage::new();
    let old = stage.enter(1);
    let (under, journal) = request(&stage);
    let batch = old.batch().await;
    let new = stage.enter(2);
    old.answer_well(&batch);
    assert_eq!(under.await.unwrap(), Ok(good()));
    let route_change = journal.take().route_change;
    assert!(matches!(route_change, Some(RouteChange { from: Some(1), to: 2, .. })), "{route_change:?}");
    let (after, journal) = request(&stage);
    new.answer_well(&new.batch().await);
    assert_eq!(after.await.unwrap(), Ok(good()));
    assert_eq!(journal.take().route_change, None);
}

#[tokio::test]
async fn batches_taken_back_and_failed_batches_are_recorded_as_such() {
    let stage = Stage::new();
    let old = stage.enter(1);
    let (reply, journal) = request(&stage);
    old.batch().await;
    let new = stage.enter(2);
    stage.pipeline.requeue(WorkerId(1));
    let batch = new.batch().await;
    new.answer(batch.id, Err(RunFailure::Engine("no".to_owned())));
    assert!(reply.await.unwrap().is_err());
    let attempts = journal.take().attempts;
    let whys = attempts.iter().map(|one| match one.run.as_ref().unwrap().end {
        RunEnd::Lost { why, .. } => Some(why),
        _ => None,
    });
    assert_eq!(whys.collect::<Vec<_>>(), [Some(LostReason::TakenBack), Some(LostReason::Failed)]);
}

#[tokio::test]
async fn the_reason_for_a_refusal_is_recorded() {
    let stage = Stage::new();
    let _worker = stage.enter(1);
    let fill: Vec<_> = (0..2).map(|_| stage.request()).collect();
    stage.until((0, 2)).await;
    let wait: Vec<_> = (0..4).map(|_| stage.request()).collect();
    stage.until((4, 2)).await;
    let (reply, journal) = request(&stage);
    assert!(reply.await.unwrap().is_err());
    let trace = journal.take();
    assert_eq!((trace.refusal, trace.attempts.len()), (Some("queue_full"), 0));
    stage.pipeline.shut("it goes");
    let (reply, journal) = request(&stage);
    assert!(reply.await.unwrap().is_err());
    assert_eq!(journal.take().refusal, Some("not_ready"));
    drop((fill, wait));
}

#[tokio::test]
async fn a_cancelled_request_is_recorded_up_to_its_cancellation() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let (reply, journal) = request(&stage);
    let batch = worker.batch().await;
    reply.abort();
    assert!(reply.await.is_err());
    let trace = journal.take();
    assert_eq!(trace.attempts[0].run.as_ref().map(|run| run.end), Some(RunEnd::Open));
    worker.answer_well(&batch);
    stage.until((0, 0)).await;
}
