//! Tests of worker deaths and share changes while a standby is starting. Each standby is stopped
//! during its start, so that no test depends on the speed of the processes.

use nix::sys::signal::Signal;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;

use crate::fixtures::{EMULATED, echo, profile};
use crate::standby::{CONNECTIONS, Clients, in_phase, incumbent, kill};

/// Returns a configuration with one model on half of the GPU.
fn config(dwell: &str, standby: &str) -> String {
    let more = "profile: profile.yaml, share: {initial: 50%}, queue: {on_late: serve}";
    let model = echo("echo", &format!("{more}, standby: {standby}"));
    format!("{EMULATED}timeouts: {{dwell: {dwell}}}\nmodels:\n  - {model}\n")
}

/// Starts a model that has half of the GPU and takes 2 s to load. Stops the model's standby during
/// the load.
async fn half_started(dwell: &str) -> Result<(ServerUnderTest, ProcessHandle, i32), HarnessError> {
    let home = Home::with_config(&config(dwell, "always"))?;
    home.write("profile.yaml", profile(5.0).replace("load: 50ms", "load: 2s"))?;
    let server = ServerUnderTest::start_ready(home).await?;
    let starts = |model: &ModelStatusJson| in_phase(model, "standby", "warming").is_some();
    let model = server.wait_status("echo", "a standing worker that starts", starts).await?;
    let pid = in_phase(&model, "standby", "warming").map(|worker| worker.pid).unwrap_or_default();
    let half = ProcessHandle::of(pid).expect("the standby runs");
    half.signal(Signal::SIGSTOP).expect("the standby can be stopped");
    Ok((server, half, pid))
}

/// Starts the model of [`half_started`] and stops its standby, then changes the share. The standby
/// therefore still has the previous share.
async fn half_started_elsewhere() -> Result<(ServerUnderTest, ProcessHandle, i32), HarnessError> {
    let (server, half, pid) = half_started("100ms").await?;
    server.resize("echo", 20).await?;
    let two = |model: &ModelStatusJson| {
        model.workers.len() == 2 && incumbent(model).is_some_and(|now| now.sms == 26)
    };
    let model = server.wait_status("echo", "the exit of the old worker", two).await?;
    assert_eq!(in_phase(&model, "standby", "warming").map(|worker| worker.pid), Some(pid), "{model:?}");
    Ok((server, half, pid))
}

/// Counts the workers that have been started so far, including the reference worker.
fn started(server: &ServerUnderTest) -> usize {
    server.log().matches("worker started").count()
}

/// Waits until this number of hand-overs is completed. The status shows a hand-over shortly after
/// the client that requested it gets the answer.
async fn completed(server: &ServerUnderTest, handovers: u64) -> Result<ModelStatusJson, HarnessError> {
    let all = move |model: &ModelStatusJson| model.handovers.completed >= handovers;
    server.wait_status("echo", "a hand-over that was completed", all).await
}

/// Returns the number of deaths and the number of restarts.
fn deaths_and_restarts(model: &ModelStatusJson) -> (u64, u64) {
    let count = |key: &str| model.more[key].as_u64().expect("a count");
    (count("worker_deaths"), count("worker_restarts"))
}

/// Waits until this worker, which was the standby, is the shadow of a hand-over. Checks that no
/// other worker was started for the hand-over.
async fn wait_shadow(
    server: &ServerUnderTest,
    pid: i32,
    before: usize,
) -> Result<ModelStatusJson, HarnessError> {
    let shadow = |model: &ModelStatusJson| model.workers.iter().any(|worker| worker.role == "shadow");
    let model = server.wait_status("echo", "a shadow", shadow).await?;
    assert_eq!(in_phase(&model, "shadow", "warming").map(|worker| worker.pid), Some(pid), "{model:?}");
    assert_eq!(started(server), before, "{}", server.log());
    Ok(model)
}

