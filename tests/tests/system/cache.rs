//! Tests of answers that come from the cache of a model.

use shadowslice_tests::home::Home;
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::server::ServerUnderTest;

use crate::fixtures::{ask, echo, echo_case, profile};
use crate::metrics::{counted, scrape};

#[tokio::test]
async fn repeated_requests_are_answered_right_without_batches_also_after_a_change_of_the_share() {
    let host = "listen: {http: [\"unix:http.sock\"], grpc: [\"unix:grpc.sock\"], metrics: [\"unix:metrics.sock\"]}\n\
                gpus: [{device: emulated, sms: 132}]\ncontroller: {policy: static}\nmodels:\n";
    let model = echo("echo", "profile: profile.yaml, cache: {size: 1Mi}, share: {initial: 50%}");
    let home = Home::with_config(&format!("{host}  - {model}\n")).unwrap();
    home.write("profile.yaml", profile(5.0)).unwrap();
    let server = ServerUnderTest::start_ready(home).await.unwrap();
    let asks = async |numbers: &[u16]| {
        for &number in numbers {
            assert_eq!(ask(server.client(), "echo", &echo_case(number), 0.0).await, RequestOutcome::Right);
        }
    };
    asks(&[1, 1, 2, 1, 2]).await;
    counted(&server, 5).await.unwrap();
    server.command_output(&["resize", "echo", "25%"]).await.unwrap();
    asks(&[2, 3]).await;
    counted(&server, 7).await.unwrap();
    let metrics = scrape(&server, "metrics.sock").await.unwrap();
    assert_eq!(metrics.of("echo", "batches_total", ""), Some(3.0));
    assert_eq!(metrics.of("echo", "requests_within_slo_total", ""), Some(7.0));
    let of_cache =
        |name| metrics.named(&format!("nv_cache_{name}_per_model{{model=\"echo\",version=\"1\"}}"));
    assert_eq!([of_cache("num_hits"), of_cache("num_misses")], [Some(4.0), Some(3.0)]);
    server.stop().await.unwrap();
}
