//! Tests models that sleep.

use shadowslice_policy::residency::{AwakeLoad, WeightsState};
use shadowslice_shared::batch::SleepReply;
use tokio::sync::watch;

use super::*;

/// A stage with the worker of a model, and the phase of its sleep.
struct Bedroom {
    stage: Stage,
    worker: Actor,
    phase_rx: watch::Receiver<SleepPhase>,
}

impl Bedroom {
    fn with(change: impl FnOnce(&mut PipelineSettings)) -> Self {
        let stage = Stage::with(change);
        let worker = stage.enter(1);
        let phase_rx = stage.pipeline.sleep_phase();
        Self { stage, worker, phase_rx }
    }

    fn new() -> Self {
        Self::with(|_| ())
    }

    async fn reached(&mut self, phase: SleepPhase) {
        let reached = self.phase_rx.wait_for(|known| *known == phase);
        tokio::time::timeout(Duration::from_secs(10), reached).await.unwrap().unwrap();
    }

    async fn sleep(&mut self) {
        self.stage.pipeline.sleep(SleepCause::Pressure, true).unwrap();
        assert_eq!(self.worker.command().await, Command::Sleep { pin: true });
        self.worker.report(&WorkerMessage::Asleep(Ok(SleepReply::default())));
        self.reached(SleepPhase::Asleep).await;
        assert_eq!(self.stage.event().await, LaneEvent::Asleep(WorkerId(1)));
    }

    fn weights(&self) -> WeightsState {
        self.stage.pipeline.sleep_state().unwrap().weights
    }

    fn counts(&self) -> SleepCounts {
        self.stage.pipeline.sleep_report().unwrap().counts
    }
}

#[tokio::test]
async fn the_first_request_waits_for_the_wake_and_batches_follow_the_order_at_once() {
    let mut room = Bedroom::new();
    room.sleep().await;
    assert_eq!(room.weights(), WeightsState::Asleep { wanted: None });
    let reply = room.stage.request();
    room.stage.until((1, 0)).await;
    assert!(matches!(room.weights(), WeightsState::Asleep { wanted: Some(_) }));
    assert!(room.stage.pipeline.ready().is_ok());
    room.stage.pipeline.wake();
    assert_eq!(room.worker.command().await, Command::Wake);
    let batch = room.worker.batch().await;
    assert_eq!(room.weights(), WeightsState::InUse { leaves: false });
    room.worker.report(&WorkerMessage::Awake(Ok(8_000)));
    room.worker.answer_well(&batch);
    assert_eq!(reply.await.unwrap(), Ok(good()));
    room.reached(SleepPhase::Awake).await;
    assert_eq!((room.counts().wakes, room.counts().wake_time), (1, Duration::from_millis(8)));
    let events = [room.stage.event().await, room.stage.event().await];
    assert!(events.contains(&LaneEvent::Awake(WorkerId(1))), "{events:?}");
}

#[tokio::test]
async fn a_busy_model_finishes_its_batches_before_it_sleeps_and_its_queue_waits() {
    let mut room = Bedroom::new();
    let running = room.stage.request();
    let batch = room.worker.batch().await;
    let refused = room.stage.pipeline.sleep(SleepCause::Idle, true).unwrap_err();
    assert!(refused.contains("requests have arrived"), "{refused}");
    let behind = room.stage.pipeline.now() + Duration::from_secs(3_600);
    room.stage.pipeline.interrupt(behind).unwrap();
    assert_eq!(room.weights(), WeightsState::InUse { leaves: true });
    let waiting = room.stage.request();
    room.stage.until((1, 1)).await;
    room.worker.answer_well(&batch);
    assert_eq!(running.await.unwrap(), Ok(good()));
    assert_eq!(room.worker.command().await, Command::Sleep { pin: true });
    room.worker.report(&WorkerMessage::Asleep(Ok(SleepReply::default())));
    room.reached(SleepPhase::Asleep).await;
    let WeightsState::Asleep { wanted: Some(wanted) } = room.weights() else { panic!("it is awake") };
    assert!(wanted < behind, "it does not stay behind others for long");
    room.stage.pipeline.wake();
    assert_eq!(room.worker.command().await, Command::Wake);
    room.worker.answer_well(&room.worker.batch().await);
    assert_eq!(waiting.await.unwrap(), Ok(good()));
}

