//! Tests with several tenants: their parts of the SM time, their limits, and floods.
#![allow(clippy::unwrap_used, reason = "only tests use it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use shadowslice_tests::client::InferGrpcClient;
use shadowslice_tests::home::Home;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tonic::{Code, Status};

use crate::fixtures::{EMULATED, echo, echo_case, profile};
use crate::hostile::connect;

const SEARCH_AND_ADS: &str = "tenants: {search: {weight: 3}, ads: {weight: 1}}";

/// Starts models `m0`, `m1`, … whose batches take `ms`. The test's user is a trusted proxy.
async fn start(tenants: &str, models: usize, ms: f64, keys: &str) -> ServerUnderTest {
    let header = format!("tenant_header: {{name: X-Tenant, users: [{}]}}", nix::unistd::geteuid());
    let model =
        |number| format!("  - {}\n", echo(&format!("m{number}"), &format!("profile: p.yaml, {keys}")));
    let models: String = (0..models).map(model).collect();
    let home = Home::with_config(&format!("{EMULATED}{tenants}\n{header}\nmodels:\n{models}")).unwrap();
    home.write("p.yaml", profile(ms)).unwrap();
    ServerUnderTest::start_ready(home).await.unwrap()
}

async fn infer(client: &mut InferGrpcClient, model: &str, tenant: &str) -> Result<(), Status> {
    let case = echo_case(7);
    client.infer_with(model, &case.inputs, &[("x-tenant", tenant)]).await.map(drop)
}

/// Clients of one tenant. Each sends requests one by one, whether they are answered or refused.
struct Flood(JoinSet<Vec<Duration>>, Arc<AtomicBool>);

impl Flood {
    fn start(server: &ServerUnderTest, model: &'static str, tenant: &'static str, clients: usize) -> Self {
        let (mut tasks, stop) = (JoinSet::new(), Arc::new(AtomicBool::new(false)));
        for _ in 0..clients {
            let (mut client, stop) = (server.client(), Arc::clone(&stop));
            tasks.spawn(async move {
                let mut latencies = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let sent = Instant::now();
                    if infer(&mut client, model, tenant).await.is_ok() {
                        latencies.push(sent.elapsed());
                    }
                }
                latencies
            });
        }
        Self(tasks, stop)
    }

    /// Returns the latencies of the answers.
    async fn stop(self) -> Vec<Duration> {
        self.1.store(true, Ordering::Relaxed);
        self.0.join_all().await.concat()
    }
}

fn median(mut latencies: Vec<Duration>) -> Duration {
    latencies.sort_unstable();
    latencies[latencies.len() / 2]
}

async fn tenant(server: &ServerUnderTest, name: &str) -> Value {
    let status: Value =
        serde_json::from_str(&server.command_output(&["status", "--json"]).await.unwrap()).unwrap();
    let tenants = status["tenants"].as_array().unwrap();
    tenants.iter().find(|tenant| tenant["name"] == name).unwrap().clone()
}

async fn sm_seconds(server: &ServerUnderTest, name: &str) -> f64 {
    tenant(server, name).await["sm_use"]["sm_seconds"].as_f64().unwrap()
}

/// Waits until the first model has used this SM time, and returns that of each tenant.
async fn used(server: &ServerUnderTest, more: f64) -> [f64; 2] {
    let now = async || [sm_seconds(server, "search").await, sm_seconds(server, "ads").await];
    let of = |model: &ModelStatusJson| model.more["sm_use"]["sm_seconds"].as_f64().unwrap();
    let (before, end) = (now().await, of(&server.model("m0").await.unwrap()) + more);
    server.wait_status("m0", "SM time", |model| of(model) >= end).await.unwrap();
    let after = now().await;
    [after[0] - before[0], after[1] - before[1]]
}

