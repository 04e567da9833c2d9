//! Tests of worker deaths and share changes with standbys.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::{ModelStatusJson, WorkerStatusJson};
use tokio::task::JoinSet;

use crate::fixtures::{EMULATED, ask, assert_nothing_lost, echo, echo_case, load, profile, unwrapped};

/// The number of closed-loop clients.
pub(crate) const CONNECTIONS: u16 = 8;

/// Starts a server with one model that takes 5 ms per batch on half of the GPU. A parked worker
/// stays for the time `dwell`.
async fn one_echo(standby: &str, dwell: &str) -> Result<ServerUnderTest, HarnessError> {
    let more = format!(
        "profile: profile.yaml, share: {{initial: 50%}}, queue: {{on_late: serve}}, standby: {standby}"
    );
    let model = echo("echo", &more);
    let home = Home::with_config(&format!("{EMULATED}timeouts: {{dwell: {dwell}}}\nmodels:\n  - {model}\n"))?;
    home.write("profile.yaml", profile(5.0))?;
    ServerUnderTest::start_ready(home).await
}

pub(crate) fn in_phase<'m>(
    model: &'m ModelStatusJson,
    role: &str,
    phase: &str,
) -> Option<&'m WorkerStatusJson> {
    model.workers.iter().find(|worker| worker.role == role && worker.more["phase"] == phase)
}

pub(crate) fn incumbent(model: &ModelStatusJson) -> Option<&WorkerStatusJson> {
    in_phase(model, "incumbent", "serving")
}

pub(crate) fn standing(model: &ModelStatusJson) -> Option<&WorkerStatusJson> {
    in_phase(model, "standby", "standing")
}

pub(crate) fn kill(pid: i32) {
    let killed = ProcessHandle::of(pid).is_some_and(|process| process.signal(Signal::SIGKILL).is_ok());
    assert!(killed, "cannot kill process {pid}");
}

/// Waits until a standby whose PID is not `but` is ready.
async fn wait_standby(server: &ServerUnderTest, but: i32) -> Result<ModelStatusJson, HarnessError> {
    let other = |model: &ModelStatusJson| standing(model).is_some_and(|worker| worker.pid != but);
    server.wait_status("echo", "another standing worker", other).await
}

/// Closed-loop clients, each with its own connection, which run until they are stopped.
pub(crate) struct Clients {
    stop: Arc<AtomicBool>,
    asking: JoinSet<Vec<RequestOutcome>>,
}

impl Clients {
    pub(crate) fn start(server: &ServerUnderTest) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut asking = JoinSet::new();
        for n in 0..CONNECTIONS {
            let (client, stop) = (server.client(), Arc::clone(&stop));
            asking.spawn(async move {
                let mut outcomes = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    outcomes.push(ask(client.clone(), "echo", &echo_case(n), 0.0).await);
                }
                outcomes
            });
        }
        Self { stop, asking }
    }

    /// Stops the clients. Panics unless every request was answered correctly.
    pub(crate) async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        let outcomes: Vec<RequestOutcome> = self.asking.join_all().await.into_iter().flatten().collect();
        assert!(outcomes.len() > usize::from(CONNECTIONS), "no load: {outcomes:?}");
        let wrong: Vec<_> =
            outcomes.iter().filter(|outcome| **outcome != RequestOutcome::Right).take(5).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}

