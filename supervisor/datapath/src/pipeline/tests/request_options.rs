//! Tests priorities, timeouts and cancelled requests: which requests run, and how each is counted.

use super::*;

/// Fills a worker's lane: one request executes and another request waits in the lane's slot. All
/// further requests then wait in the queue.
async fn busy(stage: &Stage) -> (Actor, Batch) {
    let worker = stage.enter(1);
    stage.request();
    let batch = worker.batch().await;
    stage.request();
    stage.until((0, 2)).await;
    (worker, batch)
}

fn request(
    stage: &Stage,
    byte: u8,
    options: RequestOptions,
) -> JoinHandle<Result<Vec<RequestOutput>, RequestFailure>> {
    let pipeline = Arc::clone(&stage.pipeline);
    let input = RequestInput { shape: vec![1, 1], data: vec![byte; 4].into() };
    tokio::spawn(
        async move { pipeline.infer(vec![input], options, RequestArrival::now(None)).await.map(written) },
    )
}

fn priority(priority: u64) -> RequestOptions {
    RequestOptions { priority, ..RequestOptions::default() }
}

fn timeout(timeout: Duration) -> RequestOptions {
    RequestOptions { timeout: Some(timeout), ..RequestOptions::default() }
}

/// Waits until clients have cancelled `count` requests.
async fn cancelled(stage: &Stage, count: u64) {
    while stage.pipeline.report().counts.cancelled < count {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn lower_priorities_are_served_first_and_share_no_batch_with_others() {
    let stage = Stage::with(|settings| settings.max_requests = 16);
    let (worker, mut batch) = busy(&stage).await;
    let mut reply = Vec::new();
    for (count, level) in [300, 0, 1, 100, u64::MAX, 1].into_iter().enumerate() {
        reply.push(request(&stage, 1, priority(level)));
        stage.until((count + 1, 2)).await;
    }
    // The two requests in flight are answered first. The next batches have the priorities 1 and 1,
    // then 0 and 100 (0 means 100), then 300, then the maximum.
    let mut sizes = Vec::new();
    for _ in 0..6 {
        sizes.push(batch.requests.len());
        worker.answer_well(&batch);
        if sizes.len() < 6 {
            batch = worker.batch().await;
        }
    }
    assert_eq!(sizes, [1, 1, 2, 2, 1, 1]);
    for request in reply {
        assert_eq!(request.await.unwrap(), Ok(good()));
    }
}

#[tokio::test]
async fn within_a_priority_the_earlier_timeout_is_served_first() {
    let stage = Stage::with(|settings| {
        settings.max_requests = 16;
        settings.live.slo = SloTarget { latency: Duration::from_secs(60), ..settings.live.slo };
    });
    let (worker, first) = busy(&stage).await;
    let patient = RequestOptions { priority: 1, timeout: Some(Duration::from_secs(50)) };
    let hasty = RequestOptions { priority: 1, timeout: Some(Duration::from_secs(40)) };
    let pipeline = Arc::clone(&stage.pipeline);
    let wide = |options| {
        let pipeline = Arc::clone(&pipeline);
        let input = RequestInput { shape: vec![8, 1], data: vec![0; 32].into() };
        tokio::spawn(async move {
            pipeline.infer(vec![input], options, RequestArrival::now(None)).await.map(written)
        })
    };
    let late = wide(patient);
    stage.until((1, 2)).await;
    let soon = wide(hasty);
    stage.until((2, 2)).await;
    worker.answer_well(&first);
    worker.answer_well(&worker.batch().await);
    // Each request fills a batch. The error message shows which request ran first.
    worker.answer(worker.batch().await.id, Err(RunFailure::Engine("the first".into())));
    let failed = soon.await.unwrap();
    assert!(matches!(&failed, Err(RequestFailure::Internal(why)) if why.contains("the first")), "{failed:?}");
    late.abort();
}

#[tokio::test]
async fn a_timeout_acts_while_the_request_waits_and_while_it_runs() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let runs = request(&stage, 1, timeout(Duration::from_millis(20)));
    let batch = worker.batch().await;
    let answered = stage.request();
    stage.until((0, 2)).await;
    let waits = request(&stage, 3, timeout(Duration::from_millis(20)));
    for request in [runs, waits] {
        let timed_out = request.await.unwrap();
        assert!(
            matches!(&timed_out, Err(RequestFailure::TimedOut(why)) if why.contains("20000 us")),
            "{timed_out:?}"
        );
    }
    // The batch is complete and its slot is free again. No client receives the answer.
    worker.answer_well(&batch);
    worker.answer_well(&worker.batch().await);
    assert_eq!(answered.await.unwrap(), Ok(good()));
    let last = stage.request();
    worker.answer_well(&worker.batch().await);
    assert_eq!(last.await.unwrap(), Ok(good()));
    let counts = stage.pipeline.report().counts;
    let totals = stage.pipeline.totals();
    assert_eq!((counts.accepted, counts.succeeded, counts.failed, counts.cancelled), (4, 2, 2, 0));
    assert_eq!(
        (totals.durations.count, totals.fail.count, totals.rows, totals.batch_execution.count),
        (2, 2, 2, 3)
    );
}

#[tokio::test]
async fn a_request_that_cannot_be_answered_within_its_timeout_is_refused_at_once() {
    let stage = Stage::new();
    let worker = stage.enter_as(1, Sms(10), |lane_worker, _| {
        lane_worker.slice.times = vec![(1, Duration::from_secs(50))];
    });
    let runs = stage.request();
    let batch = worker.batch().await;
    // The timeout is longer than this test.
    let refused = request(&stage, 1, timeout(Duration::from_secs(40))).await.unwrap();
    let is_refusal = |why: &str| why.contains("cannot be answered within its timeout of 40000000 us");
    assert!(matches!(&refused, Err(RequestFailure::TimedOut(why)) if is_refusal(why)), "{refused:?}");
    worker.answer_well(&batch);
    assert_eq!(runs.await.unwrap(), Ok(good()));
    let counts = stage.pipeline.report().counts;
    assert_eq!((counts.accepted, counts.succeeded, counts.rejected), (1, 1, 1));
}

#[tokio::test]
async fn the_longest_possible_timeout_has_no_effect() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let request = request(&stage, 1, timeout(Duration::from_micros(u64::MAX)));
    worker.answer_well(&worker.batch().await);
    assert_eq!(request.await.unwrap(), Ok(good()));
}

