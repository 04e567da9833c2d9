//! Tests of upgrades under load. Models move to the next supervisor one by one while clients keep
//! their connections.
#![allow(clippy::unwrap_used, reason = "a failed set-up fails the test")]

use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::cases::NO_OPERATORS;
use shadowslice_tests::home::{Home, sibling_binary};
use shadowslice_tests::http::InferHttpClient;
use shadowslice_tests::load::{self, ArrivalPattern, LoadPlan, LoadTally, RequestOutcome};
use shadowslice_tests::process::{ProcessHandle, descendants};
use shadowslice_tests::server::ServerUnderTest;
use tokio::task::JoinHandle;

use crate::fixtures::{EMULATED, ask, ask_all, assert_nothing_lost, echo, echo_case, load, profile};

/// Starts a server with the models `a` and `b`.
async fn serving() -> ServerUnderTest {
    let home = home();
    configure(&home, &[]);
    let mut server = ServerUnderTest::start_ready(home).await.unwrap();
    server.wait_model_ready("b").await.unwrap();
    server
}

fn home() -> Home {
    let home = Home::with_config("").unwrap();
    home.write("profile.yaml", profile(1.0)).unwrap();
    home.write("slow.yaml", profile(1.0).replace("load: 50ms", "load: 2s")).unwrap();
    home.write("slower.yaml", profile(1.0).replace("load: 50ms", "load: 3s")).unwrap();
    home.write("broken.onnx", NO_OPERATORS).unwrap();
    home
}

/// Writes a configuration that has these models between `a` and `b`. The model `b` starts slowly, so `a`
/// moves first during an upgrade.
fn configure(home: &Home, between: &[String]) {
    let model = |name, keys| echo(name, &format!("profile: {keys}, slo: 20s, share: {{initial: 30%}}"));
    let (a, b) = (model("a", "profile.yaml"), model("b", "slow.yaml"));
    configure_with(home, &[&[a][..], between, &[b]].concat());
}

fn configure_with(home: &Home, models: &[String]) {
    let host = EMULATED.replace("\"unix:http.sock\"", "\"127.0.0.1:0\"");
    let models: String = models.iter().map(|model| format!("  - {model}\n")).collect();
    home.write("config.yaml", format!("{host}models:\n{models}")).unwrap();
}

/// Returns a model that takes more than 2 s to start.
fn slow() -> String {
    echo("slow", "profile: slow.yaml, share: {initial: 10%}")
}

fn broken(name: &str) -> String {
    format!("{{name: {name}, path: broken.onnx, slo: 1s, share: {{initial: 10%}}}}")
}

async fn a_has_moved(server: &ServerUnderTest) {
    server
        .wait_status("a", "moved", |model| model.state == "moved" && model.workers.is_empty())
        .await
        .unwrap();
    assert_eq!(server.model("b").await.unwrap().state, "ready");
}

/// Returns the supervisor that this supervisor has started.
fn successor(server: &ServerUnderTest) -> ProcessHandle {
    let named = |process: &ProcessHandle| {
        std::fs::read_to_string(format!("/proc/{}/comm", process.pid))
            .is_ok_and(|name| name == "shadowslice\n")
    };
    server.children().into_iter().find(named).unwrap()
}

/// Counts the descendants of `of` that are not descendants of `next`.
fn descendants_beside(of: ProcessHandle, next: ProcessHandle) -> usize {
    let there = descendants(next.pid);
    let all = descendants(of.pid).into_iter();
    all.filter(|process| !there.contains(process) && process.open_files() > 0).count()
}

fn loads(server: &ServerUnderTest, span: Duration) -> [JoinHandle<LoadTally>; 2] {
    ["a", "b"].map(|model| load(server, model, 100.0, span))
}

async fn over_http(client: InferHttpClient, model: &str, n: u16) -> RequestOutcome {
    let case = echo_case(n);
    match client.infer(model, &case.inputs).await {
        Ok(answer) if answer == case.outputs => RequestOutcome::Right,
        Ok(answer) => RequestOutcome::Wrong(format!("{answer:?}")),
        Err(why) => RequestOutcome::Failed(why),
    }
}

