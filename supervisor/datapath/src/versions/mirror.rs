//! The copies of requests that a new version gets. Their answers are compared with those of the released
//! version, and thrown away. A copy starts when the original has been answered, so it cannot delay it.

use std::sync::Arc;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use shadowslice_shared::compare::{AnswerComparison, ComparedTensor};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use super::FractionCounter;
use crate::pipeline::{Metadata, RequestArrival, RequestInput, RequestOptions, RequestOutput};
use crate::router::Route;

/// The size of outputs in bytes from which another thread compares them. Below it, the comparison takes
/// less than 0.1 ms.
const LONG_COMPARISON_BYTES: usize = 64 * 1024;

/// The settings of a mirror.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MirrorRules {
    /// The fraction of requests that are copied, from 0 to 1.
    pub fraction: f64,
    /// The maximum number of copies at the same time, with the memory of their requests. Further copies
    /// are skipped.
    pub max_copies: usize,
    pub compare: AnswerComparison,
}

/// The copies of requests to a new version.
#[derive(Debug)]
pub struct Mirror {
    candidate: Route,
    rules: MirrorRules,
    requests: FractionCounter,
    places: Arc<Semaphore>,
    ledger: Arc<MirrorLedger>,
}

/// The counts of copies during a rollout.
#[derive(Debug, Default)]
pub struct MirrorLedger(Mutex<MirrorCounts>);

/// The numbers of copies and of their answers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MirrorCounts {
    /// The requests that were copied to the new version.
    pub copied: u64,
    /// The requests that were selected, but not copied, because too many copies were in progress.
    pub skipped: u64,
    /// The answers that were compared.
    pub compared: u64,
    /// The answers that differ.
    pub differences: u64,
    pub first_difference: Option<AnswerDifference>,
}

/// An answer that differs between the two versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnswerDifference {
    /// The SHA-256 of the request's inputs in hexadecimal digits: for each input the data, in the order of
    /// the model's metadata.
    pub inputs_sha256: String,
    pub why: String,
}

/// A request that may be copied when the original has been answered.
#[derive(Debug)]
pub(crate) struct MirrorCandidate {
    mirror: Arc<Mirror>,
    inputs: Vec<RequestInput>,
}

impl MirrorLedger {
    pub fn counts(&self) -> MirrorCounts {
        self.0.lock().clone()
    }
}

impl Mirror {
    /// Creates a mirror that sends copies to `candidate`.
    pub fn new(candidate: Route, rules: MirrorRules, ledger: Arc<MirrorLedger>) -> Self {
        let places = Arc::new(Semaphore::new(rules.max_copies));
        Self { candidate, rules, requests: FractionCounter::default(), places, ledger }
    }

    /// Returns whether another mirror sends copies to the same workers by the same rules.
    pub fn is_like(&self, other: &Self) -> bool {
        std::ptr::eq(self.candidate.pipeline(), other.candidate.pipeline()) && self.rules == other.rules
    }

    /// Counts a request, and selects it if it belongs to the fraction.
    pub(crate) fn select(self: &Arc<Self>, inputs: &[RequestInput]) -> Option<MirrorCandidate> {
        let selected = self.requests.selects(self.rules.fraction);
        selected.then(|| MirrorCandidate { mirror: Arc::clone(self), inputs: inputs.to_vec() })
    }
}

impl MirrorCandidate {
    /// Sends the request to the new version in a task of its own, and compares the answer with that of
    /// the original.
    pub(crate) fn send(self, original: &[RequestOutput]) {
        let Self { mirror, inputs } = self;
        let Ok(place) = Arc::clone(&mirror.places).try_acquire_owned() else {
            mirror.ledger.0.lock().skipped += 1;
            return;
        };
        mirror.ledger.0.lock().copied += 1;
        let original = original.to_vec();
        tokio::spawn(async move {
            let _place = place;
            mirror.run(inputs, original).await;
        });
    }
}