/// Waits until every client has received more answers. Panics unless all answers were correct.
async fn finish(server: &ServerUnderTest, clients: Clients) -> Result<ModelStatusJson, HarnessError> {
    let answered = server.model("echo").await?.requests.succeeded + 2 * u64::from(CONNECTIONS);
    let more = |model: &ModelStatusJson| model.requests.succeeded > answered;
    let model = server.wait_status("echo", "more answers", more).await?;
    clients.end().await;
    Ok(model)
}

#[tokio::test]
async fn a_change_to_the_share_of_a_starting_standby_waits_for_it() {
    let (server, half, pid) = half_started_elsewhere().await.unwrap();
    let clients = Clients::start(&server);
    let before = started(&server);
    let going_on = async {
        let model = wait_shadow(&server, pid, before).await.unwrap();
        assert_eq!(model.workers.len(), 2, "{model:?}");
        half.signal(Signal::SIGCONT).unwrap();
    };
    let (resized, ()) = tokio::join!(server.resize("echo", 50), going_on);
    let handover = resized.unwrap();
    assert_eq!((handover.from_sms, handover.to_sms, handover.at_once), (26, 66, Some(false)), "{handover:?}");
    let model = completed(&server, 2).await.unwrap();
    assert_eq!((model.share_percent, incumbent(&model).map(|worker| worker.pid)), (50, Some(pid)));
    assert_eq!((model.handovers.completed, model.handovers.aborted), (2, 0));
    assert_eq!(deaths_and_restarts(&model), (0, 0));
    let model = finish(&server, clients).await.unwrap();
    assert!(
        model.handovers.last.unwrap().effect_ms.is_some(),
        "answers at the new share have an effect time"
    );
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_parked_worker_of_the_last_change_delays_nothing() {
    let (server, half, pid) = half_started("60s").await.unwrap();
    server.resize("echo", 20).await.unwrap();
    server.resize("echo", 30).await.unwrap();
    let model = server.model("echo").await.unwrap();
    assert_eq!(in_phase(&model, "parked", "standing").map(|worker| worker.sms), Some(26), "{model:?}");
    let before = started(&server);
    let going_on = async {
        wait_shadow(&server, pid, before).await.unwrap();
        half.signal(Signal::SIGCONT).unwrap();
    };
    let (resized, ()) = tokio::join!(server.resize("echo", 50), going_on);
    assert_eq!(resized.unwrap().to_sms, 66);
    let model = completed(&server, 3).await.unwrap();
    assert_eq!((model.share_percent, incumbent(&model).map(|worker| worker.pid)), (50, Some(pid)));
    assert_eq!((model.handovers.completed, model.handovers.aborted), (3, 0));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_change_fails_if_the_standby_it_waits_for_dies() {
    let (server, _, pid) = half_started_elsewhere().await.unwrap();
    let serving = incumbent(&server.model("echo").await.unwrap()).map(|worker| worker.pid);
    let clients = Clients::start(&server);
    let before = started(&server);
    let killing = async {
        wait_shadow(&server, pid, before).await.unwrap();
        kill(pid);
    };
    let (resized, ()) = tokio::join!(server.resize("echo", 50), killing);
    assert!(resized.is_err(), "its shadow was killed, yet {resized:?}");
    let aborted = |model: &ModelStatusJson| model.handovers.aborted > 0;
    let model = server.wait_status("echo", "a hand-over that was aborted", aborted).await.unwrap();
    assert_eq!((model.share_percent, incumbent(&model).map(|worker| worker.pid)), (20, serving));
    assert_eq!((model.handovers.completed, model.handovers.aborted), (1, 1));
    assert_eq!(deaths_and_restarts(&model), (0, 0));
    finish(&server, clients).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_starting_standby_replaces_a_killed_worker() {
    let (server, half, pid) = half_started("100ms").await.unwrap();
    let clients = Clients::start(&server);
    let before = started(&server);
    kill(incumbent(&server.model("echo").await.unwrap()).unwrap().pid);
    let alone = |model: &ModelStatusJson| model.state == "restarting" && model.workers.len() == 1;
    let model = server.wait_status("echo", "the wait for the standby", alone).await.unwrap();
    assert_eq!(in_phase(&model, "standby", "warming").map(|worker| worker.pid), Some(pid), "{model:?}");
    assert!(
        model.more["why"].as_str().is_some_and(|why| why.contains("the standby is still starting")),
        "{model:?}"
    );
    half.signal(Signal::SIGCONT).unwrap();
    let serves = |model: &ModelStatusJson| incumbent(model).is_some();
    let model = server.wait_status("echo", "another incumbent", serves).await.unwrap();
    assert_eq!(incumbent(&model).map(|worker| worker.pid), Some(pid), "{model:?}");
    assert_eq!((deaths_and_restarts(&model), model.handovers.failovers), ((1, 0), 1));
    assert_eq!(model.handovers.last.unwrap().outcome.as_deref(), Some("taken over"));
    let next = |model: &ModelStatusJson| model.workers.iter().any(|worker| worker.role == "standby");
    server.wait_status("echo", "the next standing worker", next).await.unwrap();
    assert_eq!(started(&server), before + 1, "only that worker: {}", server.log());
    finish(&server, clients).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_starting_standby_that_is_no_longer_configured_is_stopped() {
    let (server, half, _) = half_started("100ms").await.unwrap();
    server.home().write("config.yaml", config("100ms", "\"off\"")).unwrap();
    server.reload().await.unwrap();
    let given_up = |model: &ModelStatusJson| in_phase(model, "standby", "stopping").is_some();
    server.wait_status("echo", "the stop of the standby", given_up).await.unwrap();
    half.signal(Signal::SIGCONT).unwrap();
    let alone = |model: &ModelStatusJson| model.workers.len() == 1;
    let model = server.wait_status("echo", "one worker", alone).await.unwrap();
    assert!(incumbent(&model).is_some(), "{model:?}");
    assert!(!server.log().contains("warm standby ready"), "{}", server.log());
    assert!(!server.log().contains("did not exit in time"), "{}", server.log());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_dead_worker_is_restarted_if_its_starting_standby_dies_as_well() {
    let (server, _, pid) = half_started("100ms").await.unwrap();
    let clients = Clients::start(&server);
    kill(incumbent(&server.model("echo").await.unwrap()).unwrap().pid);
    let alone = |model: &ModelStatusJson| model.state == "restarting" && model.workers.len() == 1;
    server.wait_status("echo", "the wait for the standby", alone).await.unwrap();
    kill(pid);
    let serves = |model: &ModelStatusJson| incumbent(model).is_some();
    let model = server.wait_status("echo", "another incumbent", serves).await.unwrap();
    assert_eq!(incumbent(&model).map(|worker| worker.sms), Some(66), "{model:?}");
    assert_eq!((deaths_and_restarts(&model), model.handovers.failovers), ((1, 1), 0));
    finish(&server, clients).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_change_while_a_starting_standby_replaces_a_dead_worker_uses_that_standby() {
    let (server, half, pid) = half_started_elsewhere().await.unwrap();
    let clients = Clients::start(&server);
    let before = started(&server);
    kill(incumbent(&server.model("echo").await.unwrap()).unwrap().pid);
    let alone = |model: &ModelStatusJson| model.state == "restarting" && model.workers.len() == 1;
    server.wait_status("echo", "the wait for the standby", alone).await.unwrap();
    let going_on = async {
        let model = wait_shadow(&server, pid, before).await.unwrap();
        assert_eq!(model.workers.len(), 1, "{model:?}");
        half.signal(Signal::SIGCONT).unwrap();
    };
    let (resized, ()) = tokio::join!(server.resize("echo", 50), going_on);
    assert_eq!(resized.unwrap().to_sms, 66);
    // `resize` may return shortly before `status` shows the share.
    let in_force = |model: &ModelStatusJson| model.share_percent == 50 && incumbent(model).is_some();
    let model = server.wait_status("echo", "the new share", in_force).await.unwrap();
    assert_eq!(incumbent(&model).map(|worker| worker.pid), Some(pid));
    assert_eq!((model.handovers.completed, model.handovers.failovers), (2, 0));
    assert_eq!(deaths_and_restarts(&model), (1, 0));
    finish(&server, clients).await.unwrap();
    server.stop().await.unwrap();
}
