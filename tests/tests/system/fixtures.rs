//! The shared fixtures of the tests: configurations, echo requests and loads.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_tests::cases::{ClientTensor, RequestCase, compare};
use shadowslice_tests::client::InferGrpcClient;
use shadowslice_tests::home::{HarnessError, Home};
use shadowslice_tests::load::{self, ArrivalPattern, LoadPlan, LoadTally, RequestOutcome};
use shadowslice_tests::server::ServerUnderTest;
use tokio::task::{JoinHandle, JoinSet};

/// A configuration with Unix listeners, an emulated GPU and the policy `static`, without models.
pub(crate) const EMULATED: &str = r#"
listen: {http: ["unix:http.sock"], grpc: ["unix:grpc.sock"], metrics: []}
gpus: [{device: emulated, sms: 132}]
controller: {policy: static}
"#;

/// Makes a folder with these models, which are given as YAML, on the emulated GPU.
pub(crate) fn home(models: &[String]) -> Result<Home, HarnessError> {
    home_under("static", models)
}

pub(crate) fn home_under(policy: &str, models: &[String]) -> Result<Home, HarnessError> {
    let host = EMULATED.replace("policy: static", &format!("policy: {policy}"));
    let models: String = models.iter().map(|model| format!("  - {model}\n")).collect();
    Home::with_config(&format!("{host}models:\n{models}"))
}

/// Returns the YAML of a model that answers `x` as `y`. Its share changes by hand-overs unless
/// `more` sets `handover`.
pub(crate) fn echo(name: &str, more: &str) -> String {
    let slo = if more.contains("slo: ") { "" } else { "slo: 200ms, " };
    let handover = if more.contains("handover: ") { "" } else { "handover: shadow, " };
    format!(
        "{{name: {name}, engine: emulated, {slo}{handover}{more}, \
         tensors: [{{input: x, output: y, datatype: FP32, shape: [16]}}]}}"
    )
}

/// Returns the profile of a model. A batch of up to 16 rows takes `execution_ms` on 66 or more SMs,
/// and proportionally longer on fewer SMs.
pub(crate) fn profile(execution_ms: f64) -> String {
    format!(
        "source: {{kind: illustrative}}\n\
         memory: {{context: 100Mi, weights: 10Mi, activations: 10Mi}}\n\
         start: {{process: 50ms, load: 50ms, warm: 20ms}}\n\
         bandwidth: 0.1\n\
         execution_ms:\n  sms: [66]\n  1: [{execution_ms}]\n  16: [{execution_ms}]\n"
    )
}

/// Starts a server with one `echo` model that takes `execution_ms` per batch, and waits until it is ready.
pub(crate) async fn one_echo(execution_ms: f64, more: &str) -> Result<ServerUnderTest, HarnessError> {
    one_echo_under("static", execution_ms, more).await
}

/// Starts a server like [`one_echo`], with a policy that decides the model's share.
pub(crate) async fn one_echo_under(
    policy: &str,
    execution_ms: f64,
    more: &str,
) -> Result<ServerUnderTest, HarnessError> {
    let home = home_under(policy, &[echo("echo", &format!("profile: profile.yaml, {more}"))])?;
    home.write("profile.yaml", profile(execution_ms))?;
    ServerUnderTest::start_ready(home).await
}

/// Joins the lines of a command's output, which is wrapped at 80 columns.
pub(crate) fn unwrapped(output: &str) -> String {
    output.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Makes the n-th echo request and its expected answer.
pub(crate) fn echo_case(n: u16) -> RequestCase {
    let tensor = |name| ClientTensor::fp32(name, &[1, 16], &[f32::from(n); 16]);
    RequestCase { inputs: vec![tensor("x")], outputs: vec![tensor("y")], truth: None }
}

/// Sends one request and checks its answer.
pub(crate) async fn ask(
    mut client: InferGrpcClient,
    model: &str,
    case: &RequestCase,
    tolerance: f32,
) -> RequestOutcome {
    match client.infer(model, &case.inputs).await {
        Ok(answer) => compare(&case.outputs, &answer, tolerance)
            .map_or_else(RequestOutcome::Wrong, |()| RequestOutcome::Right),
        Err(status) => RequestOutcome::Failed(format!("{:?}: {}", status.code(), status.message())),
    }
}

/// Sends all requests at the same time. Returns the outcomes in the order in which the requests
/// ended.
pub(crate) async fn ask_all(
    client: &InferGrpcClient,
    model: &'static str,
    cases: Vec<RequestCase>,
    tolerance: f32,
) -> Vec<RequestOutcome> {
    let mut asking = JoinSet::new();
    for case in cases {
        let client = client.clone();
        asking.spawn(async move { ask(client, model, &case, tolerance).await });
    }
    asking.join_all().await
}

/// Starts an open-loop load of echo requests on a model. The load ends after `span`.
pub(crate) fn load(
    server: &ServerUnderTest,
    model: &'static str,
    rate: f64,
    span: Duration,
) -> JoinHandle<LoadTally> {
    planned_load(server, model, LoadPlan { rate, span, arrivals: ArrivalPattern::Poisson, seed: 1 })
}

/// Starts an open-loop load of echo requests on a model.
pub(crate) fn planned_load(
    server: &ServerUnderTest,
    model: &'static str,
    plan: LoadPlan,
) -> JoinHandle<LoadTally> {
    let client = server.client();
    tokio::spawn(async move {
        let tally: Arc<Mutex<LoadTally>> = Arc::default();
        load::run(&plan, &tally, |n| {
            let client = client.clone();
            async move { ask(client, model, &echo_case(u16::try_from(n % 60_000).unwrap_or(0)), 0.0).await }
        })
        .await;
        let tally = tally.lock();
        tally.clone()
    })
}

/// Panics unless every request was answered correctly.
pub(crate) fn assert_nothing_lost(tally: &LoadTally) {
    assert!(tally.offered > 0, "no load");
    assert_eq!(
        (tally.right, tally.wrong, tally.failures()),
        (tally.offered, 0, 0),
        "failed: {:?}; wrong: {:?}",
        tally.failed,
        tally.examples
    );
}
