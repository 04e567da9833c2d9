//! The other ways of changing a share, and bringing back a model that has given up.

use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::{Error, Home, beside};
use shadowslice_tests::load::Outcome;
use shadowslice_tests::process::Process;
use shadowslice_tests::server::Server;
use shadowslice_tests::status::Model;

use crate::scene::{
    EMULATED, ask, assert_nothing_lost, echo, echo_case, home, load, one_echo, profile, unwrapped,
};

#[tokio::test]
async fn without_a_shadow_requests_wait_and_none_is_lost() {
    let model = "profile: profile.yaml, share: {initial: 50%}, handover: restart, queue: {on_late: serve}";
    let home = home(&[echo("echo", model)]).unwrap();
    home.write("profile.yaml", profile(5.0).replace("load: 50ms", "load: 1s")).unwrap();
    let server = Server::ready(home).await.unwrap();
    let loading = load(&server, "echo", 50.0, Duration::from_secs(3));
    let before = server.model("echo").await.unwrap().workers[0].pid;
    let handover = server.resize("echo", 20).await.unwrap();
    assert_eq!((handover.from_sms, handover.to_sms), (66, 26));
    assert_nothing_lost(&loading.await.unwrap());
    let model = server.model("echo").await.unwrap();
    assert_eq!((model.share_percent, model.workers.len(), model.handovers.completed), (20, 1, 1));
    assert_ne!(model.workers[0].pid, before);
    // No worker served while the new worker started, 1,070 ms by its profile. The stall is about
    // that time, less the time until a request came.
    let stall_us = model.handovers.last.unwrap().stall_us.unwrap();
    assert!(stall_us >= 900_000.0, "{stall_us} us");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn without_a_shadow_a_share_at_which_no_worker_starts_leaves_the_old_one() {
    let model = "profile: profile.yaml, share: {initial: 40%}, handover: restart, queue: {on_late: serve}";
    let mut home = home(&[echo("echo", model)]).unwrap();
    home.write("profile.yaml", profile(5.0)).unwrap();
    let worker = beside("shadowslice-worker").unwrap();
    let script = format!(
        "[ \"$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE\" = 70 ] && exit 7\nexec {} \"$@\"",
        worker.display()
    );
    home.set_worker(&script).unwrap();
    let server = Server::ready(home).await.unwrap();
    let loading = load(&server, "echo", 50.0, Duration::from_secs(3));
    let output = server.home().run(&["resize", "echo", "70%"]).await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("the one before again"), "{said}");
    let back = |model: &Model| model.state == "ready" && model.share_percent == 40;
    let model = server.wait_status("echo", "the old share", back).await.unwrap();
    assert_eq!((model.handovers.completed, model.handovers.aborted), (0, 1));
    assert_eq!(server.resize("echo", 20).await.unwrap().to_sms, 26);
    assert_nothing_lost(&loading.await.unwrap());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn without_a_shadow_a_worker_that_does_not_drain_in_time_is_told_to_end_before_it_is_killed() {
    let more = "profile: profile.yaml, share: {initial: 50%}, handover: restart, queue: {on_late: serve}";
    let timeouts = "timeouts: {drain: 100ms, stop: 20s}";
    let home =
        Home::with_config(&format!("{EMULATED}{timeouts}\nmodels:\n  - {}\n", echo("echo", more))).unwrap();
    home.write("profile.yaml", profile(1_500.0)).unwrap();
    let server = Server::ready(home).await.unwrap();
    let asking = tokio::spawn({
        let client = server.client();
        async move { ask(client, "echo", &echo_case(1), 0.0).await }
    });
    let busy = |model: &Model| model.more["in_flight"] == 1;
    let pid = server.wait_status("echo", "a request in flight", busy).await.unwrap().workers[0].pid;
    assert_eq!(server.resize("echo", 20).await.unwrap().to_sms, 26);
    assert_eq!(asking.await.unwrap(), Outcome::Right);
    let log = server.log();
    let ended = |line: &&str| line.contains("worker ended") && line.contains(&pid.to_string());
    let line = log.lines().find(ended).unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains("exit status: 0"), "{line}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn without_a_shadow_none_is_started_for_a_worker_that_died_either() {
    let home =
        home(&[echo("echo", "profile: profile.yaml, share: {initial: 50%}, handover: restart")]).unwrap();
    home.write("profile.yaml", profile(5.0).replace("load: 50ms", "load: 2s")).unwrap();
    let server = Server::ready(home).await.unwrap();
    let before = server.model("echo").await.unwrap().workers[0].pid;
    Process::of(before).unwrap().signal(Signal::SIGKILL).unwrap();
    let next = |model: &Model| model.workers.iter().any(|worker| worker.pid != before);
    server.wait_status("echo", "the next worker", next).await.unwrap();
    let output = server.home().run(&["resize", "echo", "20%"]).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("being restarted"), "{output:?}");
    let model = server.wait_status("echo", "a ready model", |model| model.state == "ready").await.unwrap();
    assert_eq!((model.share_percent, model.workers.len()), (50, 1));
    assert_eq!(server.resize("echo", 20).await.unwrap().to_sms, 26);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_share_that_is_never_to_change_does_not() {
    let server = one_echo(5.0, "share: {initial: 50%}, handover: never").await.unwrap();
    let output = server.home().run(&["resize", "echo", "20%"]).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("handover: never"));
    assert_eq!(server.model("echo").await.unwrap().share_percent, 50);
    server.stop().await.unwrap();
}

