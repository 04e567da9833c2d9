//! Tests of the readiness of a host.

use std::error::Error as StdError;

use futures_util::FutureExt;
use shadowslice_tests::cases::NO_OPERATORS;
use shadowslice_tests::home::{DEFAULT_TIMEOUT, HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::metrics::ask as http;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;
use tokio::time::timeout;
use tokio_stream::StreamExt;

use crate::fixtures::{EMULATED, ask, echo, echo_case, profile};

/// Returns the readiness of the host over HTTP, over gRPC, and from gRPC's health service.
pub(crate) async fn says_ready(server: &ServerUnderTest) -> Result<[bool; 3], Box<dyn StdError>> {
    let answer = http(&server.home().run_dir().join("http.sock"), "GET", "/v2/health/ready").await?;
    let over_http = answer.head.starts_with("http/1.1 200 ");
    assert!(over_http || answer.head.starts_with("http/1.1 400 "), "{}", answer.head);
    let mut states = server.client().health().await?;
    let health = states.next().await.ok_or("the health service sent no state")??;
    Ok([over_http, server.client().server_ready().await?, health])
}

const READY: [bool; 3] = [true; 3];
const UNREADY: [bool; 3] = [false; 3];

/// Returns a model that is ready after a short time.
fn quick() -> String {
    echo("quick", "share: {initial: 40%}")
}

/// Returns a model whose load takes longer than a test.
fn slow() -> String {
    echo("slow", "profile: slow.yaml, share: {initial: 40%}")
}

/// Returns a model whose file is broken.
fn broken() -> String {
    "{name: broken, path: broken.onnx, slo: 50ms, share: {initial: 10%}}".to_owned()
}

fn write(home: &Home, more: &str, models: &[String]) -> Result<(), HarnessError> {
    let models: String = models.iter().map(|model| format!("  - {model}\n")).collect();
    home.write("config.yaml", format!("{EMULATED}{more}\nmodels:\n{models}")).map(drop)
}

/// Starts a server with these models. Does not wait for the models.
async fn starting(more: &str, models: &[String]) -> Result<ServerUnderTest, HarnessError> {
    let home = Home::new()?;
    home.write("slow.yaml", profile(5.0).replace("load: 50ms", "load: 300s"))?;
    home.write("broken.onnx", NO_OPERATORS)?;
    write(&home, more, models)?;
    ServerUnderTest::start(home, None)
}

async fn wait_state(
    server: &ServerUnderTest,
    model: &str,
    state: &str,
) -> Result<ModelStatusJson, HarnessError> {
    server.wait_status(model, state, |model| model.state == state).await
}

#[tokio::test]
async fn a_host_is_not_ready_until_each_initial_model_is_ready_or_unready() {
    let mut server = starting("", &[quick(), slow(), broken()]).await.unwrap();
    server.wait_model_ready("quick").await.unwrap();
    wait_state(&server, "broken", "unready").await.unwrap();
    assert_eq!(says_ready(&server).await.unwrap(), UNREADY, "one model still loads");
    assert!(server.command_output(&["status"]).await.unwrap().contains("the host is not ready"));
    write(server.home(), "", &[quick()]).unwrap();
    server.reload().await.unwrap();
    assert_eq!(says_ready(&server).await.unwrap(), READY);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_host_with_a_broken_model_is_ready() {
    let mut server = starting("", &[quick(), broken()]).await.unwrap();
    server.wait_ready().await.unwrap();
    wait_state(&server, "broken", "unready").await.unwrap();
    assert_eq!(says_ready(&server).await.unwrap(), READY);
    assert_eq!(ask(server.client(), "quick", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_model_added_by_a_reload_does_not_make_the_host_unready() {
    let mut server = starting("", &[quick()]).await.unwrap();
    server.wait_ready().await.unwrap();
    let mut health = server.client().health().await.unwrap();
    assert!(health.next().await.unwrap().unwrap());
    write(server.home(), "", &[quick(), broken(), slow()]).unwrap();
    // The command returns when each model is ready or unready. Here, one model keeps loading.
    let mut reloading = server.home().command(&["reload"]).unwrap().spawn().unwrap();
    let added = async { while server.model("slow").await.is_err() {} };
    timeout(DEFAULT_TIMEOUT, added).await.unwrap();
    wait_state(&server, "slow", "loading").await.unwrap();
    wait_state(&server, "broken", "unready").await.unwrap();
    assert_eq!(says_ready(&server).await.unwrap(), READY);
    reloading.kill().await.unwrap();
    assert!(health.next().now_or_never().is_none(), "watchers get no notification");
    drop(health);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_key_ready_selects_models_and_a_reload_changes_it() {
    let mut server = starting("ready: [quick]", &[quick(), slow()]).await.unwrap();
    server.wait_ready().await.unwrap();
    wait_state(&server, "slow", "loading").await.unwrap();
    for (rule, expected) in [("all", UNREADY), ("[quick]", READY), ("[slow, quick]", UNREADY)] {
        write(server.home(), &format!("ready: {rule}"), &[quick(), slow()]).unwrap();
        assert_eq!(server.command_output(&["reload"]).await.unwrap().lines().next(), Some("ready: changed"));
        assert_eq!(says_ready(&server).await.unwrap(), expected, "{rule}");
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_host_starts_without_models_and_reloads_add_and_remove_them() {
    let none = format!("{EMULATED}models: []\n");
    let model = echo("m", "profile: profile.yaml, share: {initial: 50%}");
    let mut server = ServerUnderTest::start(Home::with_config(&none).unwrap(), None).unwrap();
    server.home().write("profile.yaml", profile(2.0)).unwrap();
    server.wait_up().await.unwrap();
    assert_eq!(says_ready(&server).await.unwrap(), UNREADY);
    assert_eq!(server.status().await.unwrap().models.len(), 0);
    for _ in 0..2 {
        server.home().write("config.yaml", format!("{EMULATED}models:\n  - {model}\n")).unwrap();
        server.reload().await.unwrap();
        server.wait_ready().await.unwrap();
        assert_eq!(ask(server.client(), "m", &echo_case(1), 0.0).await, RequestOutcome::Right);
        server.home().write("config.yaml", &none).unwrap();
        server.reload().await.unwrap();
        assert_eq!(says_ready(&server).await.unwrap(), UNREADY);
        server.wait_children(0).await.unwrap();
    }
    server.stop().await.unwrap();
}