#[tokio::test]
async fn a_cancelled_request_is_counted_at_once_and_does_not_run() {
    let stage = Stage::new();
    let (worker, first) = busy(&stage).await;
    let leaves = request(&stage, 1, RequestOptions::default());
    stage.until((1, 2)).await;
    leaves.abort();
    cancelled(&stage, 1).await;
    worker.answer_well(&first);
    let stays = stage.request();
    worker.answer_well(&worker.batch().await);
    let batch = worker.batch().await;
    assert_eq!(batch.requests.len(), 1, "the request that was given up is not in it");
    worker.answer_well(&batch);
    assert_eq!(stays.await.unwrap(), Ok(good()));
    assert_eq!(stage.pipeline.totals().batch_execution.count, 3);
    assert_eq!(stage.pipeline.report().counts.succeeded, 3);
}

#[tokio::test]
async fn cancelled_requests_make_room_and_the_last_few_are_skipped_in_their_turn() {
    let stage = Stage::with(|settings| settings.max_requests = 32);
    let (worker, first) = busy(&stage).await;
    let mut reply = Vec::new();
    for waiting in 1..=18 {
        reply.push(request(&stage, 1, RequestOptions::default()));
        stage.until((waiting, 2)).await;
    }
    for (leaves, waiting) in [(17, 18), (16, 18), (15, 15), (0, 15)] {
        let gone = stage.pipeline.report().counts.cancelled + 1;
        reply[leaves].abort();
        cancelled(&stage, gone).await;
        assert_eq!(stage.pending(), (waiting, 2));
    }
    worker.answer_well(&first);
    worker.answer_well(&worker.batch().await);
    assert_eq!(worker.batch().await.requests.len(), 7, "of eight, less the first");
}

#[tokio::test]
async fn a_request_cancelled_while_it_runs_is_not_a_success() {
    let stage = Stage::new();
    let worker = stage.enter(1);
    let leaves = request(&stage, 1, RequestOptions::default());
    let batch = worker.batch().await;
    leaves.abort();
    cancelled(&stage, 1).await;
    worker.answer_well(&batch);
    let stays = stage.request();
    worker.answer_well(&worker.batch().await);
    assert_eq!(stays.await.unwrap(), Ok(good()));
    let counts = stage.pipeline.report().counts;
    assert_eq!((counts.accepted, counts.succeeded, counts.failed, counts.cancelled), (2, 1, 0, 1));
    let totals = stage.pipeline.totals();
    assert_eq!((totals.durations.count, totals.rows, totals.batch_execution.count), (1, 1, 2));
}
