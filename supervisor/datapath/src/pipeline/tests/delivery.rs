//! What counts when: a request's time begins with its first byte and ends as its client's socket has
//! the answer.

use std::time::Instant;

use super::*;
use crate::pipeline::Counts;

type Answered = Result<(Vec<Output>, Delivery), Failure>;

/// An answer that its client takes at once.
pub(super) fn written((outputs, mut delivery): (Vec<Output>, Delivery)) -> Vec<Output> {
    delivery.written();
    outputs
}

/// Asks with a request whose first byte was read `took` ago.
fn ask(stage: &Stage, took: Duration, terms: RequestOptions) -> JoinHandle<Answered> {
    let pipeline = Arc::clone(&stage.pipeline);
    let coming = Coming { began: Instant::now().checked_sub(took).unwrap(), ..Coming::now(None) };
    tokio::spawn(async move {
        let input = Input { shape: vec![1, 1], data: vec![0; 4].into() };
        pipeline.infer(vec![input], terms, coming).await
    })
}

/// A request that was answered and whose answer is not written yet.
async fn answered(stage: &Stage, worker: &Actor) -> Delivery {
    let asked = ask(stage, Duration::ZERO, RequestOptions::default());
    worker.answer_well(&worker.batch().await);
    let (outputs, delivery) = asked.await.unwrap().unwrap();
    assert_eq!(outputs, good());
    delivery
}

/// Succeeded, within the SLO, failed, cancelled.
fn ends(stage: &Stage) -> [u64; 4] {
    let Counts { succeeded, within_slo, failed, cancelled, .. } = stage.pipeline.report().counts;
    [succeeded, within_slo, failed, cancelled]
}

fn with_slo(slo: Duration) -> Stage {
    Stage::with(|settings| settings.live.slo.latency = slo)
}

#[tokio::test]
async fn an_answer_counts_when_it_has_been_written_and_then_with_all_its_time() {
    let stage = with_slo(Duration::from_secs(60));
    let worker = stage.enter(1);
    let begun = stage.pipeline.now();
    let mut delivery = answered(&stage, &worker).await;
    assert_eq!((ends(&stage), stage.pipeline.observe().answered), ([0; 4], 0));
    let until_answered = stage.pipeline.now().since(begun);
    while stage.pipeline.now().since(begun) < 2 * until_answered {
        tokio::task::yield_now().await;
    }
    delivery.written();
    drop(delivery);
    assert_eq!(ends(&stage), [1, 1, 0, 0]);
    let (seen, totals) = (stage.pipeline.observe(), stage.pipeline.totals());
    assert_eq!((seen.answered, seen.in_time), (1, 1));
    let (latency, here) = (totals.latency.sum(), totals.durations.request);
    assert!(latency > until_answered && here <= until_answered, "{until_answered:?}: {totals:?}");
    assert!(totals.writing.time > Duration::ZERO && here + totals.writing.time <= latency, "{totals:?}");
    assert_eq!(seen.mean_latency, latency);
    assert_eq!((totals.writing.count, totals.latency.count(), totals.durations.count), (1, 1, 1));
}

fn nothing_keeps_the_slo(stage: &Stage) {
    let slo = SloTarget { latency: Duration::from_nanos(1), ..settings().live.slo };
    stage.pipeline.set_live_settings(LiveSettings { slo, ..settings().live });
}

#[tokio::test]
async fn an_answer_keeps_the_slo_under_which_it_was_written() {
    let stage = with_slo(Duration::from_secs(60));
    let worker = stage.enter(1);
    answered(&stage, &worker).await.written();
    nothing_keeps_the_slo(&stage);
    assert_eq!(ends(&stage), [1, 1, 0, 0]);
    assert_eq!(stage.pipeline.observe().missed(), 0);
}

#[tokio::test]
async fn an_answer_that_is_written_after_the_slo_is_a_miss() {
    let stage = with_slo(Duration::from_secs(60));
    let worker = stage.enter(1);
    let mut delivery = answered(&stage, &worker).await;
    // As if a minute had passed.
    nothing_keeps_the_slo(&stage);
    delivery.written();
    assert_eq!(ends(&stage), [1, 0, 0, 0]);
    let seen = stage.pipeline.observe();
    assert_eq!((seen.answered, seen.in_time, seen.missed()), (1, 0, 1));
    assert_eq!(stage.pipeline.report().latencies.attainment, 0.0);
}

#[tokio::test]
async fn a_client_that_leaves_before_it_has_its_answer_has_given_it_up() {
    for (slo, missed) in [(Duration::from_secs(60), 0), (Duration::from_nanos(1), 1)] {
        let stage = with_slo(slo);
        let worker = stage.enter(1);
        drop(answered(&stage, &worker).await);
        assert_eq!(ends(&stage), [0, 0, 0, 1]);
        let seen = stage.pipeline.observe();
        assert_eq!((seen.answered, seen.missed()), (0, missed));
        assert_eq!(stage.pipeline.totals().latency.count(), 0);
    }
}

