//! Tests with a long batch that pauses between two pieces for batches of another model.
#![allow(clippy::unwrap_used, reason = "only tests use it")]

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use shadowslice_tests::home::Home;
use shadowslice_tests::load::LoadTally;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;
use tokio::task::JoinHandle;

use crate::fixtures::{EMULATED, assert_nothing_lost, echo, load};

/// The time of the loads. The policy looks for a layout within the first seconds.
const SPAN: Duration = Duration::from_secs(10);

const ADAPTIVE: &str = "{policy: adaptive, interval: 100ms}";

fn profile(ms: f64, kernels: u32) -> String {
    format!(
        "source: {{kind: illustrative}}\nmemory: {{context: 1Mi, weights: 1Mi, activations: 1Mi}}\n\
         start: {{process: 1ms, load: 1ms, warm: 1ms}}\nkernels: {kernels}\nexecution_ms:\n  sms: [132]\n  1: [{ms}]\n"
    )
}

/// Starts a model with batches of 16 kernels of 25 ms each. Next to them, each of the 6 kernels of the
/// other model waits for 25 ms, and its batches are late. Alone, these take 4 ms.
async fn start(controller: &str, keys: &str) -> ServerUnderTest {
    let host = EMULATED.replace("{policy: static}", controller);
    let long = echo("long", &format!("profile: long.yaml, slo: 60s, batch: {{max: 1}}{keys}"));
    let short = echo("short", "profile: short.yaml, slo: 100ms, batch: {max: 1}, queue: {on_late: serve}");
    let home = Home::with_config(&format!("{host}ready: all\nmodels:\n  - {long}\n  - {short}\n")).unwrap();
    home.write("long.yaml", profile(400.0, 16)).unwrap();
    home.write("short.yaml", profile(4.0, 6)).unwrap();
    ServerUnderTest::start_ready(home).await.unwrap()
}

/// Starts a load on both models, under which the policy needs a layout.
fn loads(server: &ServerUnderTest) -> [JoinHandle<LoadTally>; 2] {
    [load(server, "long", 2.0, SPAN), load(server, "short", 5.0, SPAN)]
}

async fn plan(server: &ServerUnderTest) -> String {
    let text = server.command_output(&["plan"]).await.unwrap();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
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
async fn long_batches_pause_for_short_ones_that_are_late_and_say_so() {
    let server = start(ADAPTIVE, "").await;
    let loads = loads(&server);
    let long = server.wait_status("long", "pauses", |model| pauses(model) >= 5).await.unwrap();
    let short = server.model("short").await.unwrap();
    assert_eq!((&preemption(&long)["pieces"], &preemption(&short)["pieces"]), (&8.into(), &4.into()));
    assert_eq!(pauses(&short), 0);
    assert_eq!(preemption(&long)["paused"][0]["for"], "short");
    let plan = plan(&server).await;
    assert!(plan.contains("batches paused") && plan.contains("times for short"), "{plan}");
    assert!(plan.contains("every model on the whole GPU, with pauses"), "{plan}");
    for load in loads {
        assert_nothing_lost(&load.await.unwrap());
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn nothing_pauses_under_a_static_policy_or_if_the_operator_forbids_it() {
    for (controller, tries_layouts) in
        [("{policy: static}", false), ("{policy: adaptive, interval: 100ms, preempt: false}", true)]
    {
        let server = start(controller, "").await;
        for load in loads(&server) {
            assert_nothing_lost(&load.await.unwrap());
        }
        let plan = plan(&server).await;
        assert_eq!(plan.contains("because short violate"), tries_layouts, "{plan}");
        assert!(!plan.contains("pauses"), "{plan}");
        assert_eq!(pauses(&server.model("long").await.unwrap()), 0, "{controller}");
        server.stop().await.unwrap();
    }
}

#[tokio::test]
async fn a_model_in_a_shared_worker_never_pauses_and_says_why() {
    let server = start(ADAPTIVE, ", isolation: shared, handover: auto").await;
    let long = server.model("long").await.unwrap();
    assert_eq!(preemption(&long)["pieces"], Value::Null);
    assert!(preemption(&long)["uncut"].as_str().unwrap().contains("share a process"), "{long:?}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn deaths_of_workers_and_a_supervisor_that_stands_still_lose_no_paused_batch() {
    let server = start(ADAPTIVE, "").await;
    let loads = loads(&server);
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
