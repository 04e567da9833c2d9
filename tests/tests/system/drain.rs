//! Tests of drained hosts and models, which continue to serve but are not ready.

use std::error::Error as StdError;
use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::{HarnessError, Home, left_behind};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::metrics::ask as http;
use shadowslice_tests::server::ServerUnderTest;
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt;

use crate::fixtures::{EMULATED, ask, assert_nothing_lost, echo, echo_case, load, profile};
use crate::readiness::says_ready;

/// Starts the models `m` and `n`, which clients may load and unload.
async fn serving(more: &str) -> Result<ServerUnderTest, HarnessError> {
    let keys = "profile: profile.yaml, share: {initial: 40%}, queue: {on_late: serve}";
    let models = format!("  - {}\n  - {}\n", echo("m", keys), echo("n", keys));
    let home = Home::with_config(&format!("{EMULATED}model_control: explicit\n{more}\nmodels:\n{models}"))?;
    home.write("profile.yaml", profile(2.0))?;
    ServerUnderTest::start_ready(home).await
}

/// The readiness of a model, as clients see it.
#[derive(Debug, PartialEq)]
struct Readiness {
    http: bool,
    grpc: bool,
    /// The state in the repository index.
    state: String,
}

/// Queries the readiness of a model over HTTP, over gRPC and in the repository index.
async fn readiness(server: &ServerUnderTest, model: &str) -> Result<Readiness, Box<dyn StdError>> {
    let path = format!("/v2/models/{model}/ready");
    let answer = http(&server.home().run_dir().join("http.sock"), "GET", &path).await?;
    let listed = server.client().repository_index(false).await?;
    let state = listed.into_iter().find(|entry| entry.name == model).ok_or("the model is not listed")?.state;
    let http = answer.head.starts_with("http/1.1 200 ");
    Ok(Readiness { http, grpc: server.client().model_ready(model).await?, state })
}

fn ready() -> Readiness {
    Readiness { http: true, grpc: true, state: "READY".to_owned() }
}

fn drained() -> Readiness {
    Readiness { http: false, grpc: false, state: "UNAVAILABLE".to_owned() }
}

#[tokio::test]
async fn a_drained_host_serves_but_is_not_ready() {
    let server = serving("").await.unwrap();
    let mut health = server.client().health().await.unwrap();
    assert!(health.next().await.unwrap().unwrap());
    let loaded = load(&server, "m", 200.0, Duration::from_secs(1));
    let said = server.command_output(&["drain"]).await.unwrap();
    assert_eq!(said, "the host is drained: requests are still served, but health checks report not ready\n");
    assert!(!health.next().await.unwrap().unwrap(), "watchers are told");
    assert_eq!(says_ready(&server).await.unwrap(), [false; 3]);
    assert_eq!(readiness(&server, "m").await.unwrap(), drained());
    assert!(server.command_output(&["status"]).await.unwrap().contains("the host is drained"));
    assert_nothing_lost(&loaded.await.unwrap());
    assert_eq!(server.command_output(&["undrain"]).await.unwrap(), "the host is undrained\n");
    assert!(health.next().await.unwrap().unwrap());
    assert_eq!(
        (says_ready(&server).await.unwrap(), readiness(&server, "m").await.unwrap()),
        ([true; 3], ready())
    );
    drop(health);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_drained_model_answers_and_is_not_ready_until_it_is_undrained_or_loaded_again() {
    let server = serving("").await.unwrap();
    assert!(server.command_output(&["drain", "m"]).await.unwrap().starts_with("m is drained"));
    assert!(server.command_output(&["drain", "m"]).await.unwrap().starts_with("m was already drained"));
    assert_eq!(
        (readiness(&server, "m").await.unwrap(), readiness(&server, "n").await.unwrap()),
        (drained(), ready())
    );
    assert_eq!(says_ready(&server).await.unwrap(), [true; 3], "another model is ready");
    assert_eq!(ask(server.client(), "m", &echo_case(1), 0.0).await, RequestOutcome::Right);
    assert_eq!(server.model("m").await.unwrap().more["drained"], true);
    // The model stays drained when a reload replaces its workers.
    let yaml = std::fs::read_to_string(server.home().path().join("config.yaml")).unwrap();
    server.home().write("config.yaml", yaml.replacen("name: m,", "name: m, batch: {max: 4},", 1)).unwrap();
    assert_eq!(server.reload().await.unwrap().changes(), [("m", "replaced")]);
    assert_eq!(readiness(&server, "m").await.unwrap(), drained());
    assert_eq!(server.command_output(&["undrain", "m"]).await.unwrap(), "m is undrained\n");
    assert_eq!(readiness(&server, "m").await.unwrap(), ready());
    for unload in [true, false] {
        server.command_output(&["drain", "m"]).await.unwrap();
        if unload {
            server.client().unload("m").await.unwrap();
        }
        server.client().load("m", None).await.unwrap();
        assert_eq!(readiness(&server, "m").await.unwrap(), ready(), "unloaded first: {unload}");
    }
    let unknown = server.home().run(&["drain", "x"]).await.unwrap();
    assert_eq!(unknown.status.code(), Some(1));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_terminated_host_is_a_lame_duck_first() {
    let mut server = serving("timeouts: {lame_duck: 1s}").await.unwrap();
    let children = server.children();
    let mut health = server.client().health().await.unwrap();
    assert!(health.next().await.unwrap().unwrap());
    let begun = Instant::now();
    server.signal(Signal::SIGTERM).unwrap();
    assert!(!health.next().await.unwrap().unwrap(), "watchers are notified");
    assert_eq!(says_ready(&server).await.unwrap(), [false; 3]);
    assert_eq!(
        ask(server.client(), "m", &echo_case(1), 0.0).await,
        RequestOutcome::Right,
        "the host still accepts requests"
    );
    assert!(server.command_output(&["status"]).await.unwrap().contains("the host is stopping"));
    assert_eq!(server.home().run(&["undrain"]).await.unwrap().status.code(), Some(1));
    assert!(server.wait_exit().await.unwrap().success(), "{}", server.log());
    assert!(begun.elapsed() >= Duration::from_secs(1), "the host served for only {:?}", begun.elapsed());
    assert_eq!(left_behind(server.home(), &children), Vec::<String>::new());
}

#[tokio::test]
async fn a_second_sigterm_or_a_sigint_ends_a_lame_duck() {
    for first in [Signal::SIGTERM, Signal::SIGINT] {
        let mut server = serving("timeouts: {lame_duck: 1h}").await.unwrap();
        let children = server.children();
        server.signal(first).unwrap();
        if first == Signal::SIGTERM {
            let unready = async { while server.client().server_ready().await.unwrap() {} };
            timeout(server.home().timeout(), unready).await.unwrap();
            server.signal(Signal::SIGTERM).unwrap();
        }
        assert!(server.wait_exit().await.unwrap().success(), "{}", server.log());
        assert_eq!(left_behind(server.home(), &children), Vec::<String>::new());
    }
}
