//! Tests with workers that die or hang while they serve. A request may fail only if it causes the
//! deaths.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use shadowslice_tests::home::{HarnessError, Home, sibling_binary};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::process::{ProcessHandle, descendants, zombies};
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::{ModelStatusJson, WorkerStatusJson};

use crate::fixtures::{
    EMULATED, ask, assert_nothing_lost, echo, echo_case, home, home_under, load, one_echo, profile,
};

/// The keys of the model. The model serves late requests, because a restart takes longer than the
/// SLO.
const SERVE_LATE: &str = "share: {initial: 50%}, queue: {on_late: serve}";

fn incumbent(model: &ModelStatusJson) -> Option<&WorkerStatusJson> {
    model.workers.iter().find(|worker| worker.role == "incumbent")
}

fn shadow(model: &ModelStatusJson) -> Option<&WorkerStatusJson> {
    model.workers.iter().find(|worker| worker.role == "shadow")
}

/// Waits until a process other than `old` serves, and returns that process's PID.
async fn replaced(server: &ServerUnderTest, old: i32) -> Result<i32, HarnessError> {
    let other = |model: &ModelStatusJson| incumbent(model).map(|worker| worker.pid).filter(|pid| *pid != old);
    let serving = |model: &ModelStatusJson| model.state == "ready" && other(model).is_some();
    let model = server.wait_status("echo", "another incumbent", serving).await?;
    Ok(other(&model).unwrap_or(old))
}

#[tokio::test]
async fn clients_do_not_see_incumbents_killed() {
    let server = one_echo(5.0, SERVE_LATE).await.unwrap();
    let loading = load(&server, "echo", 100.0, Duration::from_secs(6));
    let mut pid = incumbent(&server.model("echo").await.unwrap()).unwrap().pid;
    for _ in 0..5 {
        let busy = |model: &ModelStatusJson| model.requests.succeeded % 2 == 1;
        server.wait_status("echo", "an odd number of answers", busy).await.unwrap();
        ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
        pid = replaced(&server, pid).await.unwrap();
    }
    assert_nothing_lost(&loading.await.unwrap());
    server.stop().await.unwrap();
}

/// Checks that requests wait while no worker serves, and that a long outage does not count as
/// overload.
#[tokio::test]
async fn a_long_outage_refuses_no_request() {
    for policy in ["static", "adaptive"] {
        let home = home_under(policy, &[echo("echo", "profile: slow.yaml, slo: 50ms")]).unwrap();
        home.write("slow.yaml", profile(5.0).replace("process: 50ms", "process: 2s")).unwrap();
        let server = ServerUnderTest::start_ready(home).await.unwrap();
        let pid = incumbent(&server.model("echo").await.unwrap()).unwrap().pid;
        ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
        let restarting = |model: &ModelStatusJson| model.state == "restarting";
        server.wait_status("echo", "an outage", restarting).await.unwrap();
        let loading = load(&server, "echo", 20.0, Duration::from_secs(3));
        assert_nothing_lost(&loading.await.unwrap());
        server.stop().await.unwrap();
    }
}

