//! Tests with models that sleep: their weights leave the emulated GPU and come back with a request.
#![allow(clippy::unwrap_used, reason = "only tests use it")]

use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::Home;
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;

use crate::fixtures::{EMULATED, ask, assert_nothing_lost, echo, echo_case, load};

/// A worker takes 100 MiB of weights and 10 MiB of scratch. Models of a shared worker have one context.
const PROFILE: &str = "source: {kind: illustrative}\n\
    memory: {context: 100Mi, weights: 100Mi, activations: 10Mi}\n\
    start: {process: 20ms, load: 20ms, warm: 10ms}\n\
    execution_ms:\n  sms: [66]\n  1: [1.0]\n  16: [1.0]\n";

/// The names of the models, which outlive the test.
const MODELS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

fn config(memory: &str, count: usize, keys: &str) -> String {
    let host = EMULATED.replace("sms: 132", &format!("sms: 132{memory}"));
    let model = |name: &&str| {
        let keys = format!("profile: profile.yaml, slo: 5s, isolation: shared, handover: auto{keys}");
        format!("  - {}\n", echo(name, &keys))
    };
    let models: String = MODELS[..count].iter().map(model).collect();
    format!("{host}ready: all\nmodels:\n{models}")
}

async fn start(config: &str) -> ServerUnderTest {
    let home = Home::with_config(config).unwrap();
    home.write("profile.yaml", PROFILE).unwrap();
    ServerUnderTest::start_ready(home).await.unwrap()
}

fn phase(model: &ModelStatusJson) -> &str {
    model.more["sleep"]["phase"].as_str().unwrap()
}

fn wakes(model: &ModelStatusJson) -> u64 {
    model.more["sleep"]["wakes"].as_u64().unwrap()
}

async fn asleep(server: &ServerUnderTest, model: &str) -> ModelStatusJson {
    server.wait_status(model, "sleep", |model| phase(model) == "asleep").await.unwrap()
}

async fn answers(server: &ServerUnderTest, model: &'static str) {
    assert_eq!(ask(server.client(), model, &echo_case(7), 0.0).await, RequestOutcome::Right, "{model}");
}

#[tokio::test]
async fn a_model_without_requests_sleeps_and_its_next_request_wakes_it() {
    let server = start(&config("", 2, ", sleep: {after: 300ms}")).await;
    for round in 1..=3 {
        let model = asleep(&server, "a").await;
        assert_eq!((model.state.as_str(), &model.more["sleep"]["cause"]), ("ready", &"idle".into()));
        assert!(server.client().model_ready("a").await.unwrap());
        answers(&server, "a").await;
        let model = server.model("a").await.unwrap();
        assert_eq!(wakes(&model), round);
        let took = model.more["sleep"]["last_wake_ms"].as_f64().unwrap();
        assert!((2.0..1_000.0).contains(&took), "{took} ms for 100 MiB");
    }
    let text = server.command_output(&["status"]).await.unwrap();
    assert!(text.contains("b     asleep") && text.contains("because it had no requests"), "{text}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn models_that_exceed_the_memory_take_turns_and_lose_no_request() {
    let server = start(&config(", memory: 500Mi", 8, ", sleep: on-pressure")).await;
    let span = Duration::from_secs(5);
    let loads = MODELS.map(|model| load(&server, model, 20.0, span));
    // Three models fit into 500 MiB, less the context and the scratch of eight models.
    let mut most = 0;
    while !loads.iter().all(|load| load.is_finished()) {
        let status = server.status().await.unwrap();
        most = most.max(status.models.iter().filter(|model| phase(model) != "asleep").count());
    }
    assert_eq!(most, 3, "models on the GPU at a time");
    for load in loads {
        assert_nothing_lost(&load.await.unwrap());
    }
    let status = server.status().await.unwrap();
    assert!(status.models.iter().all(|model| wakes(model) >= 5), "{:?}", status.models);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_operator_makes_models_sleep_and_wake() {
    let server = start(&config("", 2, "")).await;
    let command = async |arguments: &[&str]| server.command_output(arguments).await.unwrap();
    assert!(command(&["sleep", "a"]).await.starts_with("a is asleep: its next request wakes it, after "));
    assert_eq!(command(&["sleep", "a"]).await.trim(), "a was already asleep: its next request wakes it");
    assert_eq!(phase(&server.model("a").await.unwrap()), "asleep");
    assert!(command(&["wake", "a"]).await.starts_with("a is awake, after "));
    assert_eq!(command(&["wake", "a"]).await.trim(), "a was already awake");
    let unknown = server.home().run(&["sleep", "x"]).await.unwrap();
    assert_eq!(unknown.status.code(), Some(1));
    server.wait_line(&["audit", "action=\"sleep\"", "on=\"a\"", "done"]).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_death_of_a_worker_whose_models_sleep_loses_nothing() {
    let server = start(&config(", memory: 500Mi", 8, ", sleep: on-pressure")).await;
    let loads = MODELS.map(|model| load(&server, model, 10.0, Duration::from_secs(5)));
    let busy = |model: &ModelStatusJson| wakes(model) > 2;
    server.wait_status("h", "wakes", busy).await.unwrap();
    let pid = server.model("h").await.unwrap().workers[0].pid;
    ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
    for load in loads {
        assert_nothing_lost(&load.await.unwrap());
    }
    assert!(server.model("h").await.unwrap().workers[0].pid != pid);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_reload_changes_when_models_sleep_without_other_workers() {
    let server = start(&config("", 1, "")).await;
    let pid = server.model("a").await.unwrap().workers[0].pid;
    server.home().write("config.yaml", config("", 1, ", sleep: {after: 200ms}")).unwrap();
    server.reload().await.unwrap();
    assert_eq!(asleep(&server, "a").await.workers[0].pid, pid);
    answers(&server, "a").await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn models_that_sleep_are_upgraded_without_a_lost_request() {
    let mut server = start(&config("", 2, ", sleep: {after: 300ms}")).await;
    asleep(&server, "b").await;
    let loading = load(&server, "a", 5.0, Duration::from_secs(6));
    server.upgrade().await.unwrap();
    answers(&server, "b").await;
    assert_nothing_lost(&loading.await.unwrap());
    server.stop().await.unwrap();
}
