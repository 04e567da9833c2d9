//! Tests with models whose GPU the supervisor chooses, on a host with two GPUs.

use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::cases;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::server::ServerUnderTest;

use crate::fixtures::{ask, assert_nothing_lost, echo, echo_case, load, profile, unwrapped};

const TWO_GPUS: &str = r#"
listen: {http: ["unix:http.sock"], grpc: ["unix:grpc.sock"], metrics: []}
gpus: [{device: emulated, sms: 132}, {device: emulated, sms: 132}]
timeouts: {dwell: 100ms}
"#;

/// Returns a model whose execution times and SLO determine its number of SMs. The model serves late
/// requests, because the machine may be busy.
fn auto(name: &str, slo: &str) -> String {
    echo(name, &format!("gpu: auto, slo: {slo}, profile: profile.yaml, queue: {{on_late: serve}}"))
}

fn config(models: &[String]) -> String {
    let models: String = models.iter().map(|model| format!("  - {model}\n")).collect();
    format!("{TWO_GPUS}models:\n{models}")
}

async fn serving(models: &[String]) -> Result<ServerUnderTest, HarnessError> {
    let home = Home::with_config(&config(models))?;
    home.write("profile.yaml", profile(5.0))?;
    home.write("whole.yaml", profile(5.0).replace("sms: [66]", "sms: [132]"))?;
    ServerUnderTest::start_ready(home).await
}

async fn gpus(server: &ServerUnderTest, names: &[&str]) -> Result<Vec<Option<u64>>, HarnessError> {
    let status = server.status().await?;
    let gpu = |name: &&str| status.model(name).and_then(|model| model.more["gpu"].as_u64());
    Ok(names.iter().map(gpu).collect())
}

/// Runs a command that must fail, and returns its error message.
async fn refused(server: &ServerUnderTest, arguments: &[&str]) -> Result<String, HarnessError> {
    let refused = server.home().run(arguments).await?;
    assert_eq!(refused.status.code(), Some(1), "{arguments:?}");
    Ok(unwrapped(&String::from_utf8_lossy(&refused.stderr)))
}