impl Mirror {
    async fn run(&self, inputs: Vec<RequestInput>, original: Vec<RequestOutput>) {
        let (options, arrival) = (RequestOptions::default(), RequestArrival::now(None));
        // The candidate's own figures count failures.
        let Ok(answers) = self.candidate.infer(inputs.clone(), options, arrival).await else { return };
        let (copy, mut delivery) = answers.into_single();
        delivery.mark_written();
        let (Some(metadata), true) =
            (self.candidate.pipeline().metadata(), self.rules.compare != AnswerComparison::Off)
        else {
            return;
        };
        let compare = self.rules.compare;
        let difference =
            if original.iter().map(|output| output.data.len()).sum::<usize>() < LONG_COMPARISON_BYTES {
                difference(compare, &metadata, &original, &copy)
            } else {
                let compared = spawn_blocking(move || difference(compare, &metadata, &original, &copy)).await;
                let Ok(difference) = compared else { return };
                difference
            };
        self.ledger.record(difference, &inputs);
    }
}

impl MirrorLedger {
    fn record(&self, difference: Option<String>, inputs: &[RequestInput]) {
        let mut counts = self.0.lock();
        counts.compared += 1;
        if let Some(why) = difference {
            counts.differences += 1;
            let first = || AnswerDifference { inputs_sha256: digest(inputs), why };
            counts.first_difference.get_or_insert_with(first);
        }
    }
}

/// Returns the way in which an answer differs from the original.
fn difference(
    compare: AnswerComparison,
    metadata: &Metadata,
    original: &[RequestOutput],
    copy: &[RequestOutput],
) -> Option<String> {
    if original.len() != copy.len() {
        return Some(format!("the answer has {} outputs instead of {}", copy.len(), original.len()));
    }
    let view = |output: &RequestOutput| (output.shape.clone(), output.data.clone());
    metadata.outputs.iter().zip(original).zip(copy).find_map(|((spec, original), copy)| {
        let (want, got) = (view(original), view(copy));
        let [want, got] = [&want, &got].map(|(shape, bytes)| ComparedTensor { shape, bytes });
        let wrong = compare.check(spec.datatype, want, got).err()?;
        Some(format!("output `{}` {wrong}", spec.name))
    })
}

fn digest(inputs: &[RequestInput]) -> String {
    let mut hasher = Sha256::new();
    inputs.iter().flat_map(|input| input.data.iter()).for_each(|piece| hasher.update(piece));
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use shadowslice_shared::tensor::{Datatype, TensorSpec};

    use super::*;

    fn metadata() -> Metadata {
        let spec = |name: &str| TensorSpec { name: name.into(), datatype: Datatype::Fp32, shape: vec![-1] };
        Metadata {
            name: "m".into(),
            version: "2".into(),
            platform: "onnxruntime_onnx",
            max_batch: 0,
            streams: None,
            inputs: vec![spec("x")],
            optional: Vec::new(),
            outputs: vec![spec("y"), spec("z")],
        }
    }

    fn output(values: &[f32]) -> RequestOutput {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        RequestOutput { shape: vec![values.len() as i64], data: Bytes::from(data) }
    }

    #[test]
    fn a_difference_names_its_output_and_the_first_one_is_kept_with_its_inputs() {
        let original = [output(&[1.0, 2.0]), output(&[3.0])];
        let compare =
            |copy: &[RequestOutput]| difference(AnswerComparison::Tolerance, &metadata(), &original, copy);
        assert_eq!(compare(&original), None);
        let wrong = compare(&[output(&[1.0, 2.0]), output(&[4.0])]).unwrap();
        assert!(wrong.contains("`z` is 4 at element 0 instead of 3"), "{wrong}");
        assert!(compare(&original[..1]).unwrap().contains("1 outputs instead of 2"));
        let ledger = MirrorLedger::default();
        let inputs = |data: &[u8]| [RequestInput { shape: vec![3], data: data.to_vec().into() }];
        ledger.record(None, &inputs(b"ok"));
        ledger.record(Some("first".to_owned()), &inputs(b"abc"));
        ledger.record(Some("second".to_owned()), &inputs(b"abd"));
        let counts = ledger.counts();
        assert_eq!((counts.compared, counts.differences), (3, 2));
        let first = counts.first_difference.unwrap();
        assert_eq!(first.why, "first");
        assert!(first.inputs_sha256.starts_with("ba7816bf"), "the digest of abc: {}", first.inputs_sha256);
    }
}