/// Kills every worker of `echo` until the model is given up.
async fn give_up(server: &Server) -> Result<(), Error> {
    loop {
        let model = server.model("echo").await?;
        if model.state == "unready" {
            return Ok(());
        }
        for worker in model.workers {
            if let Some(process) = Process::of(worker.pid) {
                // It may have died in between, and then counts as well.
                process.signal(Signal::SIGKILL).ok();
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_model_that_has_given_up_is_tried_again_by_itself_and_says_when() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    give_up(&server).await.unwrap();
    let said = server.home().run(&["status"]).await.unwrap();
    let said = unwrapped(&String::from_utf8_lossy(&said.stdout));
    assert!(said.contains("echo is unready for 0 s (") && said.contains("try"), "{said}");
    server.wait_status("echo", "another try", |model| model.state == "ready").await.unwrap();
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, Outcome::Right);
    assert_eq!(server.model("echo").await.unwrap().more["next_try_s"], serde_json::Value::Null);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn starts_in_vain_are_no_deaths_and_end_with_their_cause() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    let worker = server.model("echo").await.unwrap().workers[0].pid;
    let limit = |files: &str| {
        let supervisor = server.process().pid().to_string();
        let limited = std::process::Command::new("prlimit")
            .args(["--pid", &supervisor, &format!("--nofile={files}:")])
            .status();
        assert!(limited.unwrap().success());
    };
    limit("16");
    Process::of(worker).unwrap().signal(Signal::SIGKILL).unwrap();
    // New connections need descriptors, too, so nothing can be asked meanwhile; 8 starts take 1.3 s.
    let given_up = || server.log().contains("the model is unready");
    while !given_up() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    limit("1024");
    server.wait_status("echo", "another worker", |model| model.state == "ready").await.unwrap();
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, Outcome::Right);
    let model = server.model("echo").await.unwrap();
    assert_eq!(model.more["worker_deaths"], 1, "{}", server.log());
    assert!(server.log().contains("open files"), "{}", server.log());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_model_that_has_given_up_says_why_and_is_brought_back_by_a_resize() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    give_up(&server).await.unwrap();
    let why = server.model("echo").await.unwrap().more["why"].to_string();
    assert!(why.contains("8 workers in a row") && why.contains("SIGKILL"), "{why}");
    let Outcome::Failed(refused) = ask(server.client(), "echo", &echo_case(1), 0.0).await else {
        panic!("an unready model answers");
    };
    assert!(refused.contains("Unavailable") && refused.contains("in a row"), "{refused}");

    server.resize("echo", 50).await.unwrap();
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, Outcome::Right);
    assert_eq!(server.model("echo").await.unwrap().state, "ready");
    server.stop().await.unwrap();
}
