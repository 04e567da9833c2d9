//! Tests workers that hang, and the requests that other workers serve at the same time.

use super::super::requests::Shapes;
use super::super::workers::ShapeTimes;
use super::*;

/// A time longer than the interval between two checks.
const SECOND: Duration = Duration::from_secs(1);

/// The time for which the second request waits for more requests before its batch is sent. It is
/// much shorter than the interval between two checks.
const DELAY: Duration = Duration::from_millis(10);

/// Attaches a worker whose batches should take 1 ms, and sends a request that the worker does not
/// answer. Returns the worker and the request.
async fn stuck(
    stage: &Stage,
    worker: u64,
) -> (Actor, JoinHandle<Result<Vec<RequestOutput>, RequestFailure>>) {
    let times = vec![(1, Duration::from_millis(1))];
    let actor = stage.enter_as(worker, Sms(10), |lane_worker, _| lane_worker.slice.times = times);
    let reply = stage.request();
    let _unanswered = actor.batch().await;
    (actor, reply)
}

fn set_executing_since(stage: &Stage, worker: u64, span: Duration) {
    let since = stage.pipeline.now() - span;
    stage.pipeline.state.lock().scheduler.set_executing_since(WorkerId(worker), Some(since));
}

#[tokio::test]
async fn each_of_two_workers_that_seem_to_hang_is_checked_again() {
    let mut stage = Stage::new();
    let (_first, one) = stuck(&stage, 1).await;
    let (_second, two) = stuck(&stage, 2).await;
    let check = |at: Timestamp| {
        let mut state = stage.pipeline.state.lock();
        state.report_hangs(at);
        state.dispatch(at);
    };
    let now = stage.pipeline.now();
    let ms = Duration::from_millis;
    set_executing_since(&stage, 1, Duration::from_secs(10));
    check(now);
    set_executing_since(&stage, 2, Duration::from_secs(10));
    check(now + ms(99));
    check(now + ms(101));
    assert_eq!(stage.events_rx.try_recv(), Ok(LaneEvent::Hung(WorkerId(1))));
    assert!(stage.events_rx.try_recv().is_err(), "the other was seen once");
    check(now + ms(201));
    assert_eq!(stage.events_rx.try_recv(), Ok(LaneEvent::Hung(WorkerId(2))));
    check(now + ms(400));
    assert!(stage.events_rx.try_recv().is_err(), "they were reported once");
    one.abort();
    two.abort();
}

/// Tests the time after which a batch counts as hung, for different shapes. The limit is 30 s for
/// the first batch of a shape. For later batches, it is 20 times the predicted time, but at least 1
/// s.
#[tokio::test]
async fn a_shape_that_was_never_executed_is_given_time() {
    let mut stage = Stage::new();
    let (actor, stuck) = stuck(&stage, 1).await;
    let open = Metadata {
        inputs: vec![TensorSpec { name: "x".into(), datatype: Datatype::Uint32, shape: vec![-1, -1] }],
        optional: Vec::new(),
        ..(*stage.pipeline.metadata().unwrap()).clone()
    };
    let open = ShapeTimes::of(&open, Sms(10));
    stage.pipeline.state.lock().link_mut(WorkerId(1)).unwrap().shapes = open;
    let checked_after = |stage: &mut Stage, seconds: u64| {
        set_executing_since(stage, 1, Duration::from_secs(seconds));
        let now = stage.pipeline.now();
        let mut state = stage.pipeline.state.lock();
        state.dispatch(now);
        state.report_hangs(now + SECOND);
        state.dispatch(now);
        drop(state);
        stage.events_rx.try_recv().ok()
    };
    assert_eq!(checked_after(&mut stage, 20), None);
    let shape = Shapes::from([vec![1]]);
    let mut state = stage.pipeline.state.lock();
    let times = state.link_mut(WorkerId(1)).unwrap().shapes.as_mut().unwrap();
    times.observe(&shape, 1, Duration::from_millis(100));
    drop(state);
    assert_eq!(checked_after(&mut stage, 20), Some(LaneEvent::Hung(WorkerId(1))));
    drop(actor);
    stuck.abort();
}

#[tokio::test]
async fn due_batches_are_sent_before_a_worker_that_seems_to_hang_is_checked_again() {
    let mut stage = Stage::new();
    let (_old, stuck) = stuck(&stage, 1).await;
    let new = stage.enter(2);
    stage.pipeline.drain(WorkerId(1));
    let slo = SloTarget { latency: Duration::from_secs(1), next: None, percentile: 99.0 };
    stage.pipeline.set_live_settings(LiveSettings { slo, max_delay: DELAY, reject_late: false, priority: 1 });
    set_executing_since(&stage, 1, Duration::from_secs(10));
    let waits = stage.request();
    stage.until((1, 1)).await;
    watch(&stage);
    let batch = tokio::select! {
        biased;
        event = stage.event() => panic!("{event:?} before the other worker's batch"),
        batch = new.batch() => batch,
    };
    assert_eq!(stage.event().await, LaneEvent::Hung(WorkerId(1)));
    new.answer_well(&batch);
    assert_eq!(waits.await.unwrap(), Ok(good()));
    stuck.abort();
}

/// Tests a request during which a worker died before. Its time limit doubles, and the requests
/// behind it are refused after their deadline.
#[tokio::test]
async fn requests_behind_a_suspect_are_refused_after_their_deadline() {
    let mut stage = Stage::new();
    let slo = SloTarget { latency: Duration::from_millis(5), next: None, percentile: 99.0 };
    let rules = LiveSettings { slo, max_delay: Duration::ZERO, reject_late: true, priority: 1 };
    stage.pipeline.set_live_settings(rules);
    let (_first, suspect) = stuck(&stage, 1).await;
    let check = |stage: &Stage| {
        let now = stage.pipeline.now();
        let mut state = stage.pipeline.state.lock();
        state.refuse_overdue(now);
        (state.stalled_batch(now).map(|batch| batch.requests), state.scheduler.queued())
    };
    let now = stage.pipeline.now();
    stage.pipeline.change(|state| state.remove_dead(WorkerId(1), now));
    assert_eq!(stage.event().await, LaneEvent::Gone(WorkerId(1)));
    let times = vec![(1, Duration::from_millis(1))];
    let second = stage.enter_as(2, Sms(10), |lane_worker, _| lane_worker.slice.times = times);
    let _tried_again = second.batch().await;
    let waits = stage.request();
    stage.until((1, 1)).await;
    tokio::time::sleep(slo.latency).await;
    set_executing_since(&stage, 2, SECOND);
    assert_eq!(check(&stage), (Some(1), 0));
    let refused = waits.await.unwrap().unwrap_err();
    assert!(
        matches!(&refused, RequestFailure::Unavailable(why) if why.contains("past its deadline")),
        "{refused:?}"
    );
    suspect.abort();
}

#[test]
fn a_host_waits_for_a_model_that_loads_until_a_worker_must_be_killed() {
    let (events_tx, _events_rx) = mpsc::channel(EVENT_QUEUE_SIZE);
    let pipeline = Pipeline::new(settings(), Clock::started(UPTIME), events_tx).unwrap();
    assert!(pipeline.is_loading());
    pipeline.worker_killed();
    assert!(!pipeline.is_loading() && pipeline.ready().is_err());
    pipeline.open();
    pipeline.worker_killed();
    assert_eq!(pipeline.ready(), Ok(()), "later deaths do not close it");
}
