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
    let journey = journal.take();
    assert_eq!((journey.rows, journey.retries, journey.refusal), (Some(1), 1, None));
    let [died, answered] = &journey.tries[..] else { panic!("{journey:?}") };
    let (died, answered) = (died.ran.as_ref().unwrap(), answered.ran.as_ref().unwrap());
    assert!(matches!(died.ending, RunEnd::Lost { why: LostReason::Died, .. }), "{died:?}");
    assert!(matches!(answered.ending, RunEnd::Answered { .. }), "{answered:?}");
    assert_eq!((died.place.worker, answered.place.worker), (1, 2));
    assert_eq!((answered.rows, answered.requests, answered.place.sms), (1, 1, Sms(10)));
    assert!(matches!(journey.handover, Some(RouteChange { from: None, to: 2, .. })), "{journey:?}");
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
    let handover = journal.take().handover;
    assert!(matches!(handover, Some(RouteChange { from: Some(1), to: 2, .. })), "{handover:?}");
    let (after, journal) = ask(&stage);
    new.answer_well(&new.batch().await);
    assert_eq!(after.await.unwrap(), Ok(good()));
    assert_eq!(journal.take().handover, None);
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
    let tries = journal.take().tries;
    let whys = tries.iter().map(|one| match one.ran.as_ref().unwrap().ending {
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
    let journey = journal.take();
    assert_eq!((journey.refusal, journey.tries.len()), (Some("queue_full"), 0));
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
    let journey = journal.take();
    assert_eq!(journey.tries[0].ran.as_ref().map(|ran| ran.ending), Some(RunEnd::Open));
    worker.answer_well(&batch);
    stage.until((0, 0)).await;
}
