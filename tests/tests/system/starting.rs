//! Standing workers that still start: the cost of a change of share and of a death with them. Each
//! worker is stopped in its start, so that no test depends on which process is quicker.

use nix::sys::signal::Signal;
use shadowslice_tests::home::{Error, Home};
use shadowslice_tests::process::Process;
use shadowslice_tests::server::Server;
use shadowslice_tests::status::Model;

use crate::scene::{EMULATED, echo, profile};
use crate::standby::{CONNECTIONS, Clients, in_phase, incumbent, kill};

/// A model at half of the GPU.
fn config(dwell: &str, standby: &str) -> String {
    let more = "profile: profile.yaml, share: {initial: 50%}, queue: {on_late: serve}";
    let model = echo("echo", &format!("{more}, standby: {standby}"));
    format!("{EMULATED}timeouts: {{dwell: {dwell}}}\nmodels:\n  - {model}\n")
}

/// A model at half of the GPU that loads for 2 s, and a standing worker of it, which was stopped while it loaded.
async fn half_started(dwell: &str) -> Result<(Server, Process, i32), Error> {
    let home = Home::with_config(&config(dwell, "always"))?;
    home.write("profile.yaml", profile(5.0).replace("load: 50ms", "load: 2s"))?;
    let server = Server::ready(home).await?;
    let starts = |model: &Model| in_phase(model, "standby", "warming").is_some();
    let model = server.wait_status("echo", "a standing worker that starts", starts).await?;
    let pid = in_phase(&model, "standby", "warming").map(|worker| worker.pid).unwrap_or_default();
    let half = Process::of(pid).expect("it is there");
    half.signal(Signal::SIGSTOP).expect("it can be stopped");
    Ok((server, half, pid))
}

/// The same, while another share is in force than that of the worker that starts.
async fn half_started_elsewhere() -> Result<(Server, Process, i32), Error> {
    let (server, half, pid) = half_started("100ms").await?;
    server.resize("echo", 20).await?;
    let two = |model: &Model| model.workers.len() == 2 && incumbent(model).is_some_and(|now| now.sms == 26);
    let model = server.wait_status("echo", "that the old worker is gone", two).await?;
    assert_eq!(in_phase(&model, "standby", "warming").map(|worker| worker.pid), Some(pid), "{model:?}");
    Ok((server, half, pid))
}

/// Workers that were started so far, the reference worker too.
fn started(server: &Server) -> usize {
    server.log().matches("worker started").count()
}

/// The model once so many hand-overs were completed: the client that ordered a hand-over gets its
/// answer a moment before the status shows it.
async fn completed(server: &Server, handovers: u64) -> Result<Model, Error> {
    let all = move |model: &Model| model.handovers.completed >= handovers;
    server.wait_status("echo", "a hand-over that was completed", all).await
}

/// Deaths, and workers that were started in the place of dead ones.
fn deaths_and_restarts(model: &Model) -> (u64, u64) {
    let count = |key: &str| model.more[key].as_u64().expect("a count");
    (count("worker_deaths"), count("worker_restarts"))
}

/// Waits until this worker, which was the standing worker, is the shadow of a hand-over, and checks
/// that no worker was started for that.
async fn is_shadow(server: &Server, pid: i32, before: usize) -> Result<Model, Error> {
    let shadow = |model: &Model| model.workers.iter().any(|worker| worker.role == "shadow");
    let model = server.wait_status("echo", "a shadow", shadow).await?;
    assert_eq!(in_phase(&model, "shadow", "warming").map(|worker| worker.pid), Some(pid), "{model:?}");
    assert_eq!(started(server), before, "{}", server.log());
    Ok(model)
}

/// Lets every client have more than one answer from now on, and fails unless all were right.
async fn go_on(server: &Server, clients: Clients) -> Result<Model, Error> {
    let answered = server.model("echo").await?.requests.succeeded + 2 * u64::from(CONNECTIONS);
    let more = |model: &Model| model.requests.succeeded > answered;
    let model = server.wait_status("echo", "more answers", more).await?;
    clients.end().await;
    Ok(model)
}

