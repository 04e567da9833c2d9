//! Tests with several models in one worker process (`isolation: shared`).
#![allow(clippy::unwrap_used, reason = "only tests use it")]

use std::collections::BTreeSet;
use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::{ModelStatusJson, StatusJson, WorkerStatusJson};

use crate::fixtures::{EMULATED, ask, assert_nothing_lost, echo, echo_case, load, profile};

fn shared(name: &str, more: &str) -> String {
    let keys =
        format!("profile: profile.yaml, handover: auto, isolation: shared, queue: {{on_late: serve}}{more}");
    echo(name, &keys)
}

/// Makes a folder with these models. The supervisor is ready when all of them are.
fn shared_home(models: &[String]) -> Result<Home, HarnessError> {
    let home = Home::with_config(&config(models))?;
    home.write("profile.yaml", profile(5.0))?;
    Ok(home)
}

fn config(models: &[String]) -> String {
    let models: String = models.iter().map(|model| format!("  - {model}\n")).collect();
    format!("{EMULATED}ready: all\nmodels:\n{models}")
}

fn serving(model: &ModelStatusJson) -> Option<&WorkerStatusJson> {
    model.workers.iter().find(|worker| worker.role == "incumbent" && worker.more["phase"] == "serving")
}

async fn pid(server: &ServerUnderTest, model: &str) -> i32 {
    serving(&server.model(model).await.unwrap()).unwrap().pid
}

fn pids(status: &StatusJson) -> BTreeSet<i32> {
    status.models.iter().filter_map(serving).map(|worker| worker.pid).collect()
}

/// Waits until a process other than `old` serves the model.
async fn replaced(server: &ServerUnderTest, model: &str, old: i32) -> i32 {
    let other = |model: &ModelStatusJson| serving(model).is_some_and(|worker| worker.pid != old);
    let model = server.wait_status(model, "another process", other).await.unwrap();
    serving(&model).unwrap().pid
}

fn kill(pid: i32) {
    ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
}

async fn answers(server: &ServerUnderTest, model: &'static str) {
    assert_eq!(ask(server.client(), model, &echo_case(7), 0.0).await, RequestOutcome::Right, "{model}");
}

