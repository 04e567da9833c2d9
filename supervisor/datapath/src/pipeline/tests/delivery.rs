//! Tests when requests are counted. A request's time starts with its first byte. It ends when the
//! client's socket has accepted the answer.

use std::time::Instant;

use super::*;
use crate::pipeline::RequestCounts;

type Answered = Result<(Vec<RequestOutput>, Delivery), RequestFailure>;

/// Marks an answer as written, like a client that accepts the answer immediately.
pub(super) fn written(answers: Answers) -> Vec<RequestOutput> {
    let (outputs, mut delivery) = answers.into_single();
    delivery.mark_written();
    outputs
}

/// Sends a request whose first byte was read at the time `took` before now.
fn request(stage: &Stage, took: Duration, options: RequestOptions) -> JoinHandle<Answered> {
    let pipeline = Arc::clone(&stage.pipeline);
    let arrival =
        RequestArrival { began: Instant::now().checked_sub(took).unwrap(), ..RequestArrival::now(None) };
    tokio::spawn(async move {
        let input = RequestInput { shape: vec![1, 1], data: vec![0; 4].into() };
        pipeline.infer(vec![input], options, arrival).await.map(Answers::into_single)
    })
}

/// Returns the delivery of a request whose answer has not been written yet.
async fn answered(stage: &Stage, worker: &Actor) -> Delivery {
    let reply = request(stage, Duration::ZERO, RequestOptions::default());
    worker.answer_well(&worker.batch().await);
    let (outputs, delivery) = reply.await.unwrap().unwrap();
    assert_eq!(outputs, good());
    delivery
}

/// Returns the numbers of requests that succeeded, succeeded within the SLO, failed and were
/// cancelled.
fn ends(stage: &Stage) -> [u64; 4] {
    let RequestCounts { succeeded, within_slo, failed, cancelled, .. } = stage.pipeline.report().counts;
    [succeeded, within_slo, failed, cancelled]
}

fn with_slo(slo: Duration) -> Stage {
    Stage::with(|settings| settings.live.slo.latency = slo)
}

#[tokio::test]
async fn an_answer_counts_with_its_whole_time_when_it_has_been_written() {
    let stage = with_slo(Duration::from_secs(60));
    let worker = stage.enter(1);
    let begun = stage.pipeline.now();
    let mut delivery = answered(&stage, &worker).await;
    assert_eq!((ends(&stage), stage.pipeline.observe().answered), ([0; 4], 0));
    let until_answered = stage.pipeline.now().since(begun);
    while stage.pipeline.now().since(begun) < 2 * until_answered {
        tokio::task::yield_now().await;
    }
    delivery.mark_written();
    drop(delivery);
    assert_eq!(ends(&stage), [1, 1, 0, 0]);
    let (seen, totals) = (stage.pipeline.observe(), stage.pipeline.totals());
    assert_eq!((seen.answered, seen.attainment), (1, Some(1.0)));
    let (latency, here) = (totals.latency.sum(), totals.durations.request);
    assert!(latency > until_answered && here <= until_answered, "{until_answered:?}: {totals:?}");
    assert!(totals.writing.time > Duration::ZERO && here + totals.writing.time <= latency, "{totals:?}");
    assert_eq!(seen.mean_latency, latency);
    assert_eq!((totals.writing.count, totals.latency.count(), totals.durations.count), (1, 1, 1));
}

fn set_unreachable_slo(stage: &Stage) {
    let slo = SloTarget { latency: Duration::from_nanos(1), ..settings().live.slo };
    stage.pipeline.set_live_settings(LiveSettings { slo, ..settings().live });
}

#[tokio::test]
async fn an_answer_keeps_the_slo_under_which_it_was_written() {
    let stage = with_slo(Duration::from_secs(60));
    let worker = stage.enter(1);
    answered(&stage, &worker).await.mark_written();
    set_unreachable_slo(&stage);
    assert_eq!(ends(&stage), [1, 1, 0, 0]);
    assert_eq!(stage.pipeline.observe().missed(), 0);
}

