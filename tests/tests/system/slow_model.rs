//! Tests with a model whose workers take a minute to start. Meanwhile, other models must load, move,
//! reload and be upgraded in their own time.
//!
//! The tests measure no times: a command that waited for the slow model would only return after the
//! model's reload has ended or its state has changed, which the tests check.

use nix::sys::signal::Signal;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::server::ServerUnderTest;

use crate::fixtures::{ask, echo, echo_case, profile};

const HOST: &str = r#"
listen: {http: ["unix:http.sock"], grpc: ["unix:grpc.sock"], metrics: []}
gpus: [{device: emulated, sms: 132}, {device: emulated, sms: 132}]
timeouts: {dwell: 100ms}
controller: {policy: static}
model_control: explicit
models:
"#;

/// Writes a configuration with a slow model and a fast one, each with these keys.
fn write(home: &Home, slow: &str, fast: &str) -> Result<(), HarnessError> {
    let slow = echo("slow", &format!("profile: slow.yaml, gpu: 0, share: {{initial: 30%}}, {slow}"));
    let fast = echo("fast", &format!("profile: fast.yaml, gpu: auto, share: {{initial: 30%}}, {fast}"));
    home.write("config.yaml", format!("{HOST}  - {slow}\n  - {fast}\n")).map(drop)
}

const SLO: &str = "slo: 10s";

/// Starts a server. The slow model has begun to start.
async fn serving() -> Result<ServerUnderTest, HarnessError> {
    let home = Home::with_config("")?;
    home.write("fast.yaml", profile(2.0))?;
    home.write("slow.yaml", profile(2.0).replace("load: 50ms", "load: 60s"))?;
    write(&home, SLO, SLO)?;
    let mut server = ServerUnderTest::start(home, None)?;
    server.wait_up().await?;
    server.wait_model_ready("fast").await?;
    Ok(server)
}

async fn is_loading(server: &ServerUnderTest) -> bool {
    server.model("slow").await.is_ok_and(|slow| slow.state == "loading")
}

#[tokio::test(flavor = "multi_thread")]
async fn other_models_load_move_and_reload_while_a_slow_one_starts() {
    let server = serving().await.unwrap();
    let fast =
        async |n| assert_eq!(ask(server.client(), "fast", &echo_case(n), 0.0).await, RequestOutcome::Right);
    // The slow model needs new workers, for which this reload waits.
    write(server.home(), "slo: 10s, batch: {max: 4}", SLO).unwrap();
    let reload = server.reload();
    let meanwhile = async {
        server.wait_status("slow", "a second start", |slow| slow.workers.len() == 2).await.unwrap();
        server.client().load("fast", Some(r#"{"share": "20%"}"#)).await.unwrap();
        fast(1).await;
        server.client().unload("fast").await.unwrap();
        server.client().load("fast", None).await.unwrap();
        fast(2).await;
        let gpu = server.model("fast").await.unwrap().more["gpu"].as_u64().unwrap();
        let other = (1 - gpu).to_string();
        let said = server.command_output(&["move", "fast", &other]).await.unwrap();
        assert_eq!(said, format!("fast is ready on GPU {other}\n"));
        fast(3).await;
        write(server.home(), "slo: 10s, batch: {max: 4}", "slo: 9s, batch: {max: 8}").unwrap();
        let reloaded = server.reload().await.unwrap();
        assert_eq!(reloaded.changes(), [("fast", "replaced")]);
        assert_eq!(server.model("fast").await.unwrap().slo.latency_ms, 9000.0);
        fast(4).await;
        assert!(is_loading(&server).await, "the test was slower than the slow model");
        assert_eq!(server.model("slow").await.unwrap().workers.len(), 2);
        // A reload with the former configuration ends the second start immediately.
        write(server.home(), SLO, "slo: 9s, batch: {max: 8}").unwrap();
        let reverted = server.reload();
        let ended = server.wait_status("slow", "one start", |slow| slow.workers.len() == 1);
        tokio::select! {
            _ = reverted => panic!("a reload waits until its models serve"),
            ended = ended => drop(ended.unwrap()),
        }
        assert!(is_loading(&server).await, "the test was slower than the slow model");
    };
    tokio::select! {
        _ = reload => panic!("a reload waits until its models serve"),
        () = meanwhile => {}
    }
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn another_model_is_upgraded_while_a_slow_one_starts() {
    let mut server = serving().await.unwrap();
    let (_, ()) = tokio::join!(server.home().run(&["upgrade"]), async {
        server
            .wait_status("fast", "moved", |fast| fast.state == "moved" && fast.workers.is_empty())
            .await
            .unwrap();
        assert!(is_loading(&server).await, "the test was slower than the slow model");
        assert_eq!(ask(server.client(), "fast", &echo_case(1), 0.0).await, RequestOutcome::Right);
        server.signal(Signal::SIGTERM).unwrap();
    });
    assert!(server.wait_exit().await.unwrap().success());
}