#[tokio::test]
async fn an_answer_that_cannot_be_written_has_failed() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let mut delivery = answered(&stage, &worker).await;
    delivery.failed();
    drop(delivery);
    assert_eq!(ends(&stage), [0, 0, 1, 0]);
    answered(&stage, &worker).await.invalid();
    assert_eq!((ends(&stage), stage.pipeline.report().counts.invalid), ([0, 0, 1, 0], 1));
}

#[tokio::test]
async fn a_client_that_leaves_as_its_answer_comes_is_counted_once() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let asked = ask(&stage, Duration::ZERO, RequestOptions::default());
    worker.answer_well(&worker.batch().await);
    asked.abort();
    // Whichever was first: without an answer on its way, or with one.
    if let Ok(answered) = asked.await {
        drop(answered);
    }
    while ends(&stage) == [0; 4] {
        tokio::task::yield_now().await;
    }
    assert_eq!(ends(&stage), [0, 0, 0, 1]);
}

#[tokio::test]
async fn ends_are_counted_however_many_wait_for_it() {
    let stage = with_slo(Duration::from_secs(60));
    let worker = stage.enter(1);
    for n in 0..150 {
        let mut delivery = answered(&stage, &worker).await;
        if n % 3 > 0 {
            delivery.written();
        }
    }
    assert!(stage.pipeline.endings.lock().len() < 64);
    assert_eq!(ends(&stage), [100, 100, 0, 50]);
    assert!(stage.pipeline.endings.lock().is_empty());
}

/// What counts, of the way and as latency, for a request that took half a minute to arrive.
async fn half_a_minute(terms: RequestOptions) -> (Duration, Duration) {
    let stage = with_slo(Duration::from_secs(100));
    let worker = stage.enter(1);
    let asked = ask(&stage, UPTIME, terms);
    worker.answer_well(&worker.batch().await);
    assert_eq!(asked.await.unwrap().map(written), Ok(good()));
    let totals = stage.pipeline.totals();
    (totals.coming.time, totals.latency.sum())
}

#[tokio::test]
async fn all_the_time_counts_in_which_a_request_arrives() {
    for timeout in [None, Some(Duration::from_secs(40))] {
        let (coming, latency) = half_a_minute(RequestOptions { timeout, ..Default::default() }).await;
        assert!(coming >= UPTIME && latency >= UPTIME, "{coming:?}, {latency:?}");
    }
}

#[tokio::test]
async fn a_timeout_begins_with_the_first_byte() {
    let stage = with_slo(Duration::from_secs(100));
    let worker = stage.enter(1);
    let terms = RequestOptions { timeout: Some(UPTIME), ..Default::default() };
    let asked = ask(&stage, UPTIME, terms);
    let outcome = tokio::time::timeout(UPTIME / 3, asked).await.unwrap().unwrap();
    assert!(matches!(outcome, Err(Failure::TimedOut(_))), "{outcome:?}");
    worker.answer_well(&worker.batch().await);
    assert_eq!(ends(&stage), [0, 0, 1, 0]);
}

#[tokio::test]
async fn who_came_slowly_is_due_sooner_than_those_behind_it() {
    let stage = with_slo(Duration::from_secs(100));
    let worker = stage.enter(1);
    let first = stage.ask();
    let batch = worker.batch().await;
    let second = stage.ask();
    stage.until((0, 2)).await;
    // Each fills a batch of its own: by priority 1 before the others they go by their deadlines.
    let wide = |took: Duration| {
        let pipeline = Arc::clone(&stage.pipeline);
        let coming = Coming { began: Instant::now().checked_sub(took).unwrap(), ..Coming::now(None) };
        tokio::spawn(async move {
            let input = Input { shape: vec![8, 1], data: vec![0; 32].into() };
            pipeline.infer(vec![input], RequestOptions::default(), coming).await.map(drop)
        })
    };
    let quick = wide(Duration::ZERO);
    stage.until((1, 2)).await;
    let slow = wide(Duration::from_secs(20));
    stage.until((2, 2)).await;
    worker.answer_well(&batch);
    worker.answer_well(&worker.batch().await);
    worker.answer(worker.batch().await.id, Err(RunFailure::Engine("the first".into())));
    let sooner = tokio::select! {
        _ = quick => "quick",
        _ = slow => "slow",
    };
    assert_eq!(sooner, "slow");
    for request in [first, second] {
        assert_eq!(request.await.unwrap(), Ok(good()));
    }
}
