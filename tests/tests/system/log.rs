//! Tests of the log. Each event must be one line, and figures must be rounded.
#![allow(clippy::unwrap_used, reason = "a failed helper fails the test")]

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use shadowslice_tests::home::Home;
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;

use crate::fixtures::{echo, load, profile};

const CONFIG: &str = "listen: {http: [\"unix:http.sock\"], grpc: [\"unix:grpc.sock\"], metrics: []}
gpus: [{device: emulated, sms: 132}]
controller: {policy: adaptive, interval: 50ms}
timeouts: {dwell: 100ms, lame_duck: 123456us}
models:
";

/// Runs a server through resizes, deaths, decisions, reloads, a drain, refused commands and a stop.
/// Returns its log.
async fn eventful(form: Option<&str>) -> String {
    let mut home = Home::with_config(&format!(
        "{CONFIG}  - {}\n  - {}\n",
        echo("short", "profile: profile.yaml, slo: 14ms, priority: 1"),
        echo("long", "profile: long.yaml, slo: 1s, priority: 2")
    ))
    .unwrap();
    home.write("profile.yaml", profile(3.217_592_653)).unwrap();
    home.write("long.yaml", profile(27.182_818_284)).unwrap();
    if let Some(form) = form {
        home.set_env("SHADOWSLICE_LOG", form);
    }
    let mut server = ServerUnderTest::start_ready(home).await.unwrap();
    let loads = [("short", 150.0), ("long", 40.0)]
        .map(|(model, rate)| load(&server, model, rate, Duration::from_secs(4)));
    let pid = server.model("short").await.unwrap().workers[0].pid;
    ProcessHandle::of(pid).unwrap().signal(Signal::SIGKILL).unwrap();
    let back = |model: &ModelStatusJson| {
        model.state == "ready" && model.workers.iter().any(|worker| worker.pid != pid)
    };
    server.wait_status("short", "another worker", back).await.unwrap();
    server.resize("short", 40).await.unwrap();
    for orders in [["resize", "short", "41%"], ["resize", "short", "41%"], ["resize", "absent", "1%"]] {
        server.home().run(&orders).await.unwrap();
    }
    for order in [&["release", "short"][..], &["drain", "long"], &["undrain", "long"], &["reload"]] {
        server.command_output(order).await.unwrap();
    }
    server.home().write("config.yaml", "models: 7\nnonsense: 1\nmore: 2\n").unwrap();
    assert!(!server.home().run(&["reload"]).await.unwrap().status.success());
    for load in loads {
        load.await.unwrap();
    }
    server.signal(Signal::SIGTERM).unwrap();
    server.wait_gone(server.process()).await.unwrap();
    let text = std::fs::read_to_string(server.home().log_path()).unwrap();
    assert!(text.lines().count() > 20, "{text}");
    text
}

/// Finds numbers with exactly one decimal point, because addresses and versions have more.
fn decimals(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let words = text.split(|letter: char| !letter.is_ascii_digit() && letter != '.');
    let parts = words.map(|word| word.trim_matches('.')).filter_map(|word| word.split_once('.'));
    parts.filter(|(_, fraction)| !fraction.contains('.'))
}

fn assert_rounded(line: &str) {
    for (whole, fraction) in decimals(line) {
        let digits = whole.trim_start_matches('0').len() + fraction.len();
        assert!(fraction.len() <= 3 && digits <= 6, "{whole}.{fraction} in {line}");
    }
}

#[tokio::test]
async fn lines_have_a_time_and_rounded_figures() {
    let log = eventful(None).await;
    for line in log.lines() {
        let (time, said) = line.split_once("Z ").unwrap_or_else(|| panic!("no time: {line}"));
        assert!(time.len() == 26 && time.starts_with("20") && time.as_bytes()[10] == b'T', "{line}");
        assert_rounded(said);
    }
    for event in ["worker exited", "share changed", "action=\"drain\"", "the configuration has errors"] {
        assert!(log.contains(event), "no `{event}` in\n{log}");
    }
    assert!(log.contains("stall_ms=") && log.contains("lame_duck=123 ms"), "{log}");
    let of = |words: &str| log.lines().filter(|line| line.contains(words)).count();
    assert_eq!(
        (of("drain\" on=\"long\""), of("nonsense: unknown key")),
        (2, 1),
        "an event is logged once:\n{log}"
    );
}

#[tokio::test]
async fn in_json_each_line_is_an_object_and_figures_are_numbers() {
    let log = eventful(Some("json")).await;
    let mut stalls = 0;
    for line in log.lines() {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(event["timestamp"].is_string() && event["level"].is_string(), "{line}");
        let fields = event["fields"].as_object().unwrap();
        assert_rounded(&event["fields"].to_string());
        stalls += u32::from(fields.get("stall_ms").is_some_and(Value::is_number));
    }
    assert!(stalls >= 2, "{log}");
}

#[tokio::test]
async fn in_json_the_error_that_ends_the_program_is_an_object() {
    let mut home = Home::with_config("models: 7\nnonsense: 1\n").unwrap();
    home.set_env("SHADOWSLICE_LOG", "json");
    home.set_env("RUST_LOG", "off");
    for (file, code, faults) in [
        ("config.yaml", 78, &["models: ", "nonsense: unknown key"][..]),
        ("absent.yaml", 78, &["cannot read absent.yaml"]),
    ] {
        let output = home.run(&["serve", file]).await.unwrap();
        assert_eq!(output.status.code(), Some(code));
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said.lines().count(), faults.len(), "{said}");
        for (line, fault) in said.lines().zip(faults) {
            let event: Value = serde_json::from_str(line).unwrap();
            assert!(event["timestamp"].is_string() && event["level"] == "ERROR", "{line}");
            assert!(event["fields"]["message"].as_str().unwrap().contains(fault), "{line}");
        }
    }
}
