//! Tests admission control: which requests are refused, and which values the sharing policy
//! observes.
//!
//! The times in the profile differ greatly from the SLOs, so the results do not depend on the speed
//! of the test.

use shadowslice_policy::sharing::BatchStats;

use super::*;

const OPEN: AdmissionPolicy = AdmissionPolicy::accept_all(u32::MAX);

/// Returns a pipeline that refuses late requests. On 60 SMs, a batch of one row takes 1 s, and a
/// batch of eight rows takes 100 s.
fn stage(slo: Duration) -> Stage {
    let row = |batch, ms| ExecutionRow { batch, ms: vec![ms] };
    let rows = vec![row(1, 1e3), row(8, 1e5)];
    let execution = Execution::new(vec![Sms(60)], rows).unwrap();
    let profile = Profile { execution, ..slow_profile() };
    Stage::with(|settings| {
        (settings.live.slo.latency, settings.live.reject_late, settings.profile) = (slo, true, Some(profile));
    })
}

/// An SLO that no request can meet according to the profile.
const HOPELESS: Duration = Duration::from_millis(1);

/// An SLO that two requests can meet if one runs after the other.
const EASY: Duration = Duration::from_secs(30);

fn enter(stage: &Stage, worker: u64) -> Actor {
    stage.enter_with(worker, Sms(60))
}

async fn answered(reply: JoinHandle<Result<Vec<RequestOutput>, RequestFailure>>) {
    assert_eq!(reply.await.unwrap(), Ok(good()));
}

async fn refused(reply: JoinHandle<Result<Vec<RequestOutput>, RequestFailure>>, word: &str) {
    let outcome = tokio::time::timeout(Duration::from_secs(10), reply).await.unwrap().unwrap();
    assert!(
        matches!(outcome, Err(RequestFailure::Unavailable(ref why)) if why.contains(word)),
        "{outcome:?}"
    );
}

fn count(stage: &Stage, reason: &str) -> u64 {
    stage.pipeline.report().counts.refused.by_reason().find(|(name, _)| *name == reason).unwrap().1
}

#[tokio::test]
async fn batches_are_at_most_as_large_as_admission_allows() {
    let stage = stage(EASY);
    stage.pipeline.set_admission(AdmissionPolicy::accept_all(2));
    let reply: Vec<_> = (0..4).map(|_| stage.request()).collect();
    stage.until((4, 0)).await;
    let worker = enter(&stage, 1);
    for _ in 0..2 {
        let batch = worker.batch().await;
        assert_eq!(batch.requests.len(), 2);
        worker.answer_well(&batch);
    }
    for request in reply {
        answered(request).await;
    }
}

#[tokio::test]
async fn a_request_that_would_be_late_is_refused_on_arrival_but_an_idle_lane_tries_any() {
    let stage = stage(HOPELESS);
    let worker = enter(&stage, 1);
    stage.pipeline.set_admission(AdmissionPolicy { refuse_late: true, ..OPEN });
    for tried in 1..=3 {
        let reply = stage.request();
        let batch = worker.batch().await;
        refused(stage.request(), "within 1 ms, its SLO or timeout").await;
        assert_eq!(count(&stage, "late"), tried);
        worker.answer(batch.id, Err(RunFailure::Engine("no".to_owned())));
        assert!(matches!(reply.await.unwrap(), Err(RequestFailure::Internal(_))));
    }
}

#[tokio::test]
async fn a_request_that_has_become_late_is_refused_when_its_batch_is_sent() {
    let stage = stage(HOPELESS);
    let watch = watch(&stage);
    let worker = enter(&stage, 1);
    let _first = stage.request();
    worker.batch().await;
    let others = [stage.request(), stage.request()];
    stage.until((2, 1)).await;
    stage.pipeline.set_admission(AdmissionPolicy { refuse_late: true, ..OPEN });
    for other in others {
        refused(other, "SLO").await;
    }
    assert_eq!((count(&stage, "late"), stage.pending()), (2, (0, 1)));
    watch.abort();
}