#[tokio::test]
async fn deaths_far_apart_do_not_make_a_model_without_requests_unready() {
    let server = one_echo(5.0, SERVE_LATE).await.unwrap();
    let mut pid = incumbent(&server.model("echo").await.unwrap()).unwrap().pid;
    // The eighth consecutive death would make the model unready.
    for _ in 0..7 {
        ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
        pid = replaced(&server, pid).await.unwrap();
    }
    let next = server.model("echo").await.unwrap();
    assert_eq!(incumbent(&next).unwrap().more["restarts"], 7);
    // The death of a worker that has been idle for ten seconds or more does not count as
    // consecutive.
    tokio::time::sleep(Duration::from_secs(11)).await;
    ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
    replaced(&server, pid).await.unwrap();
    let next = server.model("echo").await.unwrap();
    assert_eq!(incumbent(&next).unwrap().more["restarts"], 1);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_model_is_restarting_while_its_next_worker_starts() {
    let home = home(&[echo("echo", &format!("profile: profile.yaml, {SERVE_LATE}"))]).unwrap();
    home.write("profile.yaml", profile(5.0).replace("load: 50ms", "load: 1s")).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let pid = incumbent(&server.model("echo").await.unwrap()).unwrap().pid;
    ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
    let starts = |model: &ModelStatusJson| {
        incumbent(model).is_some_and(|next| next.pid != pid && next.more["phase"] == "warming")
    };
    let model = server.wait_status("echo", "the next worker's start", starts).await.unwrap();
    assert_eq!(model.state, "restarting");
    replaced(&server, pid).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn clients_do_not_see_a_shadow_killed() {
    let server = one_echo(5.0, SERVE_LATE).await.unwrap();
    let loading = load(&server, "echo", 100.0, Duration::from_secs(4));
    let before = incumbent(&server.model("echo").await.unwrap()).unwrap().pid;
    let kill = async {
        let model = server.wait_status("echo", "a shadow", |model| shadow(model).is_some()).await.unwrap();
        ProcessHandle::of(shadow(&model).unwrap().pid).unwrap().signal(Signal::SIGKILL).unwrap();
    };
    let (resized, ()) = tokio::join!(server.resize("echo", 20), kill);
    assert!(resized.is_err(), "the shadow was killed, yet {resized:?}");
    let model = server.model("echo").await.unwrap();
    assert_eq!(model.handovers.aborted, 1);
    assert_eq!((incumbent(&model).unwrap().pid, model.share_percent), (before, 50));
    assert_nothing_lost(&loading.await.unwrap());
    assert_eq!(server.resize("echo", 20).await.unwrap().to_sms, 26, "the next resize succeeds");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_shadow_that_is_ready_before_the_next_incumbent_serves_and_its_share_is_logged() {
    let home = home(&[echo("echo", &format!("profile: profile.yaml, {SERVE_LATE}"))]).unwrap();
    home.write("profile.yaml", profile(5.0).replace("load: 50ms", "load: 1s")).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let kill = async {
        let mut killed = 0;
        // After two deaths, the third worker starts later than the shadow, so the shadow is ready
        // first.
        for _ in 0..2 {
            let dies = |model: &ModelStatusJson| {
                shadow(model).is_some() && incumbent(model).is_some_and(|worker| worker.pid != killed)
            };
            let model = server.wait_status("echo", "a shadow, and another incumbent", dies).await.unwrap();
            killed = incumbent(&model).unwrap().pid;
            ProcessHandle::of(killed).unwrap().signal(Signal::SIGKILL).unwrap();
        }
        killed
    };
    let (resized, ()) = tokio::join!(server.resize("echo", 20), async {
        let killed = kill.await;
        let another = |model: &ModelStatusJson| incumbent(model).is_some_and(|worker| worker.pid != killed);
        let model = server.wait_status("echo", "a third incumbent", another).await.unwrap();
        let third = ProcessHandle::of(incumbent(&model).unwrap().pid).unwrap();
        third.signal(Signal::SIGSTOP).unwrap();
        let serves = |model: &ModelStatusJson| model.share_percent == 20;
        server.wait_status("echo", "the shadow to serve", serves).await.unwrap();
        third.signal(Signal::SIGCONT).unwrap();
    });
    assert_eq!(resized.unwrap().to_sms, 26);
    server.wait_line(&["model ready", "share=20%"]).await.unwrap();
    let log = server.log();
    let ready: Vec<_> = log.lines().filter(|line| line.contains("model ready")).collect();
    assert!(
        matches!(ready[..], [first, then] if first.contains("share=50%") && then.contains("share=20%")),
        "{log}"
    );
    server.stop().await.unwrap();
}

/// Kills the next three workers that execute a batch.
async fn kill_three(server: &ServerUnderTest) -> Result<(), HarnessError> {
    let mut killed = 0;
    for _ in 0..3 {
        let executes = |model: &ModelStatusJson| {
            model.more["in_flight"].as_u64() >= Some(1)
                && model.state == "ready"
                && incumbent(model).is_some_and(|worker| worker.pid != killed)
        };
        let model = server.wait_status("echo", "a worker that executes", executes).await?;
        killed = incumbent(&model).map_or(0, |worker| worker.pid);
        ProcessHandle::of(killed).map(|process| process.signal(Signal::SIGKILL));
    }
    Ok(())
}

/// Checks that a request that kills its workers fails after three deaths. The supervisor must then
/// refuse requests with equal inputs for a while. The model must continue to serve other requests.
#[tokio::test]
async fn requests_that_kill_their_workers_do_not_stop_the_model() {
    let server = one_echo(400.0, SERVE_LATE).await.unwrap();
    for content in 1..=3 {
        let client = server.client();
        let asking = tokio::spawn(async move { ask(client, "echo", &echo_case(content), 0.0).await });
        kill_three(&server).await.unwrap();
        let answer = asking.await.unwrap();
        assert!(
            matches!(&answer, RequestOutcome::Failed(why) if why.contains("3 workers died")),
            "{answer:?}"
        );
    }
    let model = server.wait_status("echo", "a worker", |model| model.state == "ready").await.unwrap();
    assert_eq!(model.more["worker_deaths"], 9);
    let equal = ask(server.client(), "echo", &echo_case(3), 0.0).await;
    assert!(
        matches!(&equal, RequestOutcome::Failed(why) if why.contains("died or hung while they executed these inputs")),
        "{equal:?}"
    );
    assert_eq!(ask(server.client(), "echo", &echo_case(4), 0.0).await, RequestOutcome::Right);
    // The supervisor refused the first inputs for one second, which has passed.
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

/// Checks requests of rising priority that kill their workers. Each request overtakes the earlier
/// requests in the queue. The supervisor must still identify every request that kills workers.
#[tokio::test]
async fn requests_of_rising_priority_that_kill_their_workers_are_identified_one_by_one() {
    let server = one_echo(400.0, SERVE_LATE).await.unwrap();
    let ask_at = |content: u16, priority| {
        let mut client = server.client();
        tokio::spawn(
            async move { client.infer_with_priority("echo", &echo_case(content).inputs, priority).await },
        )
    };
    let first = ask_at(1, 90);
    let executes = |model: &ModelStatusJson| model.more["in_flight"] == 1;
    server.wait_status("echo", "a request that executes", executes).await.unwrap();
    let equal = ask_at(1, 80);
    let others: Vec<_> = (2..6).map(|content| ask_at(content, 70 - i64::from(content))).collect();
    let all = |model: &ModelStatusJson| model.requests.accepted == 6;
    server.wait_status("echo", "all requests", all).await.unwrap();
    kill_three(&server).await.unwrap();
    let why = first.await.unwrap().unwrap_err().message().to_owned();
    assert!(why.contains("3 workers died"), "{why}");
    let why = equal.await.unwrap().unwrap_err().message().to_owned();
    assert!(why.contains("died or hung while they executed these inputs"), "{why}");
    for other in others {
        other.await.unwrap().unwrap();
    }
    assert_eq!(server.model("echo").await.unwrap().more["worker_deaths"], 3);
    server.stop().await.unwrap();
}

/// Checks a worker process that remains after its sockets are closed. This happens, for example,
/// while a driver destroys a context.
#[tokio::test]
async fn a_worker_process_that_remains_after_its_sockets_closed_delays_nothing() {
    let model = echo("echo", &format!("profile: profile.yaml, standby: off, {SERVE_LATE}"));
    let yaml = format!("{EMULATED}timeouts: {{stop: 500ms}}\nmodels:\n  - {model}\n");
    let mut home = Home::with_config(&yaml).unwrap();
    home.write("profile.yaml", profile(5.0)).unwrap();
    let worker = sibling_binary("shadowslice-worker").unwrap();
    let close = "for fd in /proc/$$/fd/*; do fd=${fd##*/}; [ $fd -gt 2 ] && eval \"exec $fd>&-\"; done";
    let script = format!("{} \"$@\" &\n{close}\nwait\nexec sleep 600", worker.display());
    home.set_worker(&format!("exec bash -c '{script}' worker \"$@\"")).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let outer = incumbent(&server.model("echo").await.unwrap()).unwrap().pid;
    let inner = descendants(outer);
    assert_eq!(inner.len(), 1);
    inner[0].signal(Signal::SIGKILL).unwrap();
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    assert_ne!(incumbent(&server.model("echo").await.unwrap()).unwrap().pid, outer);
    server.stop().await.unwrap();
}

/// Checks a supervisor that adopts orphaned processes, like process 1 of a container. Each start of
/// a worker leaves two orphans.
#[tokio::test]
async fn a_subreaper_reaps_orphans_and_gets_the_exit_status_of_its_own_children() {
    let mut home = home(&[echo("echo", SERVE_LATE)]).unwrap();
    let worker = sibling_binary("shadowslice-worker").unwrap();
    let aside = "3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-";
    let orphans = format!("(sleep 0.2 {aside} & sh -c 'exit 3' {aside} &)");
    home.set_worker(&format!("{orphans}\nexec {} \"$@\"", worker.display())).unwrap();
    let program = home.path().join("bin/shadowslice");
    let become_one =
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1); os.execv(sys.argv[1], sys.argv[1:])";
    let launcher = format!("#!/bin/sh\nexec python3 -c '{become_one}' {} \"$@\"\n", program.display());
    let launcher = home.write("launcher", launcher).unwrap();
    std::fs::set_permissions(&launcher, Permissions::from_mode(0o755)).unwrap();
    home.set_binary(launcher);
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let mut pid = incumbent(&server.model("echo").await.unwrap()).unwrap().pid;
    for _ in 0..3 {
        ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
        server.wait_line(&["worker", &pid.to_string(), "signal: 9"]).await.unwrap();
        pid = replaced(&server, pid).await.unwrap();
        assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    while zombies(server.process().pid) > 0 {
        assert!(Instant::now() < deadline, "zombies are left");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn clients_do_not_see_an_incumbent_hang() {
    let server = one_echo(5.0, SERVE_LATE).await.unwrap();
    let loading = load(&server, "echo", 50.0, Duration::from_secs(6));
    let pid = incumbent(&server.model("echo").await.unwrap()).unwrap().pid;
    let hung = ProcessHandle::of(pid).unwrap();
    hung.signal(Signal::SIGSTOP).unwrap();
    replaced(&server, pid).await.unwrap();
    assert_nothing_lost(&loading.await.unwrap());
    assert!(!hung.is_alive(), "the hung worker still exists");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_hung_worker_does_not_keep_the_server_from_stopping() {
    let server = one_echo(5.0, SERVE_LATE).await.unwrap();
    let pid = incumbent(&server.model("echo").await.unwrap()).unwrap().pid;
    ProcessHandle::of(pid).unwrap().signal(Signal::SIGSTOP).unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_stopped_supervisor_does_not_treat_workers_as_hung() {
    let server = one_echo(40.0, SERVE_LATE).await.unwrap();
    let pid = incumbent(&server.model("echo").await.unwrap()).unwrap().pid;
    let loading = load(&server, "echo", 50.0, Duration::from_secs(4));
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.process().signal(Signal::SIGSTOP).unwrap();
    // A worker counts as hung after a second. The client leaves the answers unread for longer than
    // that, but this must not count as a hang.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    server.process().signal(Signal::SIGCONT).unwrap();
    assert_nothing_lost(&loading.await.unwrap());
    let model = server.model("echo").await.unwrap();
    assert_eq!((incumbent(&model).unwrap().pid, model.requests.retried), (pid, 0));
    server.stop().await.unwrap();
}