#[tokio::test]
async fn models_with_one_worker_name_and_priority_share_a_process() {
    let models = [
        shared("a", ""),
        shared("b", ", worker: shared"),
        shared("c", ", worker: other"),
        shared("d", ", priority: 2"),
        echo("e", "profile: profile.yaml"),
    ];
    let server = ServerUnderTest::start_ready(shared_home(&models).unwrap()).await.unwrap();
    for model in ["a", "b", "c", "d", "e"] {
        answers(&server, model).await;
    }
    assert_eq!(pid(&server, "a").await, pid(&server, "b").await);
    assert_eq!(pids(&server.status().await.unwrap()).len(), 4);
    let before = pid(&server, "a").await;
    let resized = server.resize("a", 25).await.unwrap();
    assert_eq!(resized.mechanism, "in-process", "{resized:?}");
    assert_eq!(pid(&server, "a").await, before);
    answers(&server, "a").await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn models_join_and_leave_a_shared_worker_while_its_other_models_serve() {
    let models = |names: &[&str]| names.iter().map(|name| shared(name, "")).collect::<Vec<_>>();
    let server = ServerUnderTest::start_ready(shared_home(&models(&["a", "b"])).unwrap()).await.unwrap();
    let process = pid(&server, "a").await;
    let loading = load(&server, "a", 100.0, Duration::from_secs(4));
    server.home().write("config.yaml", config(&models(&["a", "b", "c"]))).unwrap();
    server.reload().await.unwrap();
    answers(&server, "c").await;
    server.home().write("config.yaml", config(&models(&["a", "c"]))).unwrap();
    server.reload().await.unwrap();
    assert_eq!(pids(&server.status().await.unwrap()), BTreeSet::from([process]));
    assert_nothing_lost(&loading.await.unwrap());
    assert_eq!(server.model("a").await.unwrap().more["worker_deaths"], 0);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_death_of_a_shared_worker_loses_no_request_of_any_model() {
    let models = ["a", "b", "c"].map(|name| shared(name, ""));
    let server = ServerUnderTest::start_ready(shared_home(&models).unwrap()).await.unwrap();
    let span = Duration::from_secs(4);
    let loads = ["a", "b", "c"].map(|model| load(&server, model, 40.0, span));
    let busy = |model: &ModelStatusJson| model.requests.succeeded > 10;
    server.wait_status("c", "answers", busy).await.unwrap();
    let first = pid(&server, "a").await;
    kill(first);
    for model in ["a", "b", "c"] {
        replaced(&server, model, first).await;
    }
    for load in loads {
        assert_nothing_lost(&load.await.unwrap());
    }
    assert_eq!(pids(&server.status().await.unwrap()).len(), 1, "the models share a process again");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_model_whose_input_kills_gets_a_process_of_its_own() {
    let models = [shared("killer", ", slo: 2s"), shared("idle", "")];
    let home = shared_home(&models).unwrap();
    home.write("profile.yaml", profile(300.0)).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let mut client = server.client();
    let asking = tokio::spawn(async move { client.infer("killer", &echo_case(1).inputs).await });
    let executes = |model: &ModelStatusJson| model.more["in_flight"] == 1;
    let mut old = 0;
    for death in 1..=3 {
        server.wait_status("killer", "a request that executes", executes).await.unwrap();
        let current = pid(&server, "killer").await;
        assert_ne!(current, old);
        assert_eq!(current == pid(&server, "idle").await, death < 3, "before death {death}");
        kill(current);
        old = replaced_pid(&server, current).await;
    }
    let error = asking.await.unwrap().unwrap_err();
    assert!(error.message().contains("3 workers died"), "{error}");
    assert_eq!(server.model("idle").await.unwrap().more["worker_deaths"], 2);
    answers(&server, "idle").await;
    answers(&server, "killer").await;
    assert_ne!(pid(&server, "killer").await, pid(&server, "idle").await);
    server.stop().await.unwrap();
}

/// Waits until the process is gone, and returns its PID.
async fn replaced_pid(server: &ServerUnderTest, old: i32) -> i32 {
    for model in ["killer", "idle"] {
        let gone = |model: &ModelStatusJson| serving(model).is_some_and(|worker| worker.pid != old);
        server.wait_status(model, "another process", gone).await.unwrap();
    }
    old
}

#[tokio::test]
async fn the_standby_of_a_shared_model_is_in_another_process() {
    let models = ["a", "b"].map(|name| shared(name, ", standby: always"));
    let server = ServerUnderTest::start_ready(shared_home(&models).unwrap()).await.unwrap();
    let standby = |model: &ModelStatusJson| {
        let of_role =
            |worker: &&WorkerStatusJson| worker.role == "standby" && worker.more["phase"] == "standing";
        model.workers.iter().find(of_role).map(|worker| worker.pid)
    };
    for model in ["a", "b"] {
        server.wait_status(model, "a standby", |model| standby(model).is_some()).await.unwrap();
    }
    let status = server.status().await.unwrap();
    let standbys: BTreeSet<i32> = status.models.iter().filter_map(standby).collect();
    assert_eq!((pids(&status).len(), standbys.len()), (1, 1));
    assert!(pids(&status).is_disjoint(&standbys));
    let first = pid(&server, "a").await;
    kill(first);
    for model in ["a", "b"] {
        assert_eq!(replaced(&server, model, first).await, *standbys.first().unwrap());
        answers(&server, model).await;
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_shared_worker_that_stops_answering_is_replaced_for_all_its_models() {
    let models = ["a", "b"].map(|name| shared(name, ""));
    let server = ServerUnderTest::start_ready(shared_home(&models).unwrap()).await.unwrap();
    let loading = load(&server, "a", 50.0, Duration::from_secs(6));
    let hung = pid(&server, "a").await;
    ProcessHandle::of(hung).unwrap().signal(Signal::SIGSTOP).unwrap();
    for model in ["a", "b"] {
        replaced(&server, model, hung).await;
        answers(&server, model).await;
    }
    assert_nothing_lost(&loading.await.unwrap());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn two_hundred_models_share_a_process_and_the_memory_for_half_of_them() {
    let names = || (0..200).map(|number| format!("m{number}"));
    let models: Vec<String> = names().map(|name| shared(&name, ", sleep: on-pressure, slo: 5s")).collect();
    // Besides the weights of 100 models, 10 MiB each, the memory has space for one context and the
    // scratch memory of all models.
    let limited = config(&models).replace("sms: 132", "sms: 132, memory: 3100Mi");
    let mut home = Home::with_config(&limited).unwrap();
    home.set_timeout(Duration::from_secs(90));
    home.write("profile.yaml", profile(1.0)).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let status = server.status().await.unwrap();
    assert_eq!(pids(&status).len(), 1);
    let process = ProcessHandle::of(*pids(&status).first().unwrap()).unwrap();
    let memory = process.memory().unwrap();
    assert!(memory < 400 << 20, "the process takes {} MiB", memory >> 20);
    let awake = |status: &StatusJson| {
        status.models.iter().filter(|model| model.more["sleep"]["phase"] != "asleep").count()
    };
    assert!((1..=100).contains(&awake(&status)), "{} models are awake", awake(&status));
    for number in [0, 50, 99, 150, 199] {
        let name: &'static str = Box::leak(format!("m{number}").into_boxed_str());
        answers(&server, name).await;
    }
    kill(process.pid);
    for name in names() {
        replaced(&server, &name, process.pid).await;
    }
    let status = server.status().await.unwrap();
    assert!(status.models.iter().any(|model| model.more["sleep"]["wakes"] != 0), "{:?}", status.models);
    server.stop().await.unwrap();
}
