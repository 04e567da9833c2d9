//! Tests with real models: many concurrent requests run in batches, and each must get its correct
//! answer.

use shadowslice_tests::cases::{self, models_folder};
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::server::ServerUnderTest;

use crate::fixtures::{ask_all, home};

fn with(model: &str) -> Result<Home, HarnessError> {
    let path = models_folder().join(format!("{model}.onnx"));
    home(&[format!(
        "{{path: {}, slo: 200ms, batch: {{max: 16}}, queue: {{on_late: serve}}}}",
        path.display()
    )])
}

#[tokio::test]
async fn sequences_of_different_lengths_are_answered_correctly() {
    let server = ServerUnderTest::start_ready(with("encoder").unwrap()).await.unwrap();
    let cases = cases::load(&models_folder().join("encoder.json")).unwrap();
    let count = cases.len();
    let outcomes = ask_all(&server.client(), "encoder", cases, 1e-3).await;
    assert_eq!(outcomes, vec![RequestOutcome::Right; count]);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn images_in_batches_are_answered_correctly() {
    let server = ServerUnderTest::start_ready(with("digits").unwrap()).await.unwrap();
    let cases = cases::load(&models_folder().join("digits.json")).unwrap();
    let count = cases.len();
    let outcomes = ask_all(&server.client(), "digits", cases, 1e-4).await;
    assert_eq!(outcomes, vec![RequestOutcome::Right; count]);
    server.stop().await.unwrap();
}
