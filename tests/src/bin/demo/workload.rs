//! The requests to each model, and their expected answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_tests::cases::{self, CasesError, ClientTensor, RequestCase, compare};
use shadowslice_tests::client::InferGrpcClient;
use shadowslice_tests::load::{self, ArrivalPattern, LoadPlan, LoadTally, RequestOutcome};
use shadowslice_tests::server::ServerUnderTest;

const CONNECTIONS: usize = 4;

/// A model under load.
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    /// The shares that the demo sets in rotation, in percent.
    pub(crate) shares: &'static [u32],
    /// The tally of the requests so far.
    pub(crate) tally: Arc<Mutex<LoadTally>>,
    /// The number of correctly predicted labels, if the cases have true labels.
    pub(crate) truths: Option<Arc<AtomicU64>>,
    rate: f64,
    cases: Arc<Vec<RequestCase>>,
    tolerance: f32,
}

/// Returns the workloads of all models of `configs/demo.yaml`.
pub(crate) fn all() -> Result<Vec<Workload>, CasesError> {
    let folder = cases::models_folder();
    let digits = cases::load(&folder.join("digits.json"))?;
    let encoder = cases::load(&folder.join("encoder.json"))?;
    Ok(vec![
        Workload::new("digits", 80.0, &[12, 30, 18, 25], digits, 1e-4),
        Workload::new("encoder", 40.0, &[45, 22, 40, 30], encoder, 1e-3),
        Workload::new("first", 100.0, &[10, 25, 14, 20], standardised(), 1e-4),
    ])
}

/// Makes the cases of the model `first`. Each input is a row of sixteen numbers, and the outputs
/// are the standard scores and the mean of these numbers.
fn standardised() -> Vec<RequestCase> {
    let case = |n: u16| {
        let row: Vec<f32> = (0..16u8).map(|i| f32::from(n * u16::from(i) % 17)).collect();
        let mean = row.iter().sum::<f32>() / 16.0;
        let spread = (row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 16.0).sqrt().max(1e-6);
        let scores: Vec<f32> = row.iter().map(|x| (x - mean) / spread).collect();
        let outputs =
            vec![ClientTensor::fp32("scores", &[1, 16], &scores), ClientTensor::fp32("mean", &[1], &[mean])];
        RequestCase { inputs: vec![ClientTensor::fp32("x", &[1, 16], &row)], outputs, truth: None }
    };
    (0..1000).map(case).collect()
}

impl Workload {
    fn new(
        name: &'static str,
        rate: f64,
        shares: &'static [u32],
        cases: Vec<RequestCase>,
        tolerance: f32,
    ) -> Self {
        let truths = cases.iter().any(|case| case.truth.is_some()).then(Arc::default);
        Self { name, shares, tally: Arc::default(), truths, rate, cases: Arc::new(cases), tolerance }
    }

    /// Returns a future that sends the load to this model.
    pub(crate) fn load(
        &self,
        server: &ServerUnderTest,
        span: Duration,
        seed: u64,
    ) -> impl Future<Output = ()> + Send + 'static {
        let plan = LoadPlan { rate: self.rate, span, arrivals: ArrivalPattern::Poisson, seed };
        let clients: Vec<InferGrpcClient> = (0..CONNECTIONS).map(|_| server.client()).collect();
        let (name, tolerance, truths) = (self.name, self.tolerance, self.truths.clone());
        let (tally, cases) = (Arc::clone(&self.tally), Arc::clone(&self.cases));
        async move {
            let request = |n: usize| {
                let mut client = clients[n % clients.len()].clone();
                let (cases, truths) = (Arc::clone(&cases), truths.clone());
                async move {
                    let case = &cases[n % cases.len()];
                    match client.infer(name, &case.inputs).await {
                        Ok(answer) => check(case, &answer, tolerance, truths.as_deref()),
                        Err(status) => {
                            RequestOutcome::Failed(format!("{:?}: {}", status.code(), status.message()))
                        }
                    }
                }
            };
            load::run(&plan, &tally, request).await;
        }
    }
}

fn check(
    case: &RequestCase,
    answer: &[ClientTensor],
    tolerance: f32,
    truths: Option<&AtomicU64>,
) -> RequestOutcome {
    let label = answer.first().and_then(|output| output.data.first_chunk().copied()).map(i64::from_le_bytes);
    if let (Some(truths), true) = (truths, label == case.truth) {
        truths.fetch_add(1, Ordering::Relaxed);
    }
    match compare(&case.outputs, answer, tolerance) {
        Ok(()) => RequestOutcome::Right,
        Err(how) => RequestOutcome::Wrong(how),
    }
}