#[tokio::test]
async fn a_standby_replaces_a_killed_worker() {
    let server = one_echo("always", "100ms").await.unwrap();
    let clients = Clients::start(&server);
    let mut model = wait_standby(&server, 0).await.unwrap();
    for deaths in 1..=4 {
        let ready = standing(&model).unwrap().pid;
        kill(incumbent(&model).unwrap().pid);
        model = wait_standby(&server, ready).await.unwrap();
        assert_eq!(incumbent(&model).unwrap().pid, ready, "{model:?}");
        assert_eq!((&model.more["worker_deaths"], model.state.as_str()), (&deaths.into(), "ready"));
        assert_eq!(model.handovers.failovers, deaths);
        let last = model.handovers.last.as_ref().unwrap();
        assert_eq!(last.outcome.as_deref(), Some("taken over"));
    }
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_standby_replaces_a_hung_worker() {
    let server = one_echo("always", "100ms").await.unwrap();
    let model = wait_standby(&server, 0).await.unwrap();
    let (hung, ready) = (incumbent(&model).unwrap().pid, standing(&model).unwrap().pid);
    let clients = Clients::start(&server);
    let hung = ProcessHandle::of(hung).unwrap();
    hung.signal(Signal::SIGSTOP).unwrap();
    let model = wait_standby(&server, ready).await.unwrap();
    assert_eq!(incumbent(&model).unwrap().pid, ready);
    assert!(!hung.is_alive(), "the hung worker still exists");
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_share_with_a_standby_takes_effect_without_a_new_worker() {
    let server = one_echo("always", "60s").await.unwrap();
    wait_standby(&server, 0).await.unwrap();
    let clients = Clients::start(&server);
    server.resize("echo", 20).await.unwrap();
    let model = server.model("echo").await.unwrap();
    let before: Vec<i32> = model.workers.iter().map(|worker| worker.pid).collect();
    let of = |sms: u32| -> Vec<i32> {
        model.workers.iter().filter(|worker| worker.sms == sms).map(|worker| worker.pid).collect()
    };
    // The replaced worker and the previous standby both have half of the GPU.
    assert_eq!((of(66).len(), of(26).len()), (2, 1), "{model:?}");
    for (percent, sms) in [(50, 66), (20, 26), (50, 66), (20, 26)] {
        let handover = server.resize("echo", percent).await.unwrap();
        assert_eq!(handover.to_sms, sms);
        let model = server.model("echo").await.unwrap();
        assert_eq!(model.share_percent, percent);
        let serving = incumbent(&model).unwrap();
        assert!(of(sms).contains(&serving.pid), "{} is none of {model:?}", serving.pid);
        assert!(model.workers.iter().all(|worker| before.contains(&worker.pid)), "{before:?}: {model:?}");
    }
    let model = server.model("echo").await.unwrap();
    assert_eq!((model.handovers.completed, model.handovers.aborted), (5, 0));
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_standby_follows_the_current_share() {
    let server = one_echo("always", "100ms").await.unwrap();
    let first = standing(&wait_standby(&server, 0).await.unwrap()).unwrap().pid;
    let loading = load(&server, "echo", 100.0, Duration::from_secs(4));
    server.resize("echo", 20).await.unwrap();
    let model = wait_standby(&server, first).await.unwrap();
    assert_eq!((standing(&model).unwrap().sms, incumbent(&model).unwrap().sms), (26, 26), "{model:?}");
    let two = |model: &ModelStatusJson| model.workers.len() == 2;
    server.wait_status("echo", "two workers", two).await.unwrap();
    assert_nothing_lost(&loading.await.unwrap());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_dead_standby_is_replaced_and_disturbs_no_request() {
    let server = one_echo("always", "100ms").await.unwrap();
    let model = wait_standby(&server, 0).await.unwrap();
    let (serving, ready) = (incumbent(&model).unwrap().pid, standing(&model).unwrap().pid);
    let clients = Clients::start(&server);
    kill(ready);
    let model = wait_standby(&server, ready).await.unwrap();
    assert_eq!(incumbent(&model).unwrap().pid, serving);
    assert_eq!((&model.more["worker_deaths"], model.requests.retried), (&0.into(), 0));
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn standbys_that_die_repeatedly_are_replaced_with_growing_delays() {
    let server = one_echo("always", "100ms").await.unwrap();
    let mut standing_now = standing(&wait_standby(&server, 0).await.unwrap()).unwrap().pid;
    for least_s in [1, 2] {
        let killed = Instant::now();
        kill(standing_now);
        standing_now = standing(&wait_standby(&server, standing_now).await.unwrap()).unwrap().pid;
        assert!(killed.elapsed() >= Duration::from_secs(least_s), "{:?}", killed.elapsed());
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_standby_replaces_an_incumbent_that_dies_during_a_hand_over() {
    let server = one_echo("always", "100ms").await.unwrap();
    let model = wait_standby(&server, 0).await.unwrap();
    let (serving, ready) = (incumbent(&model).unwrap().pid, standing(&model).unwrap().pid);
    let clients = Clients::start(&server);
    let killing = async {
        let shadow = |model: &ModelStatusJson| model.workers.iter().any(|worker| worker.role == "shadow");
        server.wait_status("echo", "a shadow", shadow).await.unwrap();
        kill(serving);
        // The supervisor detects the closed connection to the worker shortly before it detects the
        // exit of the process.
        let relieved = |model: &ModelStatusJson| {
            model.handovers.failovers == 1 && model.workers.iter().all(|worker| worker.pid != serving)
        };
        server.wait_status("echo", "a fail-over", relieved).await.unwrap();
    };
    let (resized, ()) = tokio::join!(server.resize("echo", 20), killing);
    assert_eq!(resized.unwrap().to_sms, 26);
    let model = wait_standby(&server, ready).await.unwrap();
    assert_eq!((model.share_percent, standing(&model).unwrap().sms), (20, 26), "{model:?}");
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn without_a_configured_standby_there_is_none() {
    let server = one_echo("\"off\"", "100ms").await.unwrap();
    server.resize("echo", 20).await.unwrap();
    let alone = |model: &ModelStatusJson| model.workers.len() == 1;
    let model = server.wait_status("echo", "one worker", alone).await.unwrap();
    assert_eq!((model.workers[0].role.as_str(), model.workers[0].sms), ("incumbent", 26));
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn standbys_stay_within_the_allowed_memory_and_status_gives_the_reason() {
    let more = "profile: profile.yaml, share: {initial: 50%}, standby: always";
    let models = ["first", "second"].map(|name| format!("  - {}\n", echo(name, more))).concat();
    // Each standby takes 120 MiB according to the profile, so the memory suffices for only one.
    let controller = "controller: {policy: static, standby_memory: 200Mi}";
    let config = EMULATED.replace("controller: {policy: static}", controller);
    let home = Home::with_config(&format!("{config}models:\n{models}")).unwrap();
    home.write("profile.yaml", profile(5.0)).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let reason = |model: &ModelStatusJson| model.more["no_standby"].as_str().unwrap_or_default().to_owned();
    let looking = async {
        loop {
            let models = server.status().await.unwrap().models;
            let stands = models.iter().position(|model| standing(model).is_some());
            let without = models.iter().position(|model| reason(model).contains("standby_memory"));
            if let (Some(stands), Some(without)) = (stands, without) {
                break (models[stands].clone(), models[without].clone());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let (stands, without) = tokio::time::timeout(server.home().timeout(), looking).await.unwrap();
    assert_eq!((reason(&stands).as_str(), without.workers.len()), ("", 1), "{stands:?} {without:?}");
    let said = unwrapped(&server.command_output(&["status"]).await.unwrap());
    assert!(
        said.contains(&format!("{} has no standby: the warm standby needs 0.1 GiB", without.name)),
        "{said}"
    );
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_reason_for_a_missing_standby_disappears_once_one_starts() {
    // Each standby takes 120 MiB according to the profile, so the memory suffices for only one.
    let controller = "controller: {policy: static, standby_memory: 200Mi}";
    let config = |first: &str, second: &str| {
        let model = |name: &str, standby: &str| {
            format!("  - {}\n", echo(name, &format!("profile: profile.yaml, standby: {standby}")))
        };
        let head = EMULATED.replace("controller: {policy: static}", controller);
        format!("{head}models:\n{}{}", model("first", first), model("second", second))
    };
    let home = Home::with_config(&config("always", "\"off\"")).unwrap();
    home.write("profile.yaml", profile(5.0)).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let has_one = |model: &ModelStatusJson| model.workers.iter().any(|worker| worker.role == "standby");
    server.wait_status("first", "a standing worker", has_one).await.unwrap();
    server.home().write("config.yaml", config("always", "always")).unwrap();
    server.reload().await.unwrap();
    let has_reason = |model: &ModelStatusJson| model.more.get("no_standby").is_some_and(|why| !why.is_null());
    server.wait_status("second", "the reason for a missing standby", has_reason).await.unwrap();
    server.home().write("config.yaml", config("\"off\"", "always")).unwrap();
    server.reload().await.unwrap();
    let model = server.wait_status("second", "a standing worker", has_one).await.unwrap();
    assert!(!has_reason(&model), "{model:?}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_standby_of_a_higher_priority_gets_the_memory_of_a_lower_one() {
    // Each standby takes 120 MiB according to the profile, so the memory suffices for only one.
    let controller = "controller: {policy: static, standby_memory: 200Mi}";
    let config = |of_high: &str| {
        let model = |name: &str, standby: &str, priority: u32| {
            let more = format!("profile: profile.yaml, priority: {priority}, standby: {standby}");
            format!("  - {}\n", echo(name, &more))
        };
        let head = EMULATED.replace("controller: {policy: static}", controller);
        format!("{head}models:\n{}{}", model("low", "always", 2), model("high", of_high, 1))
    };
    let home = Home::with_config(&config("\"off\"")).unwrap();
    home.write("profile.yaml", profile(5.0)).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let stands = |model: &ModelStatusJson| standing(model).is_some();
    server.wait_status("low", "a standing worker", stands).await.unwrap();
    server.home().write("config.yaml", config("always")).unwrap();
    server.reload().await.unwrap();
    server.wait_status("high", "a standing worker", stands).await.unwrap();
    let low = server.model("low").await.unwrap();
    assert_eq!(low.workers.len(), 1, "{low:?}");
    assert!(low.more["no_standby"].as_str().is_some_and(|why| why.contains("higher priority")), "{low:?}");
    server.stop().await.unwrap();
}

/// Returns two numbers in MiB: the weights that a worker loaded onto its GPU, and all weights that
/// the worker uses.
fn weights(worker: &WorkerStatusJson) -> (Option<u64>, Option<u64>) {
    let memory = &worker.more["memory"];
    (memory["brought_mib"].as_u64(), memory["weights_mib"].as_u64())
}

#[tokio::test]
async fn weights_are_loaded_once_and_outlive_all_workers() {
    let server = one_echo("always", "100ms").await.unwrap();
    let model = wait_standby(&server, 0).await.unwrap();
    let loaded = [incumbent(&model), standing(&model)].map(|worker| weights(worker.unwrap()));
    assert_eq!(loaded, [(Some(10), Some(10)), (Some(0), Some(10))]);
    let clients = Clients::start(&server);
    let (first, second) = (incumbent(&model).unwrap().pid, standing(&model).unwrap().pid);
    [first, second].into_iter().for_each(kill);
    let fresh = |model: &ModelStatusJson| {
        let all = [incumbent(model), standing(model)];
        all.iter().all(|worker| worker.is_some_and(|worker| ![first, second].contains(&worker.pid)))
    };
    let model = server.wait_status("echo", "two other workers", fresh).await.unwrap();
    let loaded = [incumbent(&model), standing(&model)].map(|worker| weights(worker.unwrap()));
    assert_eq!(loaded, [(Some(0), Some(10)); 2], "the supervisor keeps them");
    clients.end().await;
    server.stop().await.unwrap();
}

/// Checks a standby that is stopped by SIGSTOP. The supervisor must detect this, although a standby
/// gets no requests.
#[tokio::test]
async fn a_stopped_standby_is_replaced() {
    let server = one_echo("always", "100ms").await.unwrap();
    let stopped = standing(&wait_standby(&server, 0).await.unwrap()).unwrap().pid;
    ProcessHandle::of(stopped).unwrap().signal(Signal::SIGSTOP).unwrap();
    wait_standby(&server, stopped).await.unwrap();
    assert!(ProcessHandle::of(stopped).is_none(), "the stopped standby was killed");
    server.stop().await.unwrap();
}
