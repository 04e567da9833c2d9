//! Tests with a long batch that pauses between two pieces for batches of another model.
#![allow(clippy::unwrap_used, reason = "only tests use it")]

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use shadowslice_tests::home::Home;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;

use crate::fixtures::{EMULATED, assert_nothing_lost, echo, load};

/// The time of the loads.
const SPAN: Duration = Duration::from_secs(4);

fn profile(ms: f64) -> String {
    format!(
        "source: {{kind: illustrative}}\nmemory: {{context: 1Mi, weights: 1Mi, activations: 1Mi}}\n\
         start: {{process: 1ms, load: 1ms, warm: 1ms}}\nexecution_ms:\n  sms: [132]\n  1: [{ms}]\n"
    )
}

/// Starts a model with batches of 400 ms, and one with batches of 4 ms that would be late behind them.
async fn start(controller: &str, keys: &str) -> ServerUnderTest {
    let host = EMULATED.replace("{policy: static}", controller);
    let long = echo("long", &format!("profile: long.yaml, slo: 60s, batch: {{max: 1}}, priority: 2{keys}"));
    let short = echo("short", "profile: short.yaml, slo: 300ms, batch: {max: 1}, queue: {on_late: serve}");
    let home = Home::with_config(&format!("{host}ready: all\nmodels:\n  - {long}\n  - {short}\n")).unwrap();
    home.write("long.yaml", profile(400.0)).unwrap();
    home.write("short.yaml", profile(4.0)).unwrap();
    ServerUnderTest::start_ready(home).await.unwrap()
}

fn preemption(model: &ModelStatusJson) -> &Value {
    &model.more["preemption"]
}

fn pauses(model: &ModelStatusJson) -> u64 {
    preemption(model)["paused"]
        .as_array()
        .unwrap()
        .iter()
        .map(|paused| paused["count"].as_u64().unwrap())
        .sum()
}

#[tokio::test]
async fn a_long_batch_pauses_for_short_ones_and_says_so() {
    let server = start("{policy: adaptive}", "").await;
    let loads = [load(&server, "long", 2.0, SPAN), load(&server, "short", 20.0, SPAN)];
    for load in loads {
        assert_nothing_lost(&load.await.unwrap());
    }
    let (long, short) = (server.model("long").await.unwrap(), server.model("short").await.unwrap());
    assert_eq!((&preemption(&long)["pieces"], &preemption(&short)["pieces"]), (&8.into(), &4.into()));
    assert!(pauses(&long) >= 5 && pauses(&short) == 0, "{long:?} {short:?}");
    assert_eq!(preemption(&long)["paused"][0]["for"], "short");
    let plan = server.command_output(&["plan"]).await.unwrap();
    let plan = plan.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(plan.contains("batches paused") && plan.contains("times for short"), "{plan}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn nothing_pauses_under_a_static_policy_or_if_the_operator_forbids_it() {
    for controller in ["{policy: static}", "{policy: adaptive, preempt: false}"] {
        let server = start(controller, "").await;
        let loads = [load(&server, "long", 2.0, SPAN / 2), load(&server, "short", 20.0, SPAN / 2)];
        for load in loads {
            assert_nothing_lost(&load.await.unwrap());
        }
        assert_eq!(pauses(&server.model("long").await.unwrap()), 0, "{controller}");
        server.stop().await.unwrap();
    }
}

#[tokio::test]
async fn a_model_in_a_shared_worker_never_pauses_and_says_why() {
    let server = start("{policy: adaptive}", ", isolation: shared, handover: auto").await;
    let long = server.model("long").await.unwrap();
    assert_eq!(preemption(&long)["pieces"], Value::Null);
    assert!(preemption(&long)["uncut"].as_str().unwrap().contains("share a process"), "{long:?}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn deaths_of_workers_and_a_supervisor_that_stands_still_lose_no_paused_batch() {
    let server = start("{policy: adaptive}", "").await;
    let loads = [load(&server, "long", 1.5, SPAN), load(&server, "short", 20.0, SPAN)];
    for victim in ["long", "short", "long"] {
        let before = pauses(&server.model("long").await.unwrap());
        server.wait_status("long", "pauses", |model| pauses(model) > before).await.unwrap();
        let pid = server.model(victim).await.unwrap().workers[0].pid;
        ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
        server
            .wait_status(victim, "a new worker", |model| {
                model.workers.first().is_some_and(|worker| worker.pid != pid) && model.state == "ready"
            })
            .await
            .unwrap();
    }
    server.signal(Signal::SIGSTOP).unwrap();
    server.signal(Signal::SIGCONT).unwrap();
    for load in loads {
        assert_nothing_lost(&load.await.unwrap());
    }
    server.stop().await.unwrap();
}
