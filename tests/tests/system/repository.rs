//! Tests of the protocol's model repository: index, load and unload.

use std::time::Duration;

use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;
use tonic::{Code, Status};

use crate::fixtures::{EMULATED, ask, assert_nothing_lost, echo, echo_case, load, profile};

/// Starts a server with two models that clients may load and unload.
async fn explicit() -> Result<ServerUnderTest, HarnessError> {
    let keys = "profile: profile.yaml, share: {initial: 40%, max: 80%}, queue: {on_late: serve}";
    let models = format!("  - {}\n  - {}\n", echo("m", keys), echo("n", keys));
    let home = Home::with_config(&format!("{EMULATED}model_control: explicit\nmodels:\n{models}"))?;
    home.write("profile.yaml", profile(2.0))?;
    ServerUnderTest::start_ready(home).await
}

/// Returns the name and the state of every model in the repository index.
async fn index(server: &ServerUnderTest, ready: bool) -> Result<Vec<(String, String)>, Status> {
    let listed = server.client().repository_index(ready).await?;
    Ok(listed.into_iter().map(|entry| (entry.name, entry.state)).collect())
}

fn states(rows: &[(&str, &str)]) -> Vec<(String, String)> {
    rows.iter().map(|(name, state)| ((*name).to_owned(), (*state).to_owned())).collect()
}

#[tokio::test]
async fn an_unloaded_model_is_unavailable_until_it_is_loaded() {
    let server = explicit().await.unwrap();
    assert_eq!(index(&server, false).await.unwrap(), states(&[("m", "READY"), ("n", "READY")]));
    let beside = load(&server, "n", 100.0, Duration::from_secs(2));
    server.client().unload("m").await.unwrap();
    let gone = ask(server.client(), "m", &echo_case(1), 0.0).await;
    assert!(matches!(&gone, RequestOutcome::Failed(why) if why.starts_with("NotFound")), "{gone:?}");
    server.wait_status("m", "unloaded", |model| model.state == "unloaded").await.unwrap();
    assert_eq!(index(&server, false).await.unwrap(), states(&[("n", "READY"), ("m", "UNAVAILABLE")]));
    assert_eq!(index(&server, true).await.unwrap(), states(&[("n", "READY")]));
    for (model, words) in [("m", "'m' is not loaded: unloaded by a client"), ("x", "the models are: n, m")] {
        let output = server.home().run(&["resize", model, "50%"]).await.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(words), "{said}");
    }
    server.client().unload("m").await.unwrap();
    server.wait_children(1).await.unwrap();
    server.client().load("m", None).await.unwrap();
    assert_eq!(ask(server.client(), "m", &echo_case(1), 0.0).await, RequestOutcome::Right);
    assert_nothing_lost(&beside.await.unwrap());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_load_with_another_configuration_hands_over() {
    let server = explicit().await.unwrap();
    let loading = load(&server, "m", 100.0, Duration::from_secs(4));
    server.client().load("m", Some(r#"{"share": "60%"}"#)).await.unwrap();
    assert_eq!(server.model("m").await.unwrap().share_percent, 60);
    server.client().load("m", Some(r#"{"slo": "90ms"}"#)).await.unwrap();
    let model = server.model("m").await.unwrap();
    assert_eq!((model.share_percent, model.slo.latency_ms), (60, 90.0));
    // A load without changes starts new workers, which read the files again.
    let before = model.workers.iter().find(|worker| worker.role == "incumbent").unwrap().pid;
    server.client().load("m", None).await.unwrap();
    let other = |model: &ModelStatusJson| model.workers.iter().all(|worker| worker.pid != before);
    server.wait_status("m", "other workers", other).await.unwrap();
    // The next reload restores the values from the file.
    server.reload().await.unwrap();
    let model = server.model("m").await.unwrap();
    assert_eq!((model.share_percent, model.slo.latency_ms), (40, 200.0));
    assert_nothing_lost(&loading.await.unwrap());
    server.stop().await.unwrap();
}

#[tokio::test]
async fn refused_loads_change_nothing() {
    let server = explicit().await.unwrap();
    for (model, config, code, words) in [
        ("x", None, Code::NotFound, "'x'"),
        ("m", Some(r#"{"path": "/etc/passwd"}"#), Code::InvalidArgument, "path"),
        ("m", Some(r#"{"share": "400%", "slo": 0}"#), Code::InvalidArgument, "slo"),
        ("m", Some("garbage"), Code::InvalidArgument, "map"),
    ] {
        let refused = server.client().load(model, config).await.unwrap_err();
        assert_eq!(refused.code(), code, "{config:?}: {refused}");
        assert!(refused.message().contains(words), "{config:?}: {refused}");
    }
    assert_eq!(server.client().unload("x").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(index(&server, true).await.unwrap().len(), 2);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_load_stays_within_the_limits_of_the_configuration() {
    let server = explicit().await.unwrap();
    for (config, words) in [
        (r#"{"share": {"min": "30%"}}"#, "share.min: a client may only set the configured value, 2%"),
        (r#"{"batch": {"max": 4}}"#, "batch: a client can set only `share` and `slo`"),
        (r#"{"cpus": [0], "slo": "1s"}"#, "cpus: a client can set only `share` and `slo`"),
    ] {
        let refused = server.client().load("m", Some(config)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{config}: {refused}");
        assert!(refused.message().contains(words), "{config}: {refused}");
    }
    // A client may raise a value that it has lowered, up to the value in the file.
    for max in ["50%", "80%"] {
        let config = format!(r#"{{"share": {{"max": "{max}"}}}}"#);
        server.client().load("m", Some(&config)).await.unwrap();
    }
    server.client().load("m", Some(r#"{"share": {"max": "81%"}}"#)).await.unwrap_err();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn clients_cannot_load_models_unless_the_configuration_permits_it() {
    let home = Home::with_config(&format!("{EMULATED}models:\n  - {}\n", echo("m", "share: {initial: 40%}")))
        .unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    for refused in [server.client().unload("m").await, server.client().load("m", None).await] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable);
        assert!(refused.message().contains("model_control: explicit"), "{refused}");
    }
    assert_eq!(index(&server, false).await.unwrap(), states(&[("m", "READY")]));
    assert_eq!(ask(server.client(), "m", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}
