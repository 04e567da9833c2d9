//! Who is told that a model should have more SMs at once, and when.

use shadowslice_policy::pressure::{self, Sign, Watch};

use super::*;

/// A pipeline of model 7 that answers whoever is late, where nothing keeps the SLO; and where it gives notice.
fn stage(room: usize) -> (Stage, mpsc::Receiver<Pressed>) {
    let (to, pressed) = mpsc::channel(room);
    let stage = Stage::with(|settings| {
        (settings.slo.latency, settings.profile) = (Duration::from_millis(1), Some(slow_profile()));
        (settings.bell, settings.max_requests) = (Some(Bell { model: 7, to }), 5 * SHORT);
        settings.memory = 1 << 20;
    });
    (stage, pressed)
}

/// Requests that must have no slack before that is news.
const SHORT: usize = pressure::SHORT as usize;

/// Asks so often while a batch executes and so many wait already.
async fn ask(stage: &Stage, waiting: usize, times: usize) -> Vec<impl Sized> {
    let mut asked = Vec::new();
    for more in 0..times {
        asked.push(stage.ask());
        stage.until((waiting + more + 1, 1)).await;
    }
    asked
}

/// Asks with one request before the new one.
async fn crowd(stage: &Stage) -> Actor {
    let worker = stage.enter_with(1, Sms(60));
    drop(stage.ask());
    worker.batch().await;
    worker
}

#[tokio::test]
async fn notice_is_given_once_in_a_while_and_only_while_a_larger_worker_stands_ready() {
    let (stage, mut pressed) = stage(4);
    let _worker = crowd(&stage).await;
    let (_a, _b) = (stage.ask(), stage.until((1, 1)).await);
    assert!(pressed.try_recv().is_err(), "nobody stands ready");
    stage.pipeline.set_relief(true);
    let before = stage.pipeline.now();
    let _c = ask(&stage, 1, SHORT - 1).await;
    assert!(pressed.try_recv().is_err(), "a few are no reason");
    let _d = ask(&stage, SHORT, 1).await;
    let notice = pressed.recv().await.unwrap();
    assert_eq!(notice.model, 7);
    assert!((before..=stage.pipeline.now()).contains(&notice.alarm.since));
    // The next notice is one of another moment.
    let _e = ask(&stage, SHORT + 1, SHORT).await;
    if let Ok(second) = pressed.try_recv() {
        assert!(second.alarm.since.since(notice.alarm.since) >= Duration::from_millis(10));
    }
    stage.pipeline.set_relief(false);
    let _f = ask(&stage, 2 * SHORT + 1, 2 * SHORT).await;
    assert!(pressed.try_recv().is_err());
}

#[tokio::test]
async fn what_was_noted_before_more_could_be_had_says_nothing() {
    let (stage, mut pressed) = stage(4);
    let _worker = crowd(&stage).await;
    let (_a, _b) = (stage.ask(), stage.until((1, 1)).await);
    stage.pipeline.set_relief(true);
    let _c = ask(&stage, 1, SHORT - 1).await;
    [false, true].into_iter().for_each(|stands| stage.pipeline.set_relief(stands));
    let _d = ask(&stage, SHORT, SHORT - 1).await;
    assert!(pressed.try_recv().is_err());
    let _e = ask(&stage, 2 * SHORT - 1, 1).await;
    assert!(pressed.try_recv().is_ok());
}

#[tokio::test]
async fn who_finds_nobody_before_him_and_who_finds_no_worker_gives_no_notice() {
    let (stage, mut pressed) = stage(4);
    stage.pipeline.set_relief(true);
    let _waits = stage.ask();
    stage.until((1, 0)).await;
    let worker = stage.enter_with(1, Sms(60));
    worker.answer_well(&worker.batch().await);
    stage.until((0, 0)).await;
    let _alone = stage.ask();
    worker.batch().await;
    assert!(pressed.try_recv().is_err());
}

#[tokio::test]
async fn nobody_waits_for_whoever_does_not_listen() {
    let (stage, pressed) = stage(1);
    stage.pipeline.set_relief(true);
    let worker = crowd(&stage).await;
    let mut asked = Vec::new();
    asked.push(ask(&stage, 0, 1).await);
    for round in 0..3 {
        asked.push(ask(&stage, 1 + round * SHORT, SHORT).await);
        tokio::time::sleep(Duration::from_millis(12)).await;
    }
    assert_eq!(pressed.len(), 1);
    drop(pressed);
    asked.push(ask(&stage, 1 + 3 * SHORT, SHORT).await);
    drop(worker);
}

#[tokio::test]
async fn who_turns_out_to_be_too_late_had_no_slack() {
    let (to, mut pressed) = mpsc::channel(4);
    let stage = Stage::with(|settings| {
        (settings.slo.latency, settings.profile) = (Duration::from_millis(1), Some(slow_profile()));
        (settings.bell, settings.max_requests) = (Some(Bell { model: 7, to }), 5 * SHORT);
        (settings.memory, settings.reject_late) = (1 << 20, true);
    });
    let _worker = crowd(&stage).await;
    let _asked = ask(&stage, 0, SHORT).await;
    stage.pipeline.set_relief(true);
    // The door lets nobody wait any more who waits in vain.
    let refuse = Door { refuse_late: true, ..Door::open(64) };
    let watch = tokio::spawn({
        let pipeline = Arc::clone(&stage.pipeline);
        async move { pipeline.watch().await }
    });
    stage.pipeline.set_door(refuse);
    stage.until((0, 1)).await;
    assert!(pressed.try_recv().is_err());
    let _late = stage.ask();
    let notice = tokio::time::timeout(Duration::from_secs(10), pressed.recv()).await.unwrap().unwrap();
    assert_eq!(notice.alarm.sign, Sign::SlackRunsOut);
    watch.abort();
}

#[tokio::test]
async fn more_than_the_share_is_for_gives_notice_before_slack_runs_out() {
    let (stage, mut pressed) = stage(4);
    let _worker = crowd(&stage).await;
    stage.pipeline.set_door(Door { watch: Watch::new(0.0, 0.01, 1.0), ..Door::open(64) });
    stage.pipeline.set_relief(true);
    let _asked = ask(&stage, 0, SHORT - 1).await;
    assert_eq!(pressed.try_recv().unwrap().alarm.sign, Sign::TooManyCome);
}
