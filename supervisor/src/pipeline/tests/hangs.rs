//! Workers that hang, and who is served meanwhile.

use super::*;

/// How long the request behind the hung one waits for company: well below the time between two looks.
const DELAY: Duration = Duration::from_millis(10);

#[tokio::test]
async fn what_is_due_is_sent_before_a_worker_that_seems_to_hang_is_looked_at_again() {
    let mut stage = Stage::new();
    let times = vec![WarmTime { rows: 1, took: Duration::from_millis(1), error: 0.0 }];
    let old = stage.enter_as(1, Sms(10), |arrival| arrival.times = times);
    let stuck = stage.ask();
    let _unanswered = old.batch().await;
    let new = stage.enter(2);
    stage.pipeline.drain(WorkerId(1));
    let slo = Slo { latency: Duration::from_secs(1), percentile: 99.0 };
    stage.pipeline.set_rules(Rules { slo, max_delay: DELAY, reject_late: false });
    stage.pipeline.state.lock().lane_mut(WorkerId(1)).unwrap().in_flight[0].executing_since =
        Some(stage.pipeline.now() - Duration::from_secs(10));
    let waits = stage.ask();
    stage.until((1, 1)).await;
    watch(&stage);
    let batch = tokio::select! {
        biased;
        fact = stage.fact() => panic!("{fact:?} before the other worker's batch"),
        batch = new.batch() => batch,
    };
    assert_eq!(stage.fact().await, LaneFact::Hung(WorkerId(1)));
    new.answer_well(&batch);
    assert_eq!(waits.await.unwrap(), Ok(good()));
    stuck.abort();
}