#[tokio::test]
async fn models_are_spread_over_gpus_and_stay_where_they_are() {
    let fixed = echo("fixed", "profile: profile.yaml, gpu: 1");
    let models = [
        auto("large", "11ms"),
        fixed,
        auto("small", "200ms"),
        auto("little", "200ms"),
        echo("bare", "gpu: 0"),
    ];
    let mut server = serving(&models).await.unwrap();
    let names = ["large", "fixed", "small", "little"];
    assert_eq!(
        gpus(&server, &names).await.unwrap(),
        [Some(0), Some(1), Some(1), Some(1)],
        "the large model needs most of a GPU"
    );
    let need = server.model("large").await.unwrap().more["need"].clone();
    assert_eq!((&need["sms"], &need["memory_mib"]), (&64.into(), &120.into()), "{need}");
    // Without a profile, the supervisor estimates the required SMs from the warm-up, and later from
    // batches.
    assert_eq!(ask(server.client(), "bare", &echo_case(1), 0.0).await, RequestOutcome::Right);
    let need = server.model("bare").await.unwrap().more["need"].clone();
    assert_eq!((&need["sms"], &need["why"]), (&8.into(), &serde_json::Value::Null), "{need}");
    assert!(need["rate"].as_f64().is_some_and(|rate| rate > 0.0), "{need}");
    // Another large model gets the less loaded GPU, and no other model moves.
    let home = server.home();
    home.write("config.yaml", config(&[&models[..], &[auto("other", "11ms")]].concat())).unwrap();
    let reloaded = server.reload().await.unwrap();
    let moved = reloaded.models.iter().find(|model| model.keys.iter().any(|key| key == "gpu"));
    assert!(moved.is_none(), "{moved:?}");
    assert_eq!(gpus(&server, &["other"]).await.unwrap(), [Some(1)]);
    assert_eq!(gpus(&server, &names).await.unwrap(), [Some(0), Some(1), Some(1), Some(1)]);
    // The models also stay after the supervisor has been killed, and after an upgrade.
    assert_eq!(server.command_output(&["move", "little", "0"]).await.unwrap(), "little is ready on GPU 0\n");
    server.upgrade().await.unwrap();
    assert_eq!(gpus(&server, &names).await.unwrap(), [Some(0), Some(1), Some(1), Some(0)]);
    server.signal(Signal::SIGKILL).unwrap();
    server.wait_exit().await.unwrap();
    server.restart().unwrap();
    server.wait_ready().await.unwrap();
    assert_eq!(gpus(&server, &names).await.unwrap(), [Some(0), Some(1), Some(1), Some(0)]);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn moves_under_load_lose_nothing() {
    let server = serving(&[auto("m", "200ms"), auto("n", "200ms")]).await.unwrap();
    let [m, n] = ["m", "n"].map(|model| load(&server, model, 100.0, Duration::from_secs(6)));
    let mut to = gpus(&server, &["m"]).await.unwrap()[0].unwrap();
    let mut moves = 0;
    while !m.is_finished() {
        to = 1 - to;
        let said = server.command_output(&["move", "m", &to.to_string()]).await.unwrap();
        assert_eq!(said, format!("m is ready on GPU {to}\n"));
        moves += 1;
    }
    assert!(moves > 3, "{moves} moves");
    assert_nothing_lost(&m.await.unwrap());
    assert_nothing_lost(&n.await.unwrap());
    assert_eq!(
        server.command_output(&["move", "m", &to.to_string()]).await.unwrap(),
        format!("m was already on GPU {to}\n")
    );
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_model_that_cannot_move_serves_on_and_the_reason_is_reported() {
    let digits = std::fs::read(shadowslice_tests::cases::models_folder().join("digits.onnx")).unwrap();
    let model = "{name: digits, path: m.onnx, slo: 200ms, gpu: auto}".to_owned();
    let home = Home::with_config(&config(&[model, echo("fixed", "gpu: 1")])).unwrap();
    let file = home.write("m.onnx", digits).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    assert_eq!(gpus(&server, &["digits"]).await.unwrap(), [Some(0)]);
    std::fs::remove_file(file).unwrap();
    let why = refused(&server, &["move", "digits", "1"]).await.unwrap();
    assert!(why.contains("model 'digits' stays on GPU 0: ") && why.contains("m.onnx"), "{why}");
    assert_eq!(gpus(&server, &["digits"]).await.unwrap(), [Some(0)]);
    let case = &cases::load(&cases::models_folder().join("digits.json")).unwrap()[0];
    assert_eq!(ask(server.client(), "digits", case, 1e-4).await, RequestOutcome::Right);
    let why = refused(&server, &["move", "fixed", "0"]).await.unwrap();
    assert!(why.contains("the configuration puts 'fixed' on GPU 1"), "{why}");
    assert!(refused(&server, &["move", "digits", "2"]).await.unwrap().contains("GPU 2 not found"));
    assert!(refused(&server, &["move", "digit", "1"]).await.unwrap().contains("model 'digit' not found"));
    assert_eq!(ask(server.client(), "fixed", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_supervisor_moves_a_model_if_one_violates_its_slo_and_a_gpu_has_room() {
    // Each model needs a whole GPU, because a batch takes 5 ms on 132 SMs and the SLO is 11 ms.
    let busy = |name| auto(name, "11ms").replace("profile.yaml", "whole.yaml");
    let server = serving(&[busy("m"), busy("n")]).await.unwrap();
    assert_eq!(gpus(&server, &["m", "n"]).await.unwrap(), [Some(0), Some(1)]);
    server.command_output(&["move", "n", "0"]).await.unwrap();
    let [m, n] = ["m", "n"].map(|model| load(&server, model, 70.0, Duration::from_secs(20)));
    server.wait_line(&["moving a model", "violates its SLO"]).await.unwrap();
    assert_nothing_lost(&m.await.unwrap());
    assert_nothing_lost(&n.await.unwrap());
    let on = gpus(&server, &["m", "n"]).await.unwrap();
    assert_ne!(on[0], on[1]);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn automatic_placement_needs_gpus_of_one_kind() {
    let both = TWO_GPUS.replace("{device: emulated, sms: 132}]", "{device: 0}]");
    let home = Home::with_config(&format!("{both}models:\n  - {}\n", echo("m", "gpu: auto"))).unwrap();
    let config = home.path().join("config.yaml");
    let checked = home.run(&["check", &config.to_string_lossy()]).await.unwrap();
    assert_eq!(checked.status.code(), Some(78));
    assert!(
        String::from_utf8_lossy(&checked.stderr).contains("models[0].gpu: `auto` needs GPUs of one kind")
    );
}
