//! Pauses of a long batch for a batch of another model that would be late.

use super::*;

/// Two models on one GPU, each with a worker.
struct Pair {
    pauses: Arc<GpuPauses>,
    hog: Stage,
    hog_worker: Actor,
    critical: Stage,
    critical_worker: Actor,
}

/// Returns a model with this SLO in seconds.
fn model(name: &str, priority: u32, slo: u64) -> Stage {
    Stage::with(|settings| {
        settings.name = name.to_owned();
        settings.live.priority = priority;
        settings.live.slo.latency = Duration::from_secs(slo);
    })
}

impl Pair {
    /// Creates a model whose batches take 50 s, and one whose batches take 1 ms and have an SLO of 10 s.
    fn new(is_enabled: bool, pause: bool, pieces: Result<u32, String>) -> Self {
        let pauses = GpuPauses::new(is_enabled);
        let (hog, critical) = (model("hog", 2, 600), model("critical", 1, 10));
        // Workers of different models can have the same id.
        let enter = |stage: &Stage, batch| {
            stage.enter_as(1, Sms(10), |lane_worker, _| {
                lane_worker.slice.times = vec![(1, batch)];
                lane_worker.pauses = Arc::clone(&pauses);
                lane_worker.pieces = pieces.clone();
            })
        };
        hog.pipeline.set_admission(AdmissionPolicy { pause, ..AdmissionPolicy::accept_all(1) });
        let hog_worker = enter(&hog, Duration::from_secs(50));
        let critical_worker = enter(&critical, Duration::from_millis(1));
        Self { pauses, hog, hog_worker, critical, critical_worker }
    }
}

async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}

fn total(pauses: &GpuPauses) -> u64 {
    pauses.totals().values().map(|total| total.count).sum()
}

#[tokio::test]
async fn a_long_batch_is_paused_while_a_batch_with_less_time_executes() {
    let Pair { pauses, hog, hog_worker, critical, critical_worker } = Pair::new(true, true, Ok(8));
    let first = hog.request();
    let long = hog_worker.batch().await;
    let paused = hog_worker.slab.pause_word();
    assert_eq!(paused.current(), None);
    let second = critical.request();
    let short = critical_worker.batch().await;
    until(|| paused.current().is_some()).await;
    assert_eq!(critical_worker.slab.pause_word().current(), None);
    critical_worker.answer_well(&short);
    second.await.unwrap().unwrap();
    until(|| paused.current().is_none()).await;
    hog_worker.answer_well(&long);
    first.await.unwrap().unwrap();
    let totals = pauses.totals();
    let (pair, figures) = totals.first_key_value().unwrap();
    assert_eq!((&*pair.paused, &*pair.beneficiary, figures.count), ("hog", "critical", 1));
    assert!(figures.time > Duration::ZERO && figures.longest == figures.time);
}

#[tokio::test]
async fn a_worker_that_dies_pauses_nobody() {
    let Pair { pauses, hog, hog_worker, critical, critical_worker } = Pair::new(true, true, Ok(8));
    let _first = hog.request();
    hog_worker.batch().await;
    let _second = critical.request();
    critical_worker.batch().await;
    let paused = hog_worker.slab.pause_word();
    until(|| paused.current().is_some()).await;
    drop(critical_worker);
    until(|| paused.current().is_none()).await;
    until(|| total(&pauses) == 1).await;
}

#[tokio::test]
async fn nobody_is_paused_if_the_operator_or_the_policy_forbids_it_or_the_worker_cannot_wait() {
    let cases = [(false, true, Ok(8)), (true, false, Ok(8)), (true, true, Err("no recordings".to_owned()))];
    for (is_enabled, pause, pieces) in cases {
        let Pair { pauses, hog, hog_worker, critical, critical_worker } =
            Pair::new(is_enabled, pause, pieces);
        let _first = hog.request();
        hog_worker.batch().await;
        let second = critical.request();
        critical_worker.answer_well(&critical_worker.batch().await);
        second.await.unwrap().unwrap();
        assert_eq!((hog_worker.slab.pause_word().current(), total(&pauses)), (None, 0));
    }
}