/// Returns the stage of a model whose worker cannot release its weights and exits for a sleep, the worker, and
/// a request that arrives before the exit.
async fn leaving() -> (Stage, Actor, JoinHandle<Result<Vec<RequestOutput>, RequestFailure>>) {
    let mut room = Bedroom::with(|settings| settings.live.reject_late = true);
    room.stage.pipeline.sleep(SleepCause::Command, true).unwrap();
    room.worker.command().await;
    let waiting = room.stage.request();
    room.worker.report(&WorkerMessage::Asleep(Err("no memory for the copy".to_owned())));
    room.worker.answer_well(&room.worker.batch().await);
    assert_eq!(waiting.await.unwrap(), Ok(good()));
    room.reached(SleepPhase::Awake).await;
    let report = room.stage.pipeline.sleep_report().unwrap();
    assert_eq!(report.ends_worker.as_deref(), Some("no memory for the copy"));
    room.stage.pipeline.set_process_bytes(700);
    assert_eq!(room.stage.pipeline.sleep_state().unwrap().bytes, 700);
    let Bedroom { mut stage, worker, .. } = room;
    stage.pipeline.sleep(SleepCause::Idle, true).unwrap();
    while stage.event().await != LaneEvent::Dismissed(WorkerId(1)) {}
    let early = stage.request();
    stage.until((1, 0)).await;
    (stage, worker, early)
}

fn refuse_overdue(stage: &Stage) {
    let later = stage.pipeline.now() + Duration::from_secs(3_600);
    stage.pipeline.change(|state| state.refuse_overdue(later));
}

#[tokio::test]
async fn a_worker_that_cannot_release_its_weights_exits_for_the_next_sleep() {
    let (mut stage, worker, early) = leaving().await;
    refuse_overdue(&stage);
    drop(worker);
    while stage.event().await != LaneEvent::Gone(WorkerId(1)) {}
    refuse_overdue(&stage);
    let late = stage.request();
    stage.until((2, 0)).await;
    let state = stage.pipeline.sleep_state().unwrap();
    assert!(matches!(state.weights, WeightsState::Asleep { wanted: Some(_) }), "{state:?}");
    assert_eq!((state.bytes, stage.pipeline.ready().is_ok()), (700, true));

    stage.pipeline.wake();
    stage.pipeline.wake();
    assert_eq!(stage.event().await, LaneEvent::Recalled);
    assert_eq!(stage.pipeline.sleep_report().unwrap().phase, SleepPhase::Waking);
    refuse_overdue(&stage);
    let next = stage.enter(2);
    let state = stage.pipeline.sleep_state().unwrap();
    assert!(matches!(state.weights, WeightsState::Awake { load: AwakeLoad::Owing, .. }), "{state:?}");
    let mut answered = 0;
    while answered < 2 {
        let batch = next.batch().await;
        answered += batch.requests.len();
        next.answer_well(&batch);
    }
    assert_eq!((early.await.unwrap(), late.await.unwrap()), (Ok(good()), Ok(good())));
    let SleepCounts { sleeps, wakes, wake_time, .. } = stage.pipeline.sleep_report().unwrap().counts;
    assert_eq!((sleeps, wakes, wake_time), (1, 1, state.wake_time), "it serves for a multiple of this time");
    assert!(matches!(stage.event().await, LaneEvent::FirstAnswer(WorkerId(2), _)), "no second recall");
}

#[tokio::test]
async fn requests_are_refused_if_there_is_no_memory_for_another_worker() {
    let (mut stage, worker, early) = leaving().await;
    drop(worker);
    while stage.event().await != LaneEvent::Gone(WorkerId(1)) {}
    stage.pipeline.record_shortage(true);
    refuse_overdue(&stage);
    let refused = early.await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("other models use the GPU memory"), "{refused}");
    // A start that found too little memory waits for memory again.
    stage.pipeline.wake();
    assert_eq!(stage.event().await, LaneEvent::Recalled);
    stage.pipeline.await_memory();
    assert_eq!(stage.pipeline.sleep_report().unwrap().phase, SleepPhase::Asleep);
    stage.pipeline.shut("it is removed");
    assert_eq!(stage.pipeline.sleep_report(), None);
}

#[tokio::test]
async fn a_failed_wake_loses_no_request_and_the_third_replaces_the_worker() {
    let mut room = Bedroom::new();
    room.sleep().await;
    let waiting = room.stage.request();
    room.stage.until((1, 0)).await;
    for attempt in 1..=3 {
        room.stage.pipeline.wake();
        assert_eq!(room.worker.command().await, Command::Wake);
        let batch = room.worker.batch().await;
        room.worker.report(&WorkerMessage::Awake(Err("out of memory".to_owned())));
        room.worker.answer(batch.id, Err(RunFailure::Asleep));
        room.reached(SleepPhase::Asleep).await;
        room.stage.until((1, 0)).await;
        assert_eq!(room.counts().failed_wakes, attempt);
        assert!(room.stage.pipeline.sleep_state().unwrap().retry_at.is_some(), "it waits a moment");
    }
    let event = room.stage.event().await;
    assert!(matches!(&event, LaneEvent::Broken(_, why) if why.contains("out of memory")), "{event:?}");
    let next = room.stage.enter(2);
    next.answer_well(&next.batch().await);
    assert_eq!(waiting.await.unwrap(), Ok(good()));
}

