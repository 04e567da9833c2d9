//! Policies that change shares while the server serves.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use shadowslice_tests::home::{HarnessError, Home, sibling_binary};
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;
use tokio::task::JoinHandle;

use crate::fixtures::{EMULATED, assert_nothing_lost, echo, load, profile, unwrapped};
use crate::standby::{in_phase, incumbent, kill};

/// Starts two models under a policy. Batches of both models take 10 ms on 66 or more SMs.
async fn two(controller: &str, first: &str, second: &str) -> Result<ServerUnderTest, HarnessError> {
    of_profile(&profile(10.0), controller, first, second).await
}

async fn of_profile(
    profile: &str,
    controller: &str,
    first: &str,
    second: &str,
) -> Result<ServerUnderTest, HarnessError> {
    let models = [("one", first), ("two", second)]
        .map(|(name, more)| format!("  - {}\n", echo(name, &format!("profile: profile.yaml, {more}"))));
    let home = Home::with_config(&format!(
        "listen: {{http: [], grpc: [\"unix:grpc.sock\"], metrics: [\"unix:metrics.sock\"]}}\n\
         gpus: [{{device: emulated, sms: 132}}]\ncontroller: {{{controller}}}\nmodels:\n{}",
        models.concat()
    ))?;
    home.write("profile.yaml", profile)?;
    ServerUnderTest::start_ready(home).await
}

