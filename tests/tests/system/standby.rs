//! Standing workers: the cost of a death and of a change of share with them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use shadowslice_tests::home::{Error, Home};
use shadowslice_tests::load::Outcome;
use shadowslice_tests::process::Process;
use shadowslice_tests::server::Server;
use shadowslice_tests::status::{Model, Worker};
use tokio::task::JoinSet;

use crate::scene::{EMULATED, ask, assert_nothing_lost, echo, echo_case, load, profile, unwrapped};

/// Clients that each wait for an answer before they ask again.
pub(crate) const CONNECTIONS: u16 = 8;

/// A server with one model that takes 5 ms per batch at half of the GPU, ready. A parked worker
/// stays long enough to be used.
async fn one_echo(standby: &str, dwell: &str) -> Result<Server, Error> {
    let more = format!(
        "profile: profile.yaml, share: {{initial: 50%}}, queue: {{on_late: serve}}, standby: {standby}"
    );
    let model = echo("echo", &more);
    let home = Home::with_config(&format!("{EMULATED}timeouts: {{dwell: {dwell}}}\nmodels:\n  - {model}\n"))?;
    home.write("profile.yaml", profile(5.0))?;
    Server::ready(home).await
}

pub(crate) fn in_phase<'m>(model: &'m Model, role: &str, phase: &str) -> Option<&'m Worker> {
    model.workers.iter().find(|worker| worker.role == role && worker.more["phase"] == phase)
}

pub(crate) fn incumbent(model: &Model) -> Option<&Worker> {
    in_phase(model, "incumbent", "serving")
}

pub(crate) fn standing(model: &Model) -> Option<&Worker> {
    in_phase(model, "standby", "standing")
}

pub(crate) fn kill(pid: i32) {
    let killed = Process::of(pid).is_some_and(|process| process.signal(Signal::SIGKILL).is_ok());
    assert!(killed, "there is no process {pid} to kill");
}

/// Waits until a worker other than `but` stands ready.
async fn stands(server: &Server, but: i32) -> Result<Model, Error> {
    let other = |model: &Model| standing(model).is_some_and(|worker| worker.pid != but);
    server.wait_status("echo", "another standing worker", other).await
}

/// Closed-loop clients, each with a connection of its own, until they are told to stop.
pub(crate) struct Clients {
    stop: Arc<AtomicBool>,
    asking: JoinSet<Vec<Outcome>>,
}