#[tokio::test]
async fn a_request_that_waits_behind_takes_the_place_of_a_refused_request() {
    let stage = stage(Duration::from_nanos(1));
    let worker = enter(&stage, 1);
    let first = stage.request();
    let batch = worker.batch().await;
    let late = stage.request();
    stage.until((1, 1)).await;
    let slo = SloTarget { latency: EASY, next: None, percentile: 99.0 };
    stage.pipeline.set_live_settings(LiveSettings {
        slo,
        max_delay: Duration::ZERO,
        reject_late: true,
        priority: 1,
    });
    let others = [stage.request(), stage.request()];
    stage.until((3, 1)).await;
    stage.pipeline.set_admission(AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(2) });
    worker.answer_well(&batch);
    refused(late, "SLO").await;
    let batch = worker.batch().await;
    assert_eq!(batch.requests.len(), 2, "and not only the request that was among the oldest two");
    worker.answer_well(&batch);
    for request in others.into_iter().chain([first]) {
        answered(request).await;
    }
}

#[tokio::test]
async fn admission_refuses_no_request_if_late_requests_are_served() {
    let stage = Stage::with(|settings| {
        (settings.live.slo.latency, settings.profile) = (HOPELESS, Some(slow_profile()));
    });
    let worker = enter(&stage, 1);
    stage.pipeline.set_admission(AdmissionPolicy { refuse_late: true, ..OPEN });
    let reply: Vec<_> = (0..4).map(|_| stage.request()).collect();
    let mut served = 0;
    while served < reply.len() {
        let batch = worker.batch().await;
        served += batch.requests.len();
        worker.answer_well(&batch);
    }
    for request in reply {
        answered(request).await;
    }
    assert_eq!(stage.pipeline.report().counts.rejected, 0);
}

#[tokio::test]
async fn outages_deaths_and_hand_overs_do_not_make_requests_late() {
    let stage = stage(HOPELESS);
    stage.pipeline.set_admission(AdmissionPolicy { refuse_late: true, ..OPEN });
    let reply: Vec<_> = (0..3).map(|_| stage.request()).collect();
    stage.until((3, 0)).await;
    let dies = enter(&stage, 1);
    assert_eq!(dies.batch().await.requests.len(), 3, "all of them, late as they are");
    drop(dies);
    stage.until((3, 0)).await;
    let hands_over = enter(&stage, 2);
    assert_eq!(hands_over.batch().await.requests.len(), 3);
    let last = enter(&stage, 3);
    stage.pipeline.requeue(WorkerId(2));
    let batch = last.batch().await;
    assert_eq!(batch.requests.len(), 3);
    last.answer_well(&batch);
    for request in reply {
        answered(request).await;
    }
    assert_eq!(stage.pipeline.report().counts.rejected, 0);
}

#[tokio::test]
async fn a_stalled_worker_does_not_make_requests_late() {
    let execution = Execution::new(vec![Sms(60)], vec![ExecutionRow { batch: 1, ms: vec![1.0] }]).unwrap();
    let stage = Stage::with(|settings| {
        settings.live.slo.latency = Duration::from_micros(500);
        settings.live.reject_late = true;
        settings.profile = Some(Profile { execution, ..slow_profile() });
    });
    let worker = enter(&stage, 1);
    stage.pipeline.set_admission(AdmissionPolicy { refuse_late: true, ..OPEN });
    let first = stage.request();
    let batch = worker.batch().await;
    tokio::time::sleep(Duration::from_millis(150)).await;
    let others = [stage.request(), stage.request()];
    stage.until((1, 2)).await;
    worker.answer_well(&batch);
    for _ in 0..2 {
        worker.answer_well(&worker.batch().await);
    }
    for request in others.into_iter().chain([first]) {
        answered(request).await;
    }
}