fn http_load(client: &InferHttpClient, model: &'static str, span: Duration) -> JoinHandle<LoadTally> {
    let client = client.clone();
    tokio::spawn(async move {
        let plan = LoadPlan { rate: 100.0, span, arrivals: ArrivalPattern::Poisson, seed: 2 };
        let tally = std::sync::Arc::default();
        load::run(&plan, &tally, |n| over_http(client.clone(), model, u16::try_from(n).unwrap())).await;
        let tally = tally.lock();
        tally.clone()
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_and_at_most_one_model_has_two_sets_of_workers() {
    let mut server = serving().await;
    configure(server.home(), &[slow()]);
    let client = InferHttpClient::new(server.tcp_address("HTTP").await.unwrap());
    let loads = ["a", "b"].map(|model| http_load(&client, model, Duration::from_secs(5)));
    let before = server.process();
    let (upgraded, ()) = tokio::join!(server.home().run(&["upgrade"]), async {
        a_has_moved(&server).await;
        // The children are the next supervisor, the workers of `a` and `b`, and one more worker of
        // `a` or `slow`.
        let all = server.children();
        assert!(all.len() <= 4, "{all:?}");
        assert!(server.client().model_ready("a").await.unwrap());
        let listed = server.client().repository_index(true).await.unwrap();
        assert!(listed.iter().any(|entry| entry.name == "a" && entry.state == "READY"), "{listed:?}");
    });
    let upgraded = upgraded.unwrap();
    server.follow(&String::from_utf8_lossy(&upgraded.stdout)).unwrap();
    for load in loads {
        assert_nothing_lost(&load.await.unwrap());
    }
    // The previous supervisor may have open connections, but must not have workers.
    let left = descendants(before.pid).into_iter().filter(|process| *process != server.process());
    let workers: Vec<_> =
        left.filter(|process| !descendants(server.process().pid).contains(process)).collect();
    assert!(workers.is_empty(), "{workers:?}");
    assert_eq!(over_http(client, "b", 7).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn models_return_if_a_later_model_cannot_move() {
    let home = home();
    let a = echo("a", "profile: profile.yaml, slo: 20s, share: {initial: 30%}");
    let b = echo("b", "profile: slower.yaml, slo: 20s, share: {initial: 30%}");
    configure_with(&home, &[a.clone(), slow(), b]);
    let mut server = ServerUnderTest::start_ready(home).await.unwrap();
    server.wait_model_ready("b").await.unwrap();
    configure_with(server.home(), &[a, slow(), broken("b")]);
    let loads = loads(&server, Duration::from_secs(5));
    let (output, ()) = tokio::join!(server.home().run(&["upgrade"]), a_has_moved(&server));
    let said = String::from_utf8_lossy(&output.unwrap().stderr).into_owned();
    assert!(said.contains("model 'b' is ready here, but not in the next supervisor"), "{said}");
    for model in ["a", "b"] {
        let model = server.model(model).await.unwrap();
        assert_eq!((model.state.as_str(), model.workers.len()), ("ready", 1));
    }
    for load in loads {
        assert_nothing_lost(&load.await.unwrap());
    }
    assert_eq!(server.children().len(), 3);
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn models_return_and_requests_wait_if_the_next_supervisor_is_killed() {
    let server = serving().await;
    configure(server.home(), &[slow()]);
    let loads = loads(&server, Duration::from_secs(5));
    let (output, ()) = tokio::join!(server.home().run(&["upgrade"]), async {
        a_has_moved(&server).await;
        successor(&server).signal(Signal::SIGKILL).unwrap();
    });
    let said = String::from_utf8_lossy(&output.unwrap().stderr).into_owned();
    assert!(said.contains("the next supervisor exited"), "{said}");
    for load in loads {
        assert_nothing_lost(&load.await.unwrap());
    }
    assert_eq!(server.model("a").await.unwrap().state, "ready");
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_during_an_upgrade_answers_accepted_requests_and_leaves_nothing() {
    let home = home();
    home.write("long.yaml", profile(500.0)).unwrap();
    let long = echo("a", "profile: long.yaml, slo: 20s, share: {initial: 100%}");
    let b = echo("b", "profile: slow.yaml, share: {initial: 10%}");
    configure_with(&home, &[long.clone(), b.clone()]);
    let mut server = ServerUnderTest::start_ready(home).await.unwrap();
    configure_with(server.home(), &[long, slow(), b]);
    let (client, case) = (server.client(), echo_case(1));
    assert_eq!(ask(client.clone(), "a", &case, 0.0).await, RequestOutcome::Right);
    let (_, outcome) = tokio::join!(server.home().run(&["upgrade"]), async {
        a_has_moved(&server).await;
        let (outcome, ()) = tokio::join!(ask(client, "a", &case, 0.0), async {
            // The request is in flight after this time.
            tokio::time::sleep(Duration::from_millis(200)).await;
            server.signal(Signal::SIGTERM).unwrap();
        });
        outcome
    });
    assert_eq!(outcome, RequestOutcome::Right);
    assert!(server.wait_exit().await.unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_supervisor_serves_all_models_if_the_first_is_killed_during_the_upgrade() {
    let mut server = serving().await;
    configure(server.home(), &[slow()]);
    let (_, next) = tokio::join!(server.home().run(&["upgrade"]), async {
        a_has_moved(&server).await;
        let next = successor(&server);
        server.signal(Signal::SIGKILL).unwrap();
        next
    });
    server.follow(&next.pid.to_string()).unwrap();
    server.wait_model_ready("b").await.unwrap();
    for model in ["a", "b"] {
        assert_eq!(ask(server.client(), model, &echo_case(1), 0.0).await, RequestOutcome::Right);
    }
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_survives_two_upgrades() {
    let mut server = serving().await;
    let client = InferHttpClient::new(server.tcp_address("HTTP").await.unwrap());
    assert_eq!(over_http(client.clone(), "a", 1).await, RequestOutcome::Right);
    let first = server.upgrade().await.unwrap();
    let second = server.upgrade().await.unwrap();
    // The second supervisor is a child of the first, and the third a child of the second.
    let below = [first, second].map(|of| descendants_beside(of, server.process()));
    assert_eq!(below, [2, 1], "supervisors alone");
    assert!(first.is_alive() && second.is_alive());
    assert_eq!(over_http(client, "b", 2).await, RequestOutcome::Right);
    server.wait_gone(first).await.unwrap();
    server.wait_gone(second).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_of_a_model_with_new_inputs_finish_at_the_old_supervisor() {
    let mut server = serving().await;
    let at = server.tcp_address("HTTP").await.unwrap();
    let client = InferHttpClient::new(at);
    assert_eq!(over_http(client.clone(), "a", 1).await, RequestOutcome::Right);
    let config = std::fs::read_to_string(server.home().path().join("config.yaml")).unwrap();
    server.home().write("config.yaml", config.replacen("shape: [16]", "shape: [32]", 1)).unwrap();
    let first = server.upgrade().await.unwrap();
    assert_eq!(descendants_beside(first, server.process()), 2, "the next supervisor, and the worker of `a`");
    assert_eq!(over_http(client.clone(), "a", 2).await, RequestOutcome::Right);
    let refused = over_http(client, "a", 3).await;
    assert!(matches!(&refused, RequestOutcome::Failed(why) if why.contains("shape")), "{refused:?}");
    server.wait_gone(first).await.unwrap();
    server.stop().await.unwrap();
}

/// Starts a server whose model `a` takes 1.2 s to start and has an SLO of 50 ms.
async fn with_slow_starts() -> ServerUnderTest {
    let home = home();
    home.write("starts.yaml", profile(1.0).replace("process: 50ms", "process: 1s")).unwrap();
    let a = echo("a", "profile: starts.yaml, slo: 50ms, share: {initial: 30%}");
    configure_with(&home, std::slice::from_ref(&a));
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    configure_with(server.home(), &[a, slow()]);
    server
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_wait_for_a_model_to_return_are_served_and_count_as_late() {
    let server = with_slow_starts().await;
    let (_, ()) = tokio::join!(server.home().run(&["upgrade"]), async {
        server.wait_status("a", "moved", |model| model.state == "moved").await.unwrap();
        successor(&server).signal(Signal::SIGKILL).unwrap();
        let outcomes = ask_all(&server.client(), "a", (0..300).map(echo_case).collect(), 0.0).await;
        assert!(outcomes.iter().all(|outcome| *outcome == RequestOutcome::Right), "{outcomes:?}");
    });
    let a = server.model("a").await.unwrap();
    let p50 = a.more["latency_ms"]["p50"].as_f64().unwrap();
    assert!(p50 > 500.0 && a.slo.attainment.unwrap() < 0.1, "{p50} ms, {a:?}");
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_next_supervisor_is_killed_and_its_models_return() {
    let server = serving().await;
    configure(server.home(), &[slow().replace("slow.yaml", "slowest.yaml")]);
    server.home().write("slowest.yaml", profile(1.0).replace("load: 50ms", "load: 60s")).unwrap();
    let (output, tallies) = tokio::join!(server.home().run(&["upgrade"]), async {
        a_has_moved(&server).await;
        successor(&server).signal(Signal::SIGSTOP).unwrap();
        let [a, b] = loads(&server, Duration::from_secs(2));
        [a.await.unwrap(), b.await.unwrap()]
    });
    let said = String::from_utf8_lossy(&output.unwrap().stderr).into_owned();
    assert!(said.contains("did not answer for 5s, and was killed"), "{said}");
    tallies.iter().for_each(assert_nothing_lost);
    assert_eq!(server.model("a").await.unwrap().state, "ready");
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_waits_for_a_running_change_of_share() {
    let mut server = with_slow_starts().await;
    configure_with(server.home(), &[echo("a", "profile: starts.yaml, slo: 50ms, share: {initial: 30%}")]);
    let (resized, upgraded) = tokio::join!(server.resize("a", 60), async {
        server.wait_line(&["hand-over started"]).await.unwrap();
        server.home().run(&["upgrade"]).await.unwrap()
    });
    assert_eq!(resized.unwrap().outcome.as_deref(), Some("completed"));
    server.follow(&String::from_utf8_lossy(&upgraded.stdout)).unwrap();
    assert_eq!(server.model("a").await.unwrap().share_percent, 60);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn workers_start_from_the_binary_that_existed_when_the_supervisor_started() {
    let mut home = home();
    configure(&home, &[]);
    let folder = home.path().join("bin");
    std::fs::create_dir(&folder).unwrap();
    for name in ["shadowslice", "shadowslice-worker"] {
        std::fs::copy(sibling_binary(name).unwrap(), folder.join(name)).unwrap();
    }
    home.set_binary(folder.join("shadowslice"));
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    // The test replaces the file in the same way as a package manager.
    std::fs::copy("/bin/false", folder.join("new")).unwrap();
    std::fs::rename(folder.join("new"), folder.join("shadowslice-worker")).unwrap();
    let before = server.model("a").await.unwrap().workers[0].pid;
    ProcessHandle::of(before).unwrap().signal(Signal::SIGKILL).unwrap();
    let after = server
        .wait_status("a", "another worker", |model| model.state == "ready" && model.workers[0].pid != before)
        .await
        .unwrap();
    let name = std::fs::read_to_string(format!("/proc/{}/comm", after.workers[0].pid)).unwrap();
    assert_eq!(name, "shadowslice-wor\n");
    assert_eq!(ask(server.client(), "a", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

/// Sends the headers of a request to `a` without its body.
async fn send_head(server: &ServerUnderTest) -> tokio::net::TcpStream {
    use tokio::io::AsyncWriteExt;
    let at = server.tcp_address("HTTP").await.unwrap();
    let mut stream = tokio::net::TcpStream::connect(at).await.unwrap();
    let head = "POST /v2/models/a/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{";
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hang_is_noticed_even_if_an_unfinished_request_keeps_a_model_from_moving() {
    let server = serving().await;
    configure(server.home(), &[slow()]);
    let half = send_head(&server).await;
    // The server has read the headers by the time it answers this request.
    assert_eq!(ask(server.client(), "a", &echo_case(1), 0.0).await, RequestOutcome::Right);
    let (output, tallies) = tokio::join!(server.home().run(&["upgrade"]), async {
        server.wait_status("a", "moved", |model| model.state == "moved").await.unwrap();
        successor(&server).signal(Signal::SIGSTOP).unwrap();
        let [a, b] = loads(&server, Duration::from_secs(1));
        [a.await.unwrap(), b.await.unwrap()]
    });
    drop(half);
    let said = String::from_utf8_lossy(&output.unwrap().stderr).into_owned();
    assert!(said.contains("did not answer for 5s, and was killed"), "{said}");
    tallies.iter().for_each(assert_nothing_lost);
    // The worker was waiting for the request's body, and exits once the request has ended.
    server.wait_children(2).await.unwrap();
    server.wait_reaped().await.unwrap();
    server.stop().await.unwrap();
}