/// Waits until the policy has made this number of decisions, and returns the plan.
async fn plan(server: &ServerUnderTest, decisions: u64) -> Result<Value, HarnessError> {
    loop {
        let plan = server.plan().await?;
        if plan["decisions"].as_u64() >= Some(decisions) {
            return Ok(plan);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn shares(server: &ServerUnderTest) -> Result<Vec<u32>, HarnessError> {
    Ok(server.status().await?.models.iter().map(|model| model.share_percent).collect())
}

#[tokio::test]
async fn the_first_workers_have_the_shares_of_the_policy() {
    let server = two("policy: adaptive", "share: {min: 20%}", "share: {max: 60%}").await.unwrap();
    assert_eq!(shares(&server).await.unwrap(), [100, 60]);
    let plan = plan(&server, 2).await.unwrap();
    assert_eq!((plan["policy"].as_str(), plan["act"].as_bool()), (Some("adaptive"), Some(true)));
    for (row, percent) in plan["models"].as_array().unwrap().iter().zip([100, 60]) {
        assert_eq!((&row["verdict"], &row["wanted_percent"]), (&"keep".into(), &percent.into()), "{row}");
    }
    let status = server.status().await.unwrap();
    assert!(status.models.iter().all(|model| model.handovers.completed == 0));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_share_set_by_hand_is_held_until_it_is_released() {
    let server = two("policy: static+admission, interval: 50ms", "gpu: 0", "gpu: 0").await.unwrap();
    assert_eq!(shares(&server).await.unwrap(), [50, 50]);
    let words = server.command_output(&["resize", "one", "20%"]).await.unwrap();
    assert!(words.contains("held until"), "{words}");
    let decided = server.plan().await.unwrap()["decisions"].as_u64().unwrap();
    let waiting = plan(&server, decided + 3).await.unwrap();
    let row = &waiting["models"][0];
    assert_eq!(
        (&row["verdict"], &row["held"], &row["wanted_percent"]),
        (&"wait".into(), &true.into(), &50.into())
    );
    let model = server.model("one").await.unwrap();
    assert_eq!((model.share_percent, &model.more["held"]), (20, &Value::Bool(true)));
    let words = server.command_output(&["resize", "two", "50%"]).await.unwrap();
    assert!(words.contains("already has") && words.contains("held until"), "{words}");
    assert_eq!(server.model("two").await.unwrap().more["held"], true);
    server.command_output(&["release", "two"]).await.unwrap();
    assert_eq!(model.more["wanted_percent"], 50);
    assert!(model.more["verdict"].as_str().unwrap().contains("held"));
    let words = server.command_output(&["release", "one"]).await.unwrap();
    assert!(words.contains("is released"), "{words}");
    let back = |model: &ModelStatusJson| model.share_percent == 50 && model.more["held"] == false;
    server.wait_status("one", "the policy's share", back).await.unwrap();
    assert!(server.command_output(&["release", "one"]).await.unwrap().contains("already"));
    assert!(server.command_output(&["hold", "two"]).await.unwrap().contains("is held"));
    let table = server.command_output(&["status"]).await.unwrap();
    assert!(table.contains("two is held at 50%"), "{table}");
    let unknown = server.home().run(&["hold", "absent"]).await.unwrap();
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("one, two"));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_rollback_of_a_share_set_by_hand_is_not_blamed_on_the_policy() {
    let server = two("policy: static+admission, interval: 50ms", "gpu: 0", "gpu: 0").await.unwrap();
    server.command_output(&["resize", "one", "20%"]).await.unwrap();
    let parked = |model: &ModelStatusJson| in_phase(model, "parked", "standing").is_some();
    let model = server.wait_status("one", "a worker that was relieved", parked).await.unwrap();
    kill(incumbent(&model).unwrap().pid);
    let taken_back = |model: &ModelStatusJson| model.handovers.rolled_back == 1;
    let model = server.wait_status("one", "the old share", taken_back).await.unwrap();
    assert_eq!(model.more["worker_deaths"], 1, "the worker that died served");
    let decided = server.plan().await.unwrap()["decisions"].as_u64().unwrap();
    plan(&server, decided + 2).await.unwrap();
    server.wait_line(&["outcome=\"rolled back\" cause=\"hand\""]).await.unwrap();
    let log = server.log();
    assert!(!log.contains("the policy's change of the model's share failed"), "{log}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_policy_moves_shares_under_load_and_loses_nothing() {
    // All models meet their SLOs, so the policy restores the configured shares.
    let share = "share: {initial: 40%, min: 30%}, queue: {on_late: serve}";
    let policy = "policy: adaptive, interval: 100ms";
    let server = two(policy, share, share).await.unwrap();
    let loads = ["one", "two"].map(|model| load(&server, model, 30.0, Duration::from_secs(6)));
    for model in ["one", "two"] {
        server.command_output(&["resize", model, "60%"]).await.unwrap();
        server.command_output(&["release", model]).await.unwrap();
    }
    let moved = |model: &ModelStatusJson| model.handovers.completed > 1 && model.share_percent == 40;
    for model in ["one", "two"] {
        server.wait_status(model, "a share that the policy changed", moved).await.unwrap();
    }
    for load in loads {
        assert_nothing_lost(&load.await.unwrap());
    }
    assert!(
        std::fs::read_to_string(server.home().log_path())
            .unwrap()
            .contains("the policy changes the model's share")
    );
    let table = server.command_output(&["plan"]).await.unwrap();
    assert!(table.starts_with("policy: adaptive, every 100 ms, "), "{table}");
    // The plan must show figures, although no request arrived in the last interval.
    assert!(table.contains("cover the last ") && !table.contains(" idle "), "{table}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_plan_shows_the_groups_of_each_model_and_who_shares_them() {
    let inside = "handover: auto, share: {initial: 60%}";
    let server = two("policy: adaptive, act: false", inside, inside).await.unwrap();
    let on_groups = |model: &ModelStatusJson| model.groups.as_deref() != Some("all");
    for model in ["one", "two"] {
        server.wait_status(model, "groups of its own", on_groups).await.unwrap();
    }
    let decided = server.plan().await.unwrap()["decisions"].as_u64().unwrap();
    let plan = plan(&server, decided + 2).await.unwrap();
    let [one, two] = [0, 1].map(|model| plan["models"][model].clone());
    // The model has 9 of the 17 groups.
    assert_eq!((&one["mechanism"], &one["groups"]), (&"in-process".into(), &"0-8".into()), "{one}");
    assert_eq!(one["groups_shared_with"], serde_json::json!(["two"]));
    assert_eq!(two["groups_shared_with"], serde_json::json!(["one"]));
    let table = unwrapped(&server.command_output(&["plan"]).await.unwrap());
    assert!(table.contains("in-process, groups 0-8, partly shared with two"), "{table}");
    server.stop().await.unwrap();
}

/// Starts the model `one`, and the model `two` with a lower priority. The test saturates `two`, and
/// sends fewer requests to `one` than it has capacity for. The kernels of both models take turns,
/// so `one` nevertheless falls behind. All times are long compared with the delays on a busy host.
async fn beside_a_hog(handover: &str) -> Result<ServerUnderTest, HarnessError> {
    let profile = profile(50.0).replace("sms: [66]", "sms: [132]");
    let [high, low] = [1, 2]
        .map(|priority| format!("slo: 1s, batch: {{max: 1}}, priority: {priority}, handover: {handover}"));
    of_profile(&profile, "policy: adaptive", &high, &low).await
}

#[tokio::test]
async fn a_lower_priority_gets_less_if_models_violate_their_slos_and_plan_shows_it() {
    for handover in ["in-process", "shadow"] {
        let server = beside_a_hog(handover).await.unwrap();
        let span = Duration::from_secs(15);
        let loads = [("one", 12.0), ("two", 30.0)].map(|(model, rate)| load(&server, model, rate, span));
        let has_less = |model: &ModelStatusJson| {
            let verdict = model.more["verdict"].as_str();
            let says =
                verdict.is_some_and(|why| why.contains("lower priorities in") && why.contains("violate"));
            says && model.share_percent < 60
        };
        server.wait_status("two", "a layout in which it has less", has_less).await.unwrap();
        let table = unwrapped(&server.command_output(&["plan"]).await.unwrap());
        assert!(table.contains("violate") && table.contains("lower priorities in"), "{table}");
        let [high, low] = loads;
        let (high, low) = (high.await.unwrap(), low.await.unwrap());
        for tally in [&high, &low] {
            assert_eq!((tally.wrong, tally.answered() + tally.failures()), (0, tally.offered));
            let other = tally.failed.keys().find(|why| !why.starts_with("Unavailable"));
            assert_eq!(other, None);
        }
        assert!(low.right > 0 && low.failures() > low.offered / 4, "{low:?}");
        server.stop().await.unwrap();
    }
}

#[tokio::test]
async fn nothing_is_refused_and_no_share_changes_while_all_models_meet_their_slos() {
    let more = "slo: 5s, share: {initial: 100%}";
    let server = two("policy: adaptive, interval: 20ms", more, more).await.unwrap();
    let loads = ["one", "two"].map(|model| load(&server, model, 30.0, Duration::from_secs(3)));
    for load in loads {
        assert_nothing_lost(&load.await.unwrap());
    }
    let plan = plan(&server, 100).await.unwrap();
    for row in plan["models"].as_array().unwrap() {
        assert_eq!((&row["verdict"], &row["door"]["refuse_late"]), (&"keep".into(), &false.into()), "{row}");
        assert!(row["why"].as_str().unwrap().starts_with("0.0 % of recent requests missed"), "{row}");
    }
    for model in server.status().await.unwrap().models {
        assert_eq!((model.share_percent, model.handovers.completed), (100, 0));
    }
    server.stop().await.unwrap();
}

/// Stops a process for 160 ms of every 400 ms until the task is aborted. This simulates a lack of
/// CPU time for the process.
fn starve(pid: i32) -> JoinHandle<()> {
    tokio::spawn(async move {
        let process = ProcessHandle::of(pid).expect("the worker runs");
        loop {
            for (signal, ms) in [(Signal::SIGCONT, 240), (Signal::SIGSTOP, 160)] {
                process.signal(signal).expect("the worker runs");
                tokio::time::sleep(Duration::from_millis(ms)).await;
            }
        }
    })
}

/// Checks a model that violates its SLO only because its worker gets too little CPU time. A batch
/// takes a fiftieth of the SLO, so more SMs would not help, even on a busy host.
#[tokio::test]
async fn a_model_that_violates_its_slo_due_to_cpu_time_does_not_shrink_its_neighbours() {
    let high = "slo: 100ms, batch: {max: 4}, priority: 1, handover: in-process";
    let low = "slo: 1s, priority: 2, handover: in-process";
    let server = of_profile(&profile(2.0), "policy: adaptive", high, low).await.unwrap();
    let pid = incumbent(&server.model("one").await.unwrap()).unwrap().pid;
    let starved = starve(pid);
    let loads = [("one", 200.0), ("two", 200.0)]
        .map(|(model, rate)| load(&server, model, rate, Duration::from_secs(6)));
    let says_so = |model: &ModelStatusJson| {
        model.more["verdict"].as_str().is_some_and(|why| why.contains("more SMs would not help"))
    };
    server.wait_status("one", "that it misses for another reason", says_so).await.unwrap();
    let [one, two] = loads;
    let (one, two) = (one.await.unwrap(), two.await.unwrap());
    starved.abort();
    ProcessHandle::of(pid).unwrap().signal(Signal::SIGCONT).unwrap();
    assert_nothing_lost(&two);
    // If the host runs other tests at the same time, there may be so little CPU time that the queue
    // does not advance. The policy cannot change that.
    let by_the_policy = one.failed.keys().find(|why| !why.contains("the server is overloaded"));
    assert_eq!((by_the_policy, one.wrong, one.answered() + one.failures()), (None, 0, one.offered));
    assert!(one.attainment(Duration::from_millis(100)) < 0.95, "the model violates its SLO");
    for model in server.status().await.unwrap().models {
        assert_eq!((model.share_percent, model.handovers.completed), (100, 0), "{model:?}");
    }
    assert!(!server.log().contains("the policy changes the model's share"));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_policy_that_only_recommends_changes_nothing() {
    let server = two("policy: adaptive, interval: 20ms, act: false", "gpu: 0", "gpu: 0").await.unwrap();
    let plan = plan(&server, 10).await.unwrap();
    for row in plan["models"].as_array().unwrap() {
        assert_eq!((&row["share_percent"], &row["wanted_percent"]), (&50.into(), &100.into()), "{row}");
        assert_eq!((&row["verdict"], row["not_ordered"].is_string()), (&"grow".into(), true), "{row}");
    }
    for model in server.status().await.unwrap().models {
        assert_eq!((model.share_percent, model.workers.len(), model.handovers.completed), (50, 1, 0));
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn without_a_policy_nothing_is_decided_and_nothing_is_held() {
    let server = two("policy: static", "share: {initial: 50%}", "gpu: 0").await.unwrap();
    let plan = server.plan().await.unwrap();
    assert_eq!((plan["decisions"].as_u64(), plan["models"].as_array().unwrap().len()), (Some(0), 0));
    assert!(server.command_output(&["plan"]).await.unwrap().contains("shares change only by"));
    let words = server.command_output(&["resize", "one", "20%"]).await.unwrap();
    assert!(!words.contains("held"), "{words}");
    let again = server.command_output(&["resize", "one", "20%"]).await.unwrap();
    assert!(again.contains("already has") && !again.contains("held"), "{again}");
    assert_eq!(server.model("one").await.unwrap().more["held"], false);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_resize_that_only_retries_the_start_of_a_model_holds_nothing() {
    let text = EMULATED.replace("policy: static", "policy: static+admission");
    let mut home = Home::with_config(&format!("{text}models:\n  - {}\n", echo("echo", "gpu: 0"))).unwrap();
    let (broken, real) = (home.path().join("broken"), sibling_binary("shadowslice-worker").unwrap());
    home.set_worker(&format!("test -e {} && exit 1\nexec {} \"$@\"", broken.display(), real.display()))
        .unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    std::fs::write(&broken, "").unwrap();
    let pid = server.model("echo").await.unwrap().workers[0].pid;
    ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
    server.wait_status("echo", "unready", |model| model.state == "unready").await.unwrap();
    std::fs::remove_file(&broken).unwrap();
    let words = server.command_output(&["resize", "echo", "100%"]).await.unwrap();
    assert!(!words.contains("held until"), "{words}");
    let model = server.wait_status("echo", "ready", |model| model.state == "ready").await.unwrap();
    assert_eq!((model.share_percent, &model.more["held"]), (100, &Value::Bool(false)));
    // For a model that is ready, the same command holds the share.
    assert!(server.command_output(&["resize", "echo", "100%"]).await.unwrap().contains("held until"));
    assert_eq!(server.model("echo").await.unwrap().more["held"], true);
    server.stop().await.unwrap();
}
