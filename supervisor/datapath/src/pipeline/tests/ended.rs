//! Tests the records of workers that have ended.

use super::*;

#[tokio::test]
async fn an_ended_worker_is_remembered_as_idle_or_busy() {
    let mut stage = Stage::new();
    let (idle, busy) = (stage.enter(1), stage.enter(2));
    let request = stage.request();
    let _unanswered = busy.batch().await;
    let known = |stage: &Stage| [1, 2].map(|worker| stage.pipeline.is_idle(WorkerId(worker)));
    assert_eq!(known(&stage), [true, false]);
    stage.pipeline.requeue(WorkerId(2));
    assert_eq!(known(&stage), [true, false], "it still executes");
    drop(idle);
    assert_eq!(stage.event().await, LaneEvent::Gone(WorkerId(1)));
    assert_eq!(known(&stage), [true, false]);
    drop(busy);
    assert_eq!(stage.event().await, LaneEvent::Gone(WorkerId(2)));
    assert_eq!(known(&stage), [true, false]);
    request.abort();
}

#[tokio::test]
async fn several_ended_workers_are_remembered() {
    let mut stage = Stage::new();
    for worker in [1, 2] {
        drop(stage.enter(worker));
        assert_eq!(stage.event().await, LaneEvent::Gone(WorkerId(worker)));
    }
    let known = |stage: &Stage, workers: [u64; 3]| workers.map(|id| stage.pipeline.is_idle(WorkerId(id)));
    assert_eq!(known(&stage, [1, 2, 3]), [true, true, false]);
    for worker in 3..=9 {
        drop(stage.enter(worker));
        assert_eq!(stage.event().await, LaneEvent::Gone(WorkerId(worker)));
    }
    assert_eq!(known(&stage, [1, 2, 9]), [false, true, true], "only the last eight are kept");
}