impl Clients {
    pub(crate) fn start(server: &Server) -> Self {
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

    /// Fails unless every request was answered, and rightly.
    pub(crate) async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        let outcomes: Vec<Outcome> = self.asking.join_all().await.into_iter().flatten().collect();
        assert!(outcomes.len() > usize::from(CONNECTIONS), "no load: {outcomes:?}");
        let wrong: Vec<_> = outcomes.iter().filter(|outcome| **outcome != Outcome::Right).take(5).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}

#[tokio::test]
async fn a_standing_worker_serves_in_the_place_of_one_that_was_killed() {
    let server = one_echo("always", "100ms").await.unwrap();
    let clients = Clients::start(&server);
    let mut model = stands(&server, 0).await.unwrap();
    for deaths in 1..=4 {
        let ready = standing(&model).unwrap().pid;
        kill(incumbent(&model).unwrap().pid);
        model = stands(&server, ready).await.unwrap();
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
async fn a_standing_worker_serves_in_the_place_of_one_that_hangs() {
    let server = one_echo("always", "100ms").await.unwrap();
    let model = stands(&server, 0).await.unwrap();
    let (hung, ready) = (incumbent(&model).unwrap().pid, standing(&model).unwrap().pid);
    let clients = Clients::start(&server);
    let hung = Process::of(hung).unwrap();
    hung.signal(Signal::SIGSTOP).unwrap();
    let model = stands(&server, ready).await.unwrap();
    assert_eq!(incumbent(&model).unwrap().pid, ready);
    assert!(!hung.alive(), "the hung worker is still there");
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_share_at_which_a_worker_stands_ready_is_in_force_without_a_new_one() {
    let server = one_echo("always", "60s").await.unwrap();
    stands(&server, 0).await.unwrap();
    let clients = Clients::start(&server);
    server.resize("echo", 20).await.unwrap();
    let model = server.model("echo").await.unwrap();
    let before: Vec<i32> = model.workers.iter().map(|worker| worker.pid).collect();
    let of = |sms: u32| -> Vec<i32> {
        model.workers.iter().filter(|worker| worker.sms == sms).map(|worker| worker.pid).collect()
    };
    // One worker was relieved, and another had stood ready: both have half of the GPU.
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
async fn the_standing_worker_follows_the_share_in_force() {
    let server = one_echo("always", "100ms").await.unwrap();
    let first = standing(&stands(&server, 0).await.unwrap()).unwrap().pid;
    let loading = load(&server, "echo", 100.0, Duration::from_secs(4));
    server.resize("echo", 20).await.unwrap();
    let model = stands(&server, first).await.unwrap();
    assert_eq!((standing(&model).unwrap().sms, incumbent(&model).unwrap().sms), (26, 26), "{model:?}");
    let two = |model: &Model| model.workers.len() == 2;
    server.wait_status("echo", "two workers", two).await.unwrap();
    assert_nothing_lost(&loading.await.unwrap());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_standing_worker_that_dies_is_replaced_and_disturbs_no_request() {
    let server = one_echo("always", "100ms").await.unwrap();
    let model = stands(&server, 0).await.unwrap();
    let (serving, ready) = (incumbent(&model).unwrap().pid, standing(&model).unwrap().pid);
    let clients = Clients::start(&server);
    kill(ready);
    let model = stands(&server, ready).await.unwrap();
    assert_eq!(incumbent(&model).unwrap().pid, serving);
    assert_eq!((&model.more["worker_deaths"], model.requests.retried), (&0.into(), 0));
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn standing_workers_that_die_again_and_again_come_more_and_more_seldom() {
    let server = one_echo("always", "100ms").await.unwrap();
    let mut standing_now = standing(&stands(&server, 0).await.unwrap()).unwrap().pid;
    for least_s in [1, 2] {
        let killed = Instant::now();
        kill(standing_now);
        standing_now = standing(&stands(&server, standing_now).await.unwrap()).unwrap().pid;
        assert!(killed.elapsed() >= Duration::from_secs(least_s), "{:?}", killed.elapsed());
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_incumbent_that_dies_in_a_hand_over_is_relieved_by_the_standing_worker() {
    let server = one_echo("always", "100ms").await.unwrap();
    let model = stands(&server, 0).await.unwrap();
    let (serving, ready) = (incumbent(&model).unwrap().pid, standing(&model).unwrap().pid);
    let clients = Clients::start(&server);
    let killing = async {
        let shadow = |model: &Model| model.workers.iter().any(|worker| worker.role == "shadow");
        server.wait_status("echo", "a shadow", shadow).await.unwrap();
        kill(serving);
        // Its lane is seen to end a moment before its process is.
        let relieved = |model: &Model| {
            model.handovers.failovers == 1 && model.workers.iter().all(|worker| worker.pid != serving)
        };
        server.wait_status("echo", "a fail-over", relieved).await.unwrap();
    };
    let (resized, ()) = tokio::join!(server.resize("echo", 20), killing);
    assert_eq!(resized.unwrap().to_sms, 26);
    let model = stands(&server, ready).await.unwrap();
    assert_eq!((model.share_percent, standing(&model).unwrap().sms), (20, 26), "{model:?}");
    clients.end().await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn none_stands_ready_where_none_is_wanted() {
    let server = one_echo("\"off\"", "100ms").await.unwrap();
    server.resize("echo", 20).await.unwrap();
    let alone = |model: &Model| model.workers.len() == 1;
    let model = server.wait_status("echo", "one worker", alone).await.unwrap();
    assert_eq!((model.workers[0].role.as_str(), model.workers[0].sms), ("incumbent", 26));
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, Outcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn none_stands_ready_beyond_the_memory_that_is_allowed_and_status_says_so() {
    let more = "profile: profile.yaml, share: {initial: 50%}, standby: always";
    let models = ["first", "second"].map(|name| format!("  - {}\n", echo(name, more))).concat();
    // Each takes 120 MiB by its profile.
    let controller = "controller: {policy: static, standby_memory: 200Mi}";
    let config = EMULATED.replace("controller: {policy: static}", controller);
    let home = Home::with_config(&format!("{config}models:\n{models}")).unwrap();
    home.write("profile.yaml", profile(5.0)).unwrap();
    let server = Server::ready(home).await.unwrap();
    let told = |model: &Model| model.more["no_standby"].as_str().unwrap_or_default().to_owned();
    let looking = async {
        loop {
            let models = server.status().await.unwrap().models;
            let stands = models.iter().position(|model| standing(model).is_some());
            let lacks = models.iter().position(|model| told(model).contains("standby_memory"));
            if let (Some(stands), Some(lacks)) = (stands, lacks) {
                break (models[stands].clone(), models[lacks].clone());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let (stands, lacks) = tokio::time::timeout(server.home().patience(), looking).await.unwrap();
    assert_eq!((told(&stands).as_str(), lacks.workers.len()), ("", 1), "{stands:?} {lacks:?}");
    let said = unwrapped(&server.said(&["status"]).await.unwrap());
    assert!(said.contains(&format!("{} has no standby: it needs 0.1 GiB", lacks.name)), "{said}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn why_none_stands_ready_is_said_no_longer_once_one_starts() {
    // Each takes 120 MiB by its profile.
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
    let server = Server::ready(home).await.unwrap();
    let has_one = |model: &Model| model.workers.iter().any(|worker| worker.role == "standby");
    server.wait_status("first", "a standing worker", has_one).await.unwrap();
    server.home().write("config.yaml", config("always", "always")).unwrap();
    server.reload().await.unwrap();
    let lacks_one = |model: &Model| model.more.get("no_standby").is_some_and(|why| !why.is_null());
    server.wait_status("second", "why no worker stands ready", lacks_one).await.unwrap();
    server.home().write("config.yaml", config("\"off\"", "always")).unwrap();
    server.reload().await.unwrap();
    let model = server.wait_status("second", "a standing worker", has_one).await.unwrap();
    assert!(!lacks_one(&model), "{model:?}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_higher_priority_has_the_memory_that_a_lower_ones_standing_worker_took() {
    // Each takes 120 MiB by its profile.
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
    let server = Server::ready(home).await.unwrap();
    let stands = |model: &Model| standing(model).is_some();
    server.wait_status("low", "a standing worker", stands).await.unwrap();
    server.home().write("config.yaml", config("always")).unwrap();
    server.reload().await.unwrap();
    server.wait_status("high", "a standing worker", stands).await.unwrap();
    let low = server.model("low").await.unwrap();
    assert_eq!(low.workers.len(), 1, "{low:?}");
    assert!(low.more["no_standby"].as_str().is_some_and(|why| why.contains("a higher priority")), "{low:?}");
    server.stop().await.unwrap();
}

/// The MiB of weights that a worker brought to its GPU, and all that it uses there.
fn weights(worker: &Worker) -> (Option<u64>, Option<u64>) {
    let memory = &worker.more["memory"];
    (memory["brought_mib"].as_u64(), memory["weights_mib"].as_u64())
}

#[tokio::test]
async fn weights_are_brought_once_and_outlive_all_workers() {
    let server = one_echo("always", "100ms").await.unwrap();
    let model = stands(&server, 0).await.unwrap();
    let brought = [incumbent(&model), standing(&model)].map(|worker| weights(worker.unwrap()));
    assert_eq!(brought, [(Some(10), Some(10)), (Some(0), Some(10))]);
    let clients = Clients::start(&server);
    let (first, second) = (incumbent(&model).unwrap().pid, standing(&model).unwrap().pid);
    [first, second].into_iter().for_each(kill);
    let fresh = |model: &Model| {
        let all = [incumbent(model), standing(model)];
        all.iter().all(|worker| worker.is_some_and(|worker| ![first, second].contains(&worker.pid)))
    };
    let model = server.wait_status("echo", "two other workers", fresh).await.unwrap();
    let brought = [incumbent(&model), standing(&model)].map(|worker| weights(worker.unwrap()));
    assert_eq!(brought, [(Some(0), Some(10)); 2], "the supervisor keeps them");
    clients.end().await;
    server.stop().await.unwrap();
}

/// Nothing is asked of it, so nothing else would tell before it is needed.
#[tokio::test]
async fn a_standing_worker_that_is_stopped_is_replaced() {
    let server = one_echo("always", "100ms").await.unwrap();
    let stopped = standing(&stands(&server, 0).await.unwrap()).unwrap().pid;
    Process::of(stopped).unwrap().signal(Signal::SIGSTOP).unwrap();
    stands(&server, stopped).await.unwrap();
    assert!(Process::of(stopped).is_none(), "it was ended");
    server.stop().await.unwrap();
}
