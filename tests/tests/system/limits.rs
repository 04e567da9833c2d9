//! Tests with requests that exceed a limit. The server must refuse them with a reason, and must
//! serve other requests.

use shadowslice_tests::cases::ClientTensor;
use shadowslice_tests::home::Home;
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::server::ServerUnderTest;
use tonic::Code;

use crate::fixtures::{EMULATED, ask, ask_all, echo, echo_case, one_echo};
use crate::metrics::counted;

#[tokio::test]
async fn requests_beyond_the_queue_are_unavailable() {
    let settings = "batch: {max: 1}, queue: {max_requests: 4, on_late: serve}";
    let server = one_echo(100.0, settings).await.unwrap();
    let outcomes = ask_all(&server.client(), "echo", (0..50).map(echo_case).collect(), 0.0).await;
    let right = outcomes.iter().filter(|outcome| **outcome == RequestOutcome::Right).count();
    let refused = |outcome: &&RequestOutcome| matches!(outcome, RequestOutcome::Failed(why) if why.starts_with("Unavailable"));
    let unavailable = outcomes.iter().filter(refused).count();
    assert_eq!(right + unavailable, 50, "{outcomes:?}");
    assert!(right >= 4 && unavailable > 0, "{right} answered, {unavailable} refused");
    counted(&server, right as u64).await.unwrap();
    let requests = server.model("echo").await.unwrap().requests;
    assert_eq!((requests.succeeded, requests.rejected), (right as u64, unavailable as u64));
    assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_request_larger_than_the_limit_is_refused() {
    let models = echo("echo", "share: {initial: 50%}");
    let yaml = format!("{EMULATED}limits: {{request_bytes: 64Ki}}\nmodels:\n  - {models}\n");
    let server = ServerUnderTest::start_ready(Home::with_config(&yaml).unwrap()).await.unwrap();
    let mut client = server.client();
    let large = ClientTensor::fp32("x", &[4096, 16], &vec![1.0; 4096 * 16]);
    let status = client.infer("echo", &[large]).await.unwrap_err();
    assert!(
        matches!(status.code(), Code::ResourceExhausted | Code::OutOfRange | Code::InvalidArgument),
        "{status}"
    );
    assert_eq!(ask(client, "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn unknown_models_are_not_found() {
    let server = one_echo(5.0, "share: {initial: 50%}").await.unwrap();
    let status = server.client().infer("absent", &echo_case(1).inputs).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    server.stop().await.unwrap();
}
