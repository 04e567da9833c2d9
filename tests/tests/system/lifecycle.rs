//! Tests of the start, the listeners and the stop of a server.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::client::InferGrpcClient;
use shadowslice_tests::home::{Home, left_behind};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use tokio::time::{interval, timeout};

use crate::fixtures::{ask, ask_all, echo, echo_case, home, one_echo, profile};
use crate::metrics::counted;

#[tokio::test]
async fn a_server_serves_and_leaves_nothing_behind() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    assert_eq!(ask(server.client(), "echo", &echo_case(7), 0.0).await, RequestOutcome::Right);
    counted(&server, 1).await.unwrap();
    let model = server.model("echo").await.unwrap();
    assert_eq!((model.state.as_str(), model.share_percent, model.sms), ("ready", 50, 66));
    assert_eq!((model.workers.len(), model.requests.succeeded), (1, 1));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_server_answers_accepted_requests_before_it_stops() {
    let server = one_echo(100.0, "batch: {max: 4}, queue: {on_late: serve}").await.unwrap();
    let client = server.client();
    let asking =
        tokio::spawn(async move { ask_all(&client, "echo", (0..30).map(echo_case).collect(), 0.0).await });
    server.wait_status("echo", "30 requests accepted", |model| model.requests.accepted == 30).await.unwrap();
    server.stop().await.unwrap();
    assert_eq!(asking.await.unwrap(), vec![RequestOutcome::Right; 30]);
}

#[tokio::test]
async fn a_second_sigterm_ends_the_server_at_once() {
    let mut server = one_echo(3000.0, "batch: {max: 1}, queue: {on_late: serve}").await.unwrap();
    let children = server.children();
    let client = server.client();
    let asking =
        tokio::spawn(async move { ask_all(&client, "echo", (0..3).map(echo_case).collect(), 0.0).await });
    server.wait_status("echo", "3 requests accepted", |model| model.requests.accepted == 3).await.unwrap();
    server.signal(Signal::SIGTERM).unwrap();
    // The server is now waiting for three requests of three seconds each.
    assert!(timeout(Duration::from_secs(1), server.wait_exit()).await.is_err(), "the server did not drain");
    server.signal(Signal::SIGTERM).unwrap();
    server.wait_exit().await.unwrap();
    let outcomes = asking.await.unwrap();
    assert!(
        outcomes.iter().any(|outcome| *outcome != RequestOutcome::Right),
        "the server answered all requests first"
    );
    assert_eq!(outlived(&children).await, 0);
    assert_eq!(left_behind(server.home(), &children), Vec::<String>::new());
}

#[tokio::test]
async fn a_strict_start_can_be_stopped_before_its_models_are_loaded() {
    let home = home(&[echo("echo", "profile: profile.yaml")]).unwrap();
    home.write("profile.yaml", profile(5.0).replace("load: 50ms", "load: 300s")).unwrap();
    let yaml = fs::read_to_string(home.path().join("config.yaml")).unwrap();
    home.write("config.yaml", format!("start: strict\n{yaml}")).unwrap();
    let server = ServerUnderTest::start(home, None).unwrap();
    let starts = async {
        let mut tick = interval(Duration::from_millis(10));
        while !server.model("echo").await.is_ok_and(|model| !model.workers.is_empty()) {
            tick.tick().await;
        }
    };
    timeout(Duration::from_secs(30), starts).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_incomplete_request_does_not_delay_the_stop() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    let socket = server.home().run_dir().join("http.sock");
    let begun: [&[u8]; 2] =
        [b"GET /v2 HT", b"POST /v2/models/echo/infer HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"];
    let mut peers = Vec::new();
    for request in begun {
        let mut peer = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        peer.write_all(request).unwrap();
        peers.push(peer);
    }
    // The server waits half a minute for requests in flight, but these connections have no
    // requests.
    timeout(Duration::from_secs(20), server.stop())
        .await
        .expect("the server waits for incomplete requests")
        .unwrap();
    drop(peers);
}

#[tokio::test]
async fn workers_end_when_their_supervisor_is_killed() {
    let mut server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    let children = server.children();
    assert!(!children.is_empty());
    server.signal(Signal::SIGKILL).unwrap();
    server.wait_exit().await.unwrap();
    assert_eq!(outlived(&children).await, 0);
}

#[tokio::test]
async fn a_server_starts_although_a_killed_one_left_sockets_and_a_stopped_worker() {
    let home = home(&[echo("echo", "share: {initial: 50%}")]).unwrap();
    let run_dir = home.run_dir();
    let yaml = fs::read_to_string(home.path().join("config.yaml")).unwrap();
    let mut first = ServerUnderTest::start_ready(home).await.unwrap();
    let left = first.children();
    left.iter().for_each(|worker| worker.signal(Signal::SIGSTOP).unwrap());
    first.signal(Signal::SIGKILL).unwrap();
    first.wait_exit().await.unwrap();
    // The death of the supervisor orphans the process group of the workers. The kernel then wakes
    // the stopped workers, and most of them exit.
    let second = Home::with_config(&format!("run_dir: {}\n{yaml}", run_dir.display())).unwrap();
    let second = ServerUnderTest::start(second, None).unwrap();
    let client = InferGrpcClient::new(&run_dir.join("grpc.sock"));
    let ready = async {
        let mut tick = interval(Duration::from_millis(20));
        while !matches!(client.clone().server_ready().await, Ok(true)) {
            tick.tick().await;
        }
    };
    timeout(Duration::from_secs(30), ready).await.unwrap_or_else(|_| panic!("{}", second.log()));
    assert_eq!(ask(client, "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    assert_eq!(outlived(&left).await, 0);
    second.stop().await.unwrap();
}

#[tokio::test]
async fn each_listener_has_its_own_mode() {
    let home = Home::with_config(&format!(
        "listen:\n  http: []\n  metrics: []\n  \
         grpc: [\"unix:grpc.sock\", {{address: \"unix:team.sock\", mode: \"0660\"}}]\n\
         gpus: [{{device: emulated, sms: 132}}]\nmodels:\n  - {}\n",
        echo("echo", "share: {initial: 50%}")
    ))
    .unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let team = server.home().run_dir().join("team.sock");
    assert_eq!(fs::metadata(&team).unwrap().permissions().mode() & 0o777, 0o660);
    assert_eq!(ask(InferGrpcClient::new(&team), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    assert_eq!(ask(server.client(), "echo", &echo_case(2), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn private_files_are_not_accessible_to_others() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    let mode = |name: &str| {
        let path = server.home().run_dir().join(name);
        fs::metadata(path).map(|found| found.permissions().mode() & 0o777)
    };
    assert_eq!(mode("").unwrap(), 0o755);
    assert_eq!(mode("control.sock").unwrap(), 0o600);
    assert_eq!(mode("private").unwrap(), 0o700);
    server.stop().await.unwrap();
}

/// Waits at most 30 s until all workers of a dead supervisor have exited. Returns the number of
/// remaining workers.
async fn outlived(workers: &[ProcessHandle]) -> usize {
    let mut tick = interval(Duration::from_millis(20));
    let living = || workers.iter().filter(|worker| worker.is_alive()).count();
    let waiting = async {
        while living() > 0 {
            tick.tick().await;
        }
    };
    // The returned number reveals a timeout, so the timeout itself is ignored.
    let _ = timeout(Duration::from_secs(30), waiting).await;
    living()
}
