//! Tests of slow hand-overs, of shares that cannot change, and of the recovery of unready models.

use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;

use crate::fixtures::{EMULATED, ask, echo, echo_case, one_echo, profile, unwrapped};

#[tokio::test]
async fn a_worker_that_does_not_drain_in_time_may_stop_before_it_is_killed() {
    let more = "profile: profile.yaml, share: {initial: 50%}, handover: shadow, queue: {on_late: serve}";
    let timeouts = "timeouts: {drain: 100ms, stop: 20s}";
    let home =
        Home::with_config(&format!("{EMULATED}{timeouts}\nmodels:\n  - {}\n", echo("echo", more))).unwrap();
    home.write("profile.yaml", profile(1_500.0)).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let asking = tokio::spawn({
        let client = server.client();
        async move { ask(client, "echo", &echo_case(1), 0.0).await }
    });
    let busy = |model: &ModelStatusJson| model.more["in_flight"] == 1;
    let pid = server.wait_status("echo", "a request in flight", busy).await.unwrap().workers[0].pid;
    assert_eq!(server.resize("echo", 20).await.unwrap().to_sms, 26);
    assert_eq!(asking.await.unwrap(), RequestOutcome::Right);
    let line = server.wait_line(&["worker exited", &pid.to_string()]).await.unwrap();
    assert!(line.contains("exit status: 0"), "{line}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_share_with_handover_never_does_not_change() {
    let server = one_echo(5.0, "share: {initial: 50%}, handover: never").await.unwrap();
    let output = server.home().run(&["resize", "echo", "20%"]).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("handover: never"));
    assert_eq!(server.model("echo").await.unwrap().share_percent, 50);
    server.stop().await.unwrap();
}

/// Kills every worker of `echo` until the model is unready.
async fn kill_until_unready(server: &ServerUnderTest) -> Result<(), HarnessError> {
    loop {
        let model = server.model("echo").await?;
        if model.state == "unready" {
            return Ok(());
        }
        for worker in model.workers {
            if let Some(process) = ProcessHandle::of(worker.pid) {
                // The worker may already have exited, which counts as a death too, so the error is
                // ignored.
                process.signal(Signal::SIGKILL).ok();
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn an_unready_model_is_retried_and_status_shows_the_time() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    kill_until_unready(&server).await.unwrap();
    let said = server.home().run(&["status"]).await.unwrap();
    let said = unwrapped(&String::from_utf8_lossy(&said.stdout));
    assert!(said.contains("echo is unready for 0 s (") && said.contains("try"), "{said}");
    server.wait_status("echo", "another try", |model| model.state == "ready").await.unwrap();
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    assert_eq!(server.model("echo").await.unwrap().more["next_try_s"], serde_json::Value::Null);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn failed_starts_do_not_count_as_deaths_and_end_with_their_cause() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    let worker = server.model("echo").await.unwrap().workers[0].pid;
    let limit = |files: &str| {
        let supervisor = server.process().pid.to_string();
        let limited = std::process::Command::new("prlimit")
            .args(["--pid", &supervisor, &format!("--nofile={files}:")])
            .status();
        assert!(limited.unwrap().success());
    };
    limit("16");
    ProcessHandle::of(worker).unwrap().signal(Signal::SIGKILL).unwrap();
    // The supervisor has no free file descriptor for a command's connection, so the test reads the
    // log instead. The model is unready after eight failed starts, which take 1.3 s.
    let is_unready = || server.log().contains("the model is unready");
    while !is_unready() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    limit("1024");
    server.wait_status("echo", "another worker", |model| model.state == "ready").await.unwrap();
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    let model = server.model("echo").await.unwrap();
    assert_eq!(model.more["worker_deaths"], 1, "{}", server.log());
    server.wait_line(&["open files"]).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_unready_model_has_a_reason_and_a_resize_retries_it() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    kill_until_unready(&server).await.unwrap();
    let why = server.model("echo").await.unwrap().more["why"].to_string();
    assert!(why.contains("8 workers in a row") && why.contains("SIGKILL"), "{why}");
    let RequestOutcome::Failed(refused) = ask(server.client(), "echo", &echo_case(1), 0.0).await else {
        panic!("an unready model answers");
    };
    assert!(refused.contains("Unavailable") && refused.contains("in a row"), "{refused}");

    assert_eq!(server.resize("echo", 50).await.unwrap().mechanism, "restart");
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    assert_eq!(server.model("echo").await.unwrap().state, "ready");
    server.stop().await.unwrap();
}
