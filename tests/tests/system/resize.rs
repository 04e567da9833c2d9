//! Tests of shares that `resize` sets under load.

use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::Home;
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;

use crate::fixtures::{EMULATED, ask, assert_nothing_lost, echo, echo_case, load, one_echo, profile};

#[tokio::test]
async fn resizing_under_load_loses_nothing() {
    let server = one_echo(5.0, "share: {initial: 50%}, queue: {on_late: serve}").await.unwrap();
    let loading = load(&server, "echo", 100.0, Duration::from_secs(6));
    let mut from = 66;
    for (percent, sms) in [(20, 26), (80, 104), (50, 66)] {
        let handover = server.resize("echo", percent).await.unwrap();
        assert_eq!((handover.from_sms, handover.to_sms), (from, sms));
        from = sms;
    }
    let model = server.model("echo").await.unwrap();
    assert_eq!((model.share_percent, model.sms), (50, 66));
    assert_eq!((model.handovers.completed, model.handovers.aborted), (3, 0));
    assert_nothing_lost(&loading.await.unwrap());
    let last = server.model("echo").await.unwrap().handovers.last.unwrap();
    assert!(last.effect_ms.is_some_and(|ms| ms > 0.0) && last.stall_us.is_some(), "{last:?}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_resize_to_the_current_share_changes_nothing_and_says_so() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    let before = server.model("echo").await.unwrap();
    let output = server.home().run(&["resize", "echo", "50%"]).await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("already"), "{said}");
    let after = server.model("echo").await.unwrap();
    assert_eq!(after.handovers.completed, 0);
    assert_eq!(after.workers[0].pid, before.workers[0].pid);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn impossible_shares_are_refused_with_the_reason() {
    let server = one_echo(5.0, "share: {initial: 50%, min: 10%, max: 80%}").await.unwrap();
    let before = server.model("echo").await.unwrap().workers[0].pid;
    for share in ["0%", "101%", "5%", "90%", "x", "4294967297%", ""] {
        let output = server.home().run(&["resize", "echo", share]).await.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{share} was accepted");
        assert!(said.contains("error"), "{share}: {said}");
    }
    let output = server.home().run(&["resize", "absent", "20%"]).await.unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("absent"));
    assert_eq!(server.model("echo").await.unwrap().workers[0].pid, before);
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_smaller_share_takes_the_time_of_the_profile() {
    // A batch takes 10 ms on 66 SMs, so it takes 55 ms on the 12 SMs of a share of 10 %.
    let server = one_echo(10.0, "share: {initial: 50%}, queue: {on_late: serve}").await.unwrap();
    let wide = load(&server, "echo", 10.0, Duration::from_secs(2)).await.unwrap();
    server.resize("echo", 10).await.unwrap();
    let narrow = load(&server, "echo", 10.0, Duration::from_secs(2)).await.unwrap();
    assert_nothing_lost(&wide);
    assert_nothing_lost(&narrow);
    // The test compares the fastest requests, because a busy host delays some of the other
    // requests.
    let [wide, narrow] = [wide, narrow].map(|tally| tally.latency_ms(0.01));
    assert!((10.0..55.0).contains(&wide) && narrow >= 55.0, "{wide} and {narrow} ms");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_second_resize_of_a_model_does_not_disturb_the_first() {
    let server = one_echo(5.0, "share: {initial: 50%}, queue: {on_late: serve}").await.unwrap();
    let loading = load(&server, "echo", 50.0, Duration::from_secs(4));
    let (first, second) = tokio::join!(server.resize("echo", 20), server.resize("echo", 80));
    assert!(first.is_ok() || second.is_ok(), "{first:?} {second:?}");
    let model = server.wait_status("echo", "one worker", |model| model.workers.len() == 1).await;
    assert!(matches!(model.unwrap().share_percent, 20 | 80));
    assert_nothing_lost(&loading.await.unwrap());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn hand_overs_leave_no_file_open_in_the_supervisor() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    let alone = |model: &shadowslice_tests::status::ModelStatusJson| model.workers.len() == 1;
    let before = server.process().open_files();
    for n in 0..6 {
        server.resize("echo", 20 + 10 * (n % 2)).await.unwrap();
    }
    server.wait_status("echo", "one worker", alone).await.unwrap();
    let after = server.process().open_files();
    // At each count, the connection of a `status` command may still be open.
    assert!(after <= before + 3, "{before} files were open before six hand-overs, and {after} after");
    server.stop().await.unwrap();
}

/// Checks share bounds that change during a hand-over. The new bounds must limit the share that the
/// hand-over sets. The worker that is being replaced must keep its share.
#[tokio::test]
async fn a_reload_during_a_hand_over_considers_its_share() {
    let write = |home: &Home, more: &str| {
        let model = echo("m", &format!("profile: profile.yaml, standby: off, share: {{{more}"));
        home.write("config.yaml", format!("{EMULATED}timeouts: {{dwell: 50ms}}\nmodels:\n  - {model}\n"))
            .unwrap();
    };
    let home = Home::new().unwrap();
    home.write("profile.yaml", profile(2.0).replace("load: 50ms", "load: 1s")).unwrap();
    write(&home, "initial: 40%}");
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let during = async |share: u32, file: &str| {
        write(server.home(), file);
        let reload = async {
            let shadow = |model: &ModelStatusJson| model.workers.iter().any(|worker| worker.role == "shadow");
            server.wait_status("m", "a shadow", shadow).await.unwrap();
            server.reload().await.unwrap()
        };
        let (resized, reloaded) = tokio::join!(server.resize("m", share), reload);
        // If the reload replaces the model, the resize either completed or failed together with the
        // old workers.
        (resized.ok().and_then(|done| done.outcome), reloaded.changes().len())
    };
    assert_eq!(during(80, "initial: 40%, max: 50%}").await, (Some("completed".into()), 1));
    assert_eq!(server.model("m").await.unwrap().share_percent, 50);
    during(30, "initial: 40%, max: 50%}, batch: {max: 2}").await;
    assert_eq!(server.model("m").await.unwrap().share_percent, 30, "set by hand");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn bounds_hold_even_if_the_hand_over_that_would_meet_them_fails() {
    let write = |home: &Home, keys: &str| {
        let model = echo("m", &format!("profile: profile.yaml, standby: off, {keys}"));
        let rest = EMULATED.replace("policy: static", "policy: static+admission, interval: 1h");
        home.write("config.yaml", format!("{rest}timeouts: {{dwell: 50ms}}\nmodels:\n  - {model}\n"))
            .unwrap();
    };
    let home = Home::new().unwrap();
    home.write("profile.yaml", profile(2.0).replace("load: 50ms", "load: 2s")).unwrap();
    write(&home, "slo: 9s, share: {max: 40%}");
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    write(server.home(), "slo: 9s, share: {max: 90%}");
    assert_eq!(server.reload().await.unwrap().changes(), [("m", "changed")]);
    write(server.home(), "slo: 8s, share: {min: 60%, max: 90%}");
    let shadow = |model: &ModelStatusJson| {
        model.workers.iter().find(|worker| worker.role == "shadow").map(|one| one.pid)
    };
    let reload = async {
        let seen = server.wait_status("m", "a shadow", |model| shadow(model).is_some()).await.unwrap();
        let killed = async {
            // Once the new SLO is in effect, the reload has already applied the bounds to the
            // hand-over's share.
            let changed = |model: &ModelStatusJson| model.slo.latency_ms == 8_000.0;
            server.wait_status("m", "the new SLO", changed).await.unwrap();
            ProcessHandle::of(shadow(&seen).unwrap()).unwrap().signal(Signal::SIGKILL).unwrap();
        };
        tokio::join!(server.reload(), killed).0.unwrap()
    };
    let (resized, reloaded) = tokio::join!(server.resize("m", 80), reload);
    assert!(resized.is_err(), "the shadow was killed, yet {resized:?}");
    assert_eq!(reloaded.changes(), [("m", "changed")]);
    assert_eq!(server.model("m").await.unwrap().share_percent, 60);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn new_workers_have_the_share_that_was_set_by_hand_while_they_started() {
    let write = |home: &Home, profile: &str| {
        let model = echo("m", &format!("profile: {profile}, standby: off, share: {{initial: 40%}}"));
        home.write("config.yaml", format!("{EMULATED}timeouts: {{dwell: 50ms}}\nmodels:\n  - {model}\n"))
            .unwrap();
    };
    let home = Home::new().unwrap();
    home.write("profile.yaml", profile(2.0)).unwrap();
    home.write("slow.yaml", profile(2.0).replace("load: 50ms", "load: 4s")).unwrap();
    write(&home, "profile.yaml");
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    write(server.home(), "slow.yaml");
    let resize = async {
        let two = |model: &ModelStatusJson| model.workers.len() > 1;
        server.wait_status("m", "workers that start", two).await.unwrap();
        server.resize("m", 70).await.unwrap().outcome
    };
    let (reloaded, resized) = tokio::join!(server.reload(), resize);
    assert_eq!(
        (reloaded.unwrap().changes(), resized.as_deref()),
        (vec![("m", "replaced")], Some("completed"))
    );
    server.wait_status("m", "the share set by hand", |model| model.share_percent == 70).await.unwrap();
    server.stop().await.unwrap();
}
