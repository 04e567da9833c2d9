//! A host, or a model, that is to get no more requests, and serves on.

use std::error::Error as StdError;
use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::home::{Error, Home, left_behind};
use shadowslice_tests::load::Outcome;
use shadowslice_tests::metrics::ask as http;
use shadowslice_tests::server::Server;
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt;

use crate::readiness::says_ready;
use crate::scene::{EMULATED, ask, assert_nothing_lost, echo, echo_case, load, profile};

/// Two ready models, `m` and `n`, which clients may load and unload.
async fn serving(more: &str) -> Result<Server, Error> {
    let keys = "profile: profile.yaml, share: {initial: 40%}, queue: {on_late: serve}";
    let models = format!("  - {}\n  - {}\n", echo("m", keys), echo("n", keys));
    let home = Home::with_config(&format!("{EMULATED}model_control: explicit\n{more}\nmodels:\n{models}"))?;
    home.write("profile.yaml", profile(2.0))?;
    Server::ready(home).await
}

/// What is said of a model over HTTP and gRPC, and in the repository's index.
async fn of_model(server: &Server, model: &str) -> Result<(bool, bool, String), Box<dyn StdError>> {
    let path = format!("/v2/models/{model}/ready");
    let answer = http(&server.home().run_dir().join("http.sock"), "GET", &path).await?;
    let listed = server.client().repository_index(false).await?;
    let state = listed.into_iter().find(|(name, ..)| name == model).ok_or("it is not listed")?.1;
    Ok((answer.head.starts_with("http/1.1 200 "), server.client().model_ready(model).await?, state))
}

fn ready() -> (bool, bool, String) {
    (true, true, "READY".to_owned())
}

fn drained() -> (bool, bool, String) {
    (false, false, "UNAVAILABLE".to_owned())
}

#[tokio::test]
async fn a_drained_host_serves_and_says_that_it_is_not_ready() {
    let server = serving("").await.unwrap();
    let mut health = server.client().health().await.unwrap();
    assert!(health.next().await.unwrap().unwrap());
    let loaded = load(&server, "m", 200.0, Duration::from_secs(1));
    let said = server.said(&["drain"]).await.unwrap();
    assert_eq!(said, "the host is drained: it keeps serving and reports not ready\n");
    assert!(!health.next().await.unwrap().unwrap(), "watchers are told");
    assert_eq!(says_ready(&server).await.unwrap(), [false; 3]);
    assert_eq!(of_model(&server, "m").await.unwrap(), drained());
    assert!(server.said(&["status"]).await.unwrap().contains("the host is drained"));
    assert_nothing_lost(&loaded.await.unwrap());
    assert_eq!(server.said(&["undrain"]).await.unwrap(), "the host is undrained\n");
    assert!(health.next().await.unwrap().unwrap());
    assert_eq!(
        (says_ready(&server).await.unwrap(), of_model(&server, "m").await.unwrap()),
        ([true; 3], ready())
    );
    drop(health);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_drained_model_answers_and_is_not_ready_until_it_is_undrained_or_loaded_again() {
    let server = serving("").await.unwrap();
    assert!(server.said(&["drain", "m"]).await.unwrap().starts_with("m is drained"));
    assert!(server.said(&["drain", "m"]).await.unwrap().starts_with("m was already drained"));
    assert_eq!(
        (of_model(&server, "m").await.unwrap(), of_model(&server, "n").await.unwrap()),
        (drained(), ready())
    );
    assert_eq!(says_ready(&server).await.unwrap(), [true; 3], "another one serves");
    assert_eq!(ask(server.client(), "m", &echo_case(1), 0.0).await, Outcome::Right);
    assert_eq!(server.model("m").await.unwrap().more["drained"], true);
    // New workers under another configuration change nothing about that, an undrain does.
    let yaml = std::fs::read_to_string(server.home().path().join("config.yaml")).unwrap();
    server.home().write("config.yaml", yaml.replacen("name: m,", "name: m, batch: {max: 4},", 1)).unwrap();
    assert_eq!(server.reload().await.unwrap().changes(), [("m", "replaced")]);
    assert_eq!(of_model(&server, "m").await.unwrap(), drained());
    assert_eq!(server.said(&["undrain", "m"]).await.unwrap(), "m is undrained\n");
    assert_eq!(of_model(&server, "m").await.unwrap(), ready());
    for unload in [true, false] {
        server.said(&["drain", "m"]).await.unwrap();
        if unload {
            server.client().unload("m").await.unwrap();
        }
        server.client().load("m", None).await.unwrap();
        assert_eq!(of_model(&server, "m").await.unwrap(), ready(), "unloaded first: {unload}");
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
    assert!(!health.next().await.unwrap().unwrap(), "watchers are told");
    assert_eq!(says_ready(&server).await.unwrap(), [false; 3]);
    assert_eq!(ask(server.client(), "m", &echo_case(1), 0.0).await, Outcome::Right, "it accepts and serves");
    assert!(server.said(&["status"]).await.unwrap().contains("the host is stopping"));
    assert_eq!(server.home().run(&["undrain"]).await.unwrap().status.code(), Some(1));
    assert!(server.ended().await.unwrap().success(), "{}", server.log());
    assert!(begun.elapsed() >= Duration::from_secs(1), "it served on for {:?} only", begun.elapsed());
    assert_eq!(left_behind(server.home(), &children), Vec::<String>::new());
}

#[tokio::test]
async fn a_second_signal_or_a_terminals_ends_a_lame_duck() {
    for first in [Signal::SIGTERM, Signal::SIGINT] {
        let mut server = serving("timeouts: {lame_duck: 1h}").await.unwrap();
        let children = server.children();
        server.signal(first).unwrap();
        if first == Signal::SIGTERM {
            let unready = async { while server.client().server_ready().await.unwrap() {} };
            timeout(server.home().patience(), unready).await.unwrap();
            server.signal(Signal::SIGTERM).unwrap();
        }
        assert!(server.ended().await.unwrap().success(), "{}", server.log());
        assert_eq!(left_behind(server.home(), &children), Vec::<String>::new());
    }
}