#[tokio::test]
async fn the_next_batch_waits_until_it_is_its_turn_and_no_longer_than_the_one_before() {
    let stage = stage(EASY);
    let worker = stage.enter_with(1, Sms(2));
    let first = stage.request();
    let batch = worker.batch().await;
    let others = [stage.request(), stage.request()];
    stage.until((2, 1)).await;
    worker.answer_well(&batch);
    let batch = worker.batch().await;
    assert_eq!(batch.requests.len(), 2, "they waited where they could still join each other");
    worker.answer_well(&batch);
    for request in others.into_iter().chain([first]) {
        answered(request).await;
    }
}

#[tokio::test]
async fn its_turn_comes_by_itself_before_the_end() {
    let stage = stage(EASY);
    let watch = watch(&stage);
    let worker = enter(&stage, 1);
    let began = stage.pipeline.now();
    let _first = stage.request();
    worker.batch().await;
    let _second = stage.request();
    worker.batch().await;
    // The worker received the second batch after about 1 s, because the first batch takes 1 s.
    assert!(stage.pipeline.now().since(began) >= Duration::from_millis(990));
    assert_eq!(stage.pending(), (0, 2), "the first is still in flight");
    watch.abort();
}

#[tokio::test]
async fn an_observation_covers_the_time_since_the_previous_one() {
    let stage = stage(EASY);
    let worker = enter(&stage, 1);
    stage.pipeline.observe();
    let first = stage.request();
    let batch = worker.batch().await;
    stage.pipeline.set_admission(AdmissionPolicy { refuse_late: true, ..OPEN });
    let slo = |latency| SloTarget { latency, next: None, percentile: 99.0 };
    let rules = |latency| LiveSettings {
        slo: slo(latency),
        max_delay: Duration::ZERO,
        reject_late: true,
        priority: 1,
    };
    stage.pipeline.set_live_settings(rules(HOPELESS));
    refused(stage.request(), "SLO").await;
    stage.pipeline.set_live_settings(rules(EASY));
    worker.answer_well(&batch);
    answered(first).await;
    let seen = stage.pipeline.observe();
    assert_eq!((seen.arrived, seen.answered, seen.attainment), (2, 1, Some(0.5)));
    assert_eq!((seen.refused, seen.queued), (1, 0));
    assert!(matches!(seen.batches[..], [BatchStats { rows: 1, count: 1, .. }]), "{seen:?}");
    assert!(seen.busy > 0.0 && seen.mean_latency > Duration::ZERO && seen.p99_latency > Duration::ZERO);
    let next = stage.pipeline.observe();
    assert_eq!((next.arrived, next.answered, next.refused, next.busy), (0, 0, 0, 0.0));
    assert!(next.batches.is_empty());
}

#[tokio::test]
async fn executions_at_another_share_are_not_observed() {
    let stage = stage(EASY);
    let old = enter(&stage, 1);
    let (first, second) = (stage.request(), stage.request());
    old.answer_well(&old.batch().await);
    answered(first).await;
    let behind = old.batch().await;
    let _new = enter(&stage, 2);
    old.answer_well(&behind);
    answered(second).await;
    let seen = stage.pipeline.observe();
    assert_eq!((seen.answered, seen.batches.len()), (2, 0));
}

#[tokio::test]
async fn a_batch_that_would_be_padded_is_split_if_that_delays_no_request() {
    for (pads, parts) in [(true, vec![2, 1]), (false, vec![3])] {
        let stage = stage(EASY);
        let reply: Vec<_> = (0..3).map(|_| stage.request()).collect();
        stage.until((3, 0)).await;
        let worker = stage.enter_as(1, Sms(60), |lane_worker, _| {
            lane_worker.slice.times = [1, 2, 4].map(|rows| (rows, Duration::ZERO)).to_vec();
            lane_worker.sizes = vec![1, 2, 4];
            lane_worker.pads = pads;
        });
        for part in parts {
            let batch = worker.batch().await;
            assert_eq!(batch.requests.len(), part);
            worker.answer_well(&batch);
        }
        for request in reply {
            answered(request).await;
        }
    }
}