#[tokio::test]
async fn a_request_whose_model_does_not_wake_in_time_is_refused_with_the_reason() {
    let mut room = Bedroom::with(|settings| {
        settings.live.reject_late = true;
        settings.live.slo.latency = Duration::from_millis(20);
    });
    watch(&room.stage);
    room.sleep().await;
    let refused = room.stage.request().await.unwrap();
    let Err(RequestFailure::Unavailable(why)) = refused else { panic!("{refused:?}") };
    assert!(why.contains("sleeps, and other models use the GPU memory"), "{why}");
}

#[tokio::test]
async fn the_death_of_a_sleeping_worker_loses_nothing_and_the_next_one_is_awake() {
    let mut room = Bedroom::new();
    room.sleep().await;
    let waiting = room.stage.request();
    room.stage.until((1, 0)).await;
    drop(room.worker);
    let next = room.stage.enter(2);
    next.answer_well(&next.batch().await);
    assert_eq!(waiting.await.unwrap(), Ok(good()));
}

#[tokio::test]
async fn no_model_sleeps_while_its_worker_is_being_replaced() {
    let room = Bedroom::new();
    let _next = room.stage.enter(2);
    assert_eq!(room.weights(), WeightsState::InUse { leaves: false });
    assert!(room.stage.pipeline.sleep(SleepCause::Pressure, true).is_err());
}

#[tokio::test]
async fn sleeps_and_wakes_that_were_not_ordered_end_the_lane() {
    for report in [WorkerMessage::Asleep(Ok(SleepReply::default())), WorkerMessage::Awake(Ok(1))] {
        let mut room = Bedroom::new();
        room.worker.report(&report);
        let event = room.stage.event().await;
        assert!(matches!(&event, LaneEvent::Broken(_, why) if why.contains("not ordered")), "{event:?}");
    }
}

#[tokio::test]
async fn a_model_owes_answers_to_the_requests_that_waited_for_its_wake() {
    let mut room = Bedroom::new();
    room.sleep().await;
    let waiting = [room.stage.request(), room.stage.request()];
    room.stage.until((2, 0)).await;
    room.stage.pipeline.wake();
    room.worker.command().await;
    room.worker.report(&WorkerMessage::Awake(Ok(1)));
    room.reached(SleepPhase::Awake).await;
    let load = |weights| match weights {
        WeightsState::Awake { load, .. } => load,
        other => panic!("{other:?}"),
    };
    assert_eq!(load(room.weights()), AwakeLoad::Owing);
    let later = room.stage.request();
    let mut answered = 0;
    while answered < waiting.len() {
        let batch = room.worker.batch().await;
        answered += batch.requests.len();
        room.worker.answer_well(&batch);
    }
    for request in waiting {
        assert_eq!(request.await.unwrap(), Ok(good()));
    }
    assert_ne!(load(room.weights()), AwakeLoad::Owing);
    if answered == 2 {
        room.worker.answer_well(&room.worker.batch().await);
    }
    assert_eq!(later.await.unwrap(), Ok(good()));
}

#[tokio::test]
async fn a_worker_that_is_awake_and_claims_to_sleep_is_replaced() {
    let mut room = Bedroom::new();
    let reply = room.stage.request();
    let batch = room.worker.batch().await;
    room.worker.answer(batch.id, Err(RunFailure::Asleep));
    let event = room.stage.event().await;
    assert!(matches!(&event, LaneEvent::Broken(_, why) if why.contains("lost its weights")), "{event:?}");
    let next = room.stage.enter(2);
    next.answer_well(&next.batch().await);
    assert_eq!(reply.await.unwrap(), Ok(good()));
}

#[tokio::test]
async fn an_order_to_wake_does_not_keep_the_model_awake() {
    let mut room = Bedroom::new();
    room.sleep().await;
    room.stage.pipeline.wake();
    room.worker.command().await;
    room.stage.pipeline.order_wake();
    room.worker.report(&WorkerMessage::Awake(Ok(1)));
    room.reached(SleepPhase::Awake).await;
    assert!(matches!(room.weights(), WeightsState::Awake { load: AwakeLoad::Idle, .. }));
}