#[tokio::test]
async fn a_change_to_the_share_of_a_worker_that_starts_waits_for_it_and_starts_none() {
    let (server, half, pid) = half_started_elsewhere().await.unwrap();
    let clients = Clients::start(&server);
    let before = started(&server);
    let going_on = async {
        let model = is_shadow(&server, pid, before).await.unwrap();
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
    let model = go_on(&server, clients).await.unwrap();
    assert!(model.handovers.last.unwrap().effect_ms.is_some(), "of the answers at the new share");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn what_is_left_of_the_last_change_is_not_waited_for() {
    let (server, half, pid) = half_started("60s").await.unwrap();
    server.resize("echo", 20).await.unwrap();
    server.resize("echo", 30).await.unwrap();
    let model = server.model("echo").await.unwrap();
    assert_eq!(in_phase(&model, "parked", "standing").map(|worker| worker.sms), Some(26), "{model:?}");
    let before = started(&server);
    let going_on = async {
        is_shadow(&server, pid, before).await.unwrap();
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
async fn a_change_fails_with_the_worker_that_it_waits_for() {
    let (server, _, pid) = half_started_elsewhere().await.unwrap();
    let serving = incumbent(&server.model("echo").await.unwrap()).map(|worker| worker.pid);
    let clients = Clients::start(&server);
    let before = started(&server);
    let killing = async {
        is_shadow(&server, pid, before).await.unwrap();
        kill(pid);
    };
    let (resized, ()) = tokio::join!(server.resize("echo", 50), killing);
    assert!(resized.is_err(), "its shadow was killed, yet {resized:?}");
    let aborted = |model: &Model| model.handovers.aborted > 0;
    let model = server.wait_status("echo", "a hand-over that was aborted", aborted).await.unwrap();
    assert_eq!((model.share_percent, incumbent(&model).map(|worker| worker.pid)), (20, serving));
    assert_eq!((model.handovers.completed, model.handovers.aborted), (1, 1));
    assert_eq!(deaths_and_restarts(&model), (0, 0));
    go_on(&server, clients).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_standing_worker_that_starts_serves_in_the_place_of_one_that_was_killed() {
    let (server, half, pid) = half_started("100ms").await.unwrap();
    let clients = Clients::start(&server);
    let before = started(&server);
    kill(incumbent(&server.model("echo").await.unwrap()).unwrap().pid);
    let alone = |model: &Model| model.state == "restarting" && model.workers.len() == 1;
    let model = server.wait_status("echo", "that it is waited for", alone).await.unwrap();
    assert_eq!(in_phase(&model, "standby", "warming").map(|worker| worker.pid), Some(pid), "{model:?}");
    assert!(model.more["why"].as_str().is_some_and(|why| why.contains("standing worker")), "{model:?}");
    half.signal(Signal::SIGCONT).unwrap();
    let serves = |model: &Model| incumbent(model).is_some();
    let model = server.wait_status("echo", "another incumbent", serves).await.unwrap();
    assert_eq!(incumbent(&model).map(|worker| worker.pid), Some(pid), "{model:?}");
    assert_eq!((deaths_and_restarts(&model), model.handovers.failovers), ((1, 0), 1));
    assert_eq!(model.handovers.last.unwrap().outcome.as_deref(), Some("taken over"));
    let next = |model: &Model| model.workers.iter().any(|worker| worker.role == "standby");
    server.wait_status("echo", "the next standing worker", next).await.unwrap();
    assert_eq!(started(&server), before + 1, "only that worker: {}", server.log());
    go_on(&server, clients).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_standing_worker_that_is_no_longer_wanted_is_given_up_while_it_starts() {
    let (server, half, _) = half_started("100ms").await.unwrap();
    server.home().write("config.yaml", config("100ms", "\"off\"")).unwrap();
    server.reload().await.unwrap();
    let given_up = |model: &Model| in_phase(model, "standby", "stopping").is_some();
    server.wait_status("echo", "that it is given up", given_up).await.unwrap();
    half.signal(Signal::SIGCONT).unwrap();
    let alone = |model: &Model| model.workers.len() == 1;
    let model = server.wait_status("echo", "one worker", alone).await.unwrap();
    assert!(incumbent(&model).is_some(), "{model:?}");
    assert!(!server.log().contains("warm standby ready"), "{}", server.log());
    assert!(!server.log().contains("ignored its stop"), "{}", server.log());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_dead_worker_is_restarted_when_the_one_that_would_have_relieved_it_dies_too() {
    let (server, _, pid) = half_started("100ms").await.unwrap();
    let clients = Clients::start(&server);
    kill(incumbent(&server.model("echo").await.unwrap()).unwrap().pid);
    let alone = |model: &Model| model.state == "restarting" && model.workers.len() == 1;
    server.wait_status("echo", "that it is waited for", alone).await.unwrap();
    kill(pid);
    let serves = |model: &Model| incumbent(model).is_some();
    let model = server.wait_status("echo", "another incumbent", serves).await.unwrap();
    assert_eq!(incumbent(&model).map(|worker| worker.sms), Some(66), "{model:?}");
    assert_eq!((deaths_and_restarts(&model), model.handovers.failovers), ((1, 1), 0));
    go_on(&server, clients).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_change_while_a_dead_worker_waits_for_its_relief_takes_that_and_starts_none() {
    let (server, half, pid) = half_started_elsewhere().await.unwrap();
    let clients = Clients::start(&server);
    let before = started(&server);
    kill(incumbent(&server.model("echo").await.unwrap()).unwrap().pid);
    let alone = |model: &Model| model.state == "restarting" && model.workers.len() == 1;
    server.wait_status("echo", "that it is waited for", alone).await.unwrap();
    let going_on = async {
        let model = is_shadow(&server, pid, before).await.unwrap();
        assert_eq!(model.workers.len(), 1, "{model:?}");
        half.signal(Signal::SIGCONT).unwrap();
    };
    let (resized, ()) = tokio::join!(server.resize("echo", 50), going_on);
    assert_eq!(resized.unwrap().to_sms, 66);
    let model = server.model("echo").await.unwrap();
    assert_eq!((model.share_percent, incumbent(&model).map(|worker| worker.pid)), (50, Some(pid)));
    assert_eq!((model.handovers.completed, model.handovers.failovers), (2, 0));
    assert_eq!(deaths_and_restarts(&model), (1, 0));
    go_on(&server, clients).await.unwrap();
    server.stop().await.unwrap();
}
