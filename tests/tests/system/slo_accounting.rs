//! Tests of the requests that count against a model's SLO.

use std::error::Error as StdError;

use shadowslice_tests::cases::{ClientTensor, NO_OPERATORS, models_folder};
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::metrics::ask as http;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;
use tonic::Code;

use crate::fixtures::{EMULATED, echo, echo_case, profile};
use crate::metrics::scrape;

/// Starts a server with these models and with metrics. Does not wait for the models.
fn starting(models: &[String]) -> Result<ServerUnderTest, HarnessError> {
    let host = EMULATED.replace("metrics: []", "metrics: [\"unix:metrics.sock\"]");
    let models: String = models.iter().map(|model| format!("  - {model}\n")).collect();
    let home = Home::with_config(&format!("{host}models:\n{models}"))?;
    home.write("slow.yaml", profile(5.0).replace("load: 50ms", "load: 300s"))?;
    home.write("broken.onnx", NO_OPERATORS)?;
    ServerUnderTest::start(home, None)
}

/// Returns the number of failures in Triton's statistics.
async fn failures(server: &ServerUnderTest, model: &str) -> Result<u64, Box<dyn StdError>> {
    let path = format!("/v2/models/{model}/stats");
    let answer = http(&server.home().run_dir().join("http.sock"), "GET", &path).await?;
    let stats: serde_json::Value = serde_json::from_str(&answer.body)?;
    let count = &stats["model_stats"][0]["inference_stats"]["fail"]["count"];
    count.as_str().and_then(|count| count.parse().ok()).or(count.as_u64()).ok_or(answer.body.into())
}

#[tokio::test]
async fn requests_to_a_model_that_is_not_ready_count_as_refused() {
    let slow = echo("slow", "profile: slow.yaml, share: {initial: 40%}");
    let broken = "{name: broken, path: broken.onnx, slo: 50ms, share: {initial: 10%}}".to_owned();
    let mut server = starting(&[slow, broken]).unwrap();
    server.wait_up().await.unwrap();
    for (name, state) in [("slow", "loading"), ("broken", "unready")] {
        let so = |model: &ModelStatusJson| model.state == state;
        server.wait_status(name, state, so).await.unwrap();
        for _ in 0..3 {
            let refused = server.client().infer(name, &echo_case(1).inputs).await.unwrap_err();
            assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        }
        let status = server.model(name).await.unwrap();
        assert_eq!((status.requests.rejected, status.requests.refused["not_ready"]), (3, 3), "{name}");
        assert_eq!(status.slo.attainment, None, "{name}");
        assert_eq!(failures(&server, name).await.unwrap(), 3, "{name}");
        let metrics = scrape(&server, "metrics.sock").await.unwrap();
        assert_eq!(metrics.of(name, "requests_refused_total", ",reason=\"not_ready\""), Some(3.0));
        assert_eq!(metrics.of(name, "requests_total", ",outcome=\"rejected\""), Some(3.0));
        assert_eq!(metrics.of(name, "slo_attainment_ratio", ""), None);
        let series = "nv_inference_request_failure{model=\"NAME\",version=\"1\",reason=\"REJECTED\"}";
        assert_eq!(metrics.named(&series.replace("NAME", name)), Some(3.0));
    }
    let table = server.command_output(&["status"]).await.unwrap();
    assert!(!table.contains("100%"), "{table}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_token_outside_the_vocabulary_does_not_violate_the_slo() {
    let model = format!(
        "{{name: encoder, path: {}, slo: 10s, share: {{initial: 50%}}}}",
        models_folder().join("encoder.onnx").display()
    );
    let mut server = starting(&[model]).unwrap();
    server.wait_model_ready("encoder").await.unwrap();
    let tensor = |name: &str, tokens: [i64; 3]| ClientTensor {
        name: name.to_owned(),
        datatype: "INT64".to_owned(),
        shape: vec![1, 3],
        data: tokens.into_iter().flat_map(i64::to_le_bytes).collect(),
    };
    let inputs = |tokens| [tensor("input_ids", tokens), tensor("attention_mask", [1; 3])];
    server.client().infer("encoder", &inputs([1, 2, 999])).await.unwrap();
    let refused = server.client().infer("encoder", &inputs([1, 2, 1000])).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("out of data bounds"), "{refused}");
    let both = |model: &ModelStatusJson| model.requests.succeeded + model.requests.invalid == 2;
    let status = server.wait_status("encoder", "the ends of both requests", both).await.unwrap();
    assert_eq!((status.requests.succeeded, status.requests.failed), (1, 0));
    assert_eq!((status.requests.invalid, status.slo.attainment), (1, Some(1.0)));
    assert_eq!(failures(&server, "encoder").await.unwrap(), 1);
    let metrics = scrape(&server, "metrics.sock").await.unwrap();
    assert_eq!(metrics.of("encoder", "requests_total", ",outcome=\"invalid\""), Some(1.0));
    assert_eq!(metrics.of("encoder", "slo_attainment_ratio", ""), Some(1.0));
    server.stop().await.unwrap();
}
