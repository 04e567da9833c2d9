//! Tests with an overloaded model. All commands must show operators the same reason and rates.

use std::time::Duration;

use shadowslice_tests::load::{ArrivalPattern, LoadPlan};
use shadowslice_tests::status::ModelStatusJson;

use crate::fixtures::{one_echo_under, planned_load, unwrapped};

/// The throughput of one copy of the model, in requests per second. Batches have one row and take
/// 10 ms.
const CAPACITY: f64 = 100.0;

const OFFERED: f64 = 180.0;

#[tokio::test]
async fn all_commands_show_the_same_reason_and_rates_of_an_overload() {
    let server = one_echo_under("adaptive", 10.0, "slo: 30ms, batch: {max: 1}").await.unwrap();
    let plan =
        LoadPlan { rate: OFFERED, span: Duration::from_secs(20), arrivals: ArrivalPattern::Uniform, seed: 1 };
    let load = planned_load(&server, "echo", plan);
    // The load lasts longer than the measurement window of ten seconds.
    let full =
        |model: &ModelStatusJson| model.more["rates"]["window_s"].as_f64().is_some_and(|span| span >= 10.0);
    let loaded = |model: &ModelStatusJson| {
        model.more["rates"]["requests"].as_f64().is_some_and(|rate| rate > 0.9 * OFFERED) && full(model)
    };
    let model = server.wait_status("echo", "the load over ten seconds", loaded).await.unwrap();
    let why = model.more["overload"].as_str().unwrap().to_owned();
    assert!(why.starts_with("a copy serves ") && why.ends_with(" arrive (over the last 10 s)"), "{why}");
    let numbers: Vec<f64> = why.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!((0.8 * CAPACITY..=CAPACITY).contains(&numbers[0]), "{why}");
    assert!((0.9 * OFFERED..1.1 * OFFERED).contains(&numbers[1]), "{why}");
    let plan = server.plan().await.unwrap();
    let planned = &plan["models"][0];
    assert!(planned["overload"].as_str().is_some_and(|why| why.starts_with("a copy serves ")), "{plan}");
    let (planned_rate, status_rate) = (planned["recent"]["arrival_rate"].as_f64().unwrap(), numbers[1]);
    assert!(
        (planned_rate - status_rate).abs() < 0.1 * status_rate,
        "plan {planned_rate}, status {status_rate}"
    );
    for (command, words) in [
        (&["status"][..], "echo is overloaded: a copy serves "),
        (&["plan"], "; overloaded: a copy serves "),
        (&["top", "--once"], "overloaded: a copy serves "),
    ] {
        let said = unwrapped(&server.command_output(command).await.unwrap());
        assert!(said.contains(words), "{command:?}: {said}");
    }
    load.await.unwrap();
    server.stop().await.unwrap();
}