fn assert_3_to_1(used: [f64; 2]) {
    let ratio = used[0] / used[1];
    assert!((2.85..=3.15).contains(&ratio), "{used:?}: {ratio}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_of_a_model_under_overload_get_sm_time_by_weight_and_alone_all_of_it() {
    let server = start(SEARCH_AND_ADS, 1, 20.0, "slo: 10s, batch: {max: 4}, queue: {on_late: serve}").await;
    let ads = Flood::start(&server, "m0", "ads", 24);
    let [search, alone] = used(&server, 132.0).await;
    assert!(search == 0.0 && alone > 130.0, "nothing is kept for an idle tenant");
    let search = Flood::start(&server, "m0", "search", 24);
    used(&server, 66.0).await;
    assert_3_to_1(used(&server, 132.0 * 4.0).await);
    assert!(search.stop().await.len() > 100 && ads.stop().await.len() > 100);
    let model = server.model("m0").await.unwrap().more["sm_use"]["sm_seconds"].as_f64().unwrap();
    let tenants = sm_seconds(&server, "search").await + sm_seconds(&server, "ads").await;
    assert!((model / tenants - 1.0).abs() < 0.01, "model {model}, tenants {tenants}");
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_of_two_models_divide_the_gpu_by_weight() {
    let server = start(
        SEARCH_AND_ADS,
        2,
        8.0,
        "share: {initial: 100%}, slo: 10s, batch: {max: 4}, queue: {on_late: serve}",
    )
    .await;
    let floods =
        [("m0", "ads"), ("m1", "search")].map(|(model, tenant)| Flood::start(&server, model, tenant, 24));
    used(&server, 20.0).await;
    assert_3_to_1(used(&server, 264.0).await);
    for flood in floods {
        assert!(flood.stop().await.len() > 50);
    }
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_one_tenant_neither_delays_nor_refuses_another_one() {
    let keys = "slo: 300ms, batch: {max: 4}, queue: {max_requests: 32}";
    let server = start("tenants: {search: {}, ads: {}}", 1, 20.0, keys).await;
    let flood = Flood::start(&server, "m0", "ads", 60);
    server.wait_status("m0", "a full queue", |model| model.requests.rejected > 20).await.unwrap();
    let (mut client, mut latencies) = (server.client(), Vec::new());
    for _ in 0..40 {
        let sent = Instant::now();
        infer(&mut client, "m0", "search").await.unwrap();
        latencies.push(sent.elapsed());
    }
    // A request of search waits for at most the batch that executes and the one behind it. Those of ads wait
    // for the queue.
    let [search, ads] = [median(latencies), median(flood.stop().await)];
    assert!(search < ads.mul_f64(0.75), "search {search:?}, ads {ads:?}");
    let search = tenant(&server, "search").await;
    assert_eq!((&search["requests"]["unanswered"], &search["weight"]), (&0.into(), &1.0.into()), "{search}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_tenant_over_its_limits_is_told_when_to_try_again() {
    let tenants = "tenants: {search: {rate: 3/h}, ads: {in_flight: 1}}";
    let server = start(tenants, 1, 500.0, "slo: 10s, batch: {max: 1}").await;
    let mut client = server.client();
    for _ in 0..3 {
        infer(&mut client, "m0", "search").await.unwrap();
    }
    let status = infer(&mut client, "m0", "search").await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("tenant 'search' exceeds its rate of 3 requests"), "{status}");
    let retry: u64 =
        status.metadata().get("grpc-retry-pushback-ms").unwrap().to_str().unwrap().parse().unwrap();
    assert!((1_000_000..=1_200_000).contains(&retry), "{retry}");
    let first = tokio::spawn({
        let mut client = client.clone();
        async move { infer(&mut client, "m0", "ads").await }
    });
    server.wait_status("m0", "a request", |model| model.requests.accepted == 4).await.unwrap();
    let refused = post(&server, "ads").await;
    assert!(refused.starts_with("HTTP/1.1 429") && refused.contains("retry-after: 1\r\n"), "{refused}");
    assert!(refused.contains("tenant 'ads' has 1 requests in flight"), "{refused}");
    first.await.unwrap().unwrap();
    infer(&mut client, "m0", "unknown").await.unwrap();
    let model = server.model("m0").await.unwrap();
    assert_eq!(model.requests.refused["tenant_limit"], 2, "{model:?}");
    assert_eq!(tenant(&server, "default").await["requests"]["answered"], 1);
    let text = server.command_output(&["status"]).await.unwrap();
    assert!(text.contains("OVER LIMIT") && text.contains("search"), "{text}");
    server.stop().await.unwrap();
}

/// Sends a request over HTTP, and returns the response.
async fn post(server: &ServerUnderTest, tenant: &str) -> String {
    let data = vec!["7"; 16].join(",");
    let body = format!(
        "{{\"inputs\":[{{\"name\":\"x\",\"datatype\":\"FP32\",\"shape\":[1,16],\"data\":[{data}]}}]}}"
    );
    let length = body.len();
    let request = format!(
        "POST /v2/models/m0/infer HTTP/1.1\r\nhost: localhost\r\nx-tenant: {tenant}\r\nconnection: close\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    let mut stream = connect(server, "http.sock").await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}