#[tokio::test]
async fn an_answer_that_is_written_after_the_slo_is_a_miss() {
    let stage = with_slo(Duration::from_secs(60));
    let worker = stage.enter(1);
    let mut delivery = answered(&stage, &worker).await;
    // A tiny SLO has the same effect as a long delay.
    set_unreachable_slo(&stage);
    delivery.mark_written();
    assert_eq!(ends(&stage), [1, 0, 0, 0]);
    let seen = stage.pipeline.observe();
    assert_eq!((seen.answered, seen.attainment, seen.missed()), (1, Some(0.0), 1));
    assert_eq!(stage.pipeline.report().latencies.traffic.counts.attainment(), Some(0.0));
}

#[tokio::test]
async fn a_client_that_disconnects_before_its_answer_has_cancelled() {
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
    delivery.mark_failed();
    drop(delivery);
    assert_eq!(ends(&stage), [0, 0, 1, 0]);
    answered(&stage, &worker).await.mark_invalid();
    assert_eq!((ends(&stage), stage.pipeline.report().counts.invalid), ([0, 0, 1, 0], 1));
}

#[tokio::test]
async fn a_client_that_disconnects_as_its_answer_arrives_is_counted_once() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let reply = request(&stage, Duration::ZERO, RequestOptions::default());
    worker.answer_well(&worker.batch().await);
    reply.abort();
    // The task may end with or without an answer, because the answer and the abort may arrive in
    // any order.
    if let Ok(answered) = reply.await {
        drop(answered);
    }
    while ends(&stage) == [0; 4] {
        tokio::task::yield_now().await;
    }
    assert_eq!(ends(&stage), [0, 0, 0, 1]);
}

#[tokio::test]
async fn any_number_of_ends_is_counted() {
    let stage = with_slo(Duration::from_secs(60));
    let worker = stage.enter(1);
    for n in 0..150 {
        let mut delivery = answered(&stage, &worker).await;
        if n % 3 > 0 {
            delivery.mark_written();
        }
    }
    assert!(stage.pipeline.endings.lock().len() < 64);
    assert_eq!(ends(&stage), [100, 100, 0, 50]);
    assert!(stage.pipeline.endings.lock().is_empty());
}

/// Returns the total receiving time and the total latency after a request that took half a minute
/// to arrive.
async fn half_a_minute(options: RequestOptions) -> (Duration, Duration) {
    let stage = with_slo(Duration::from_secs(100));
    let worker = stage.enter(1);
    let reply = request(&stage, UPTIME, options);
    worker.answer_well(&worker.batch().await);
    let (outputs, mut delivery) = reply.await.unwrap().unwrap();
    delivery.mark_written();
    assert_eq!(outputs, good());
    let totals = stage.pipeline.totals();
    (totals.receiving.time, totals.latency.sum())
}

#[tokio::test]
async fn all_the_time_counts_in_which_a_request_arrives() {
    for timeout in [None, Some(Duration::from_secs(40))] {
        let (arrival, latency) = half_a_minute(RequestOptions { timeout, ..Default::default() }).await;
        assert!(arrival >= UPTIME && latency >= UPTIME, "{arrival:?}, {latency:?}");
    }
}

#[tokio::test]
async fn a_timeout_begins_with_the_first_byte() {
    let stage = with_slo(Duration::from_secs(100));
    let _worker = stage.enter(1);
    let options = RequestOptions { timeout: Some(UPTIME), ..Default::default() };
    let reply = request(&stage, UPTIME, options);
    let outcome = tokio::time::timeout(UPTIME / 3, reply).await.unwrap().unwrap();
    assert!(matches!(outcome, Err(RequestFailure::TimedOut(_))), "{outcome:?}");
    assert_eq!(stage.pipeline.report().counts.rejected, 1, "the worker does not get it");
}

#[tokio::test]
async fn a_request_that_arrived_slowly_is_due_before_later_ones() {
    let stage = with_slo(Duration::from_secs(100));
    let worker = stage.enter(1);
    let first = stage.request();
    let batch = worker.batch().await;
    let second = stage.request();
    stage.until((0, 2)).await;
    // Each request fills a whole batch, so that the requests are served in the order of their
    // deadlines.
    let wide = |took: Duration| {
        let pipeline = Arc::clone(&stage.pipeline);
        let arrival =
            RequestArrival { began: Instant::now().checked_sub(took).unwrap(), ..RequestArrival::now(None) };
        tokio::spawn(async move {
            let input = RequestInput { shape: vec![8, 1], data: vec![0; 32].into() };
            pipeline.infer(vec![input], RequestOptions::default(), arrival).await.map(drop)
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
