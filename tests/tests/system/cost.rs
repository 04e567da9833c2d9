//! Tests of `shadowslice cost`.
#![allow(clippy::unwrap_used, reason = "only tests use it")]

use serde_json::Value;
use shadowslice_tests::home::Home;

use crate::fixtures::{EMULATED, echo};

const PRICE: f64 = 3.6;

/// Makes two models whose batches take 40 ms on at least half of the GPU.
fn home() -> Home {
    let keys = "profile: p.yaml, slo: 400ms, batch: {max: 4}";
    let models = ["a", "b"].map(|name| format!("  - {}\n", echo(name, keys))).concat();
    let home = Home::with_config(&format!("{EMULATED}models:\n{models}")).unwrap();
    let profile = "source: {kind: illustrative}\nmemory: {context: 1Mi, weights: 1Mi, activations: 1Mi}\n\
                   start: {process: 1ms, load: 1ms, warm: 1ms}\nexecution_ms:\n  sms: [66]\n  1: [40]\n  4: [40]\n";
    home.write("p.yaml", profile).unwrap();
    home
}

async fn cost(home: &Home, arguments: &[&str]) -> std::process::Output {
    let config = home.path().join("config.yaml");
    let all = [&["cost", config.to_str().unwrap()], arguments].concat();
    home.command(&all).unwrap().output().await.unwrap()
}

fn of(model: &Value, key: &str) -> f64 {
    model[key].as_f64().unwrap()
}

#[tokio::test]
async fn costs_follow_from_the_measured_rates_and_add_up_to_the_price() {
    let home = home();
    let output = cost(&home, &["--price", "3.6/h", "--span", "600ms", "--json"]).await;
    let progress = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{progress}");
    assert!(progress.contains("a alone at ") && progress.contains("adaptive, "), "{progress}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let alone = report["alone"].as_array().unwrap();
    for model in alone {
        // A model answers at most 100 requests per second. A short load may end before its queue is too long.
        assert!((50.0..115.0).contains(&of(model, "rate")), "{model}");
        let expected = PRICE / 3600.0 * 1e6 / of(model, "rate");
        assert!((of(model, "cost_per_million") / expected - 1.0).abs() < 1e-9, "{model}");
    }
    let mixes = report["together"].as_array().unwrap();
    assert_eq!([&mixes[0]["policy"], &mixes[1]["policy"]], ["plain MPS", "adaptive"], "{report}");
    for mix in mixes {
        let models = mix["models"].as_array().unwrap();
        let paid: f64 =
            models.iter().map(|model| of(model, "cost_per_million") * of(model, "rate") / 1e6).sum();
        assert!((paid / (PRICE / 3600.0) - 1.0).abs() < 0.01, "{mix}");
        assert!(of(mix, "gpus_alone") > 0.9 && of(mix, "idle") < 0.6, "{mix}");
    }
    assert_eq!(report["idle_w"], Value::Null, "an emulated GPU has no energy");
}

#[tokio::test]
async fn wrong_arguments_and_models_that_are_never_in_time_are_refused() {
    let home = home();
    for (arguments, code, why) in [
        (vec!["--price", "much"], 64, "invalid price"),
        (vec!["--price", "1/h", "--rate", "c=5"], 64, "no model 'c'"),
        (vec!["--price", "1/h", "--span", "0s"], 64, "at least"),
    ] {
        let output = cost(&home, &arguments).await;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && stderr.contains(why), "{stderr}");
    }
    let strict = std::fs::read_to_string(home.path().join("config.yaml")).unwrap();
    home.write("config.yaml", strict.replace("slo: 400ms", "slo: 5ms")).unwrap();
    let output = cost(&home, &["--price", "1/h", "--span", "100ms"]).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(1) && stderr.contains("does not meet its SLO at any rate"),
        "{stderr}"
    );
}
