//! The proof of a model that gives several answers to a request.
//!
//! The size of a run is its number of streams. All streams have the same inputs and advance together,
//! so each stream must give the same answers as one stream alone.

use std::time::Duration;

use shadowslice_shared::batch::{Batch, StreamLimits, StreamStep};
use shadowslice_shared::boot::BootRefusal;

use super::inputs::ProofInputs;
use super::{ProofBatch, Prover, compare_answers, run_failed};
use crate::clock::now_ns;
use crate::engine::{EngineAnswer, TensorData};
use crate::inputs::Inputs;

/// The maximum number of answers of a stream that the proof compares. More than one is needed,
/// because the first answer needs other kernels than the answers after it.
const MAX_PROVEN_ANSWERS: usize = 4;

/// The maximum number of steps for these answers. The prompt of the proof may need several steps.
const MAX_PROOF_STEPS: usize = 1024;

/// A stream of the proof.
#[derive(Debug)]
struct ProofStream {
    id: u64,
    /// The number of answers so far.
    answered: usize,
    tensors: Vec<TensorData>,
    more: bool,
}

impl ProofStream {
    fn is_next(&self) -> bool {
        self.more && self.answered < MAX_PROVEN_ANSWERS
    }
}

impl Prover<'_> {
    /// Opens the streams of a run, and advances all of them together. Returns the answers of all
    /// streams, one stream after the other. Also returns the time of one step, or of the first answer
    /// if streams take turns.
    pub(super) fn run_streams(
        &mut self,
        run: ProofBatch,
        limits: StreamLimits,
        made_up: &ProofInputs,
    ) -> Result<(Vec<TensorData>, Duration), BootRefusal> {
        let mut streams = Vec::new();
        let mut took = Duration::MAX;
        for id in 0..u64::from(run.size.max(1)) {
            let begun_ns = now_ns();
            streams.push(self.open_stream(run, id, made_up)?);
            if limits.per_step == 1 {
                took = took.min(since(begun_ns));
            }
        }
        let mut steps = 0;
        while streams.iter().any(ProofStream::is_next) {
            steps += 1;
            if steps > MAX_PROOF_STEPS {
                let why = format!("{MAX_PROOF_STEPS} steps gave fewer than {MAX_PROVEN_ANSWERS} answers");
                return Err(BootRefusal::WarmUp { size: run.size, why });
            }
            let begun_ns = now_ns();
            let is_whole = self.step_streams(run, &mut streams)?;
            if limits.per_step > 1 && is_whole {
                took = took.min(since(begun_ns));
            }
        }
        streams.iter().for_each(|stream| self.engine.close(stream.id));
        Ok((streams.into_iter().flat_map(|stream| stream.tensors).collect(), took))
    }

    fn open_stream(
        &mut self,
        run: ProofBatch,
        id: u64,
        made_up: &ProofInputs,
    ) -> Result<ProofStream, BootRefusal> {
        let ProofBatch { slot, groups, .. } = run;
        let (shapes, requests) = (made_up.shapes.clone(), made_up.requests.clone());
        let batch = Batch { id, slot, sent_ns: 0, groups, shapes, requests, optional: Vec::new() };
        let failed = |failure| run_failed(run, failure);
        let inputs = Inputs::check(&batch, &made_up.slab, self.signature.all_inputs(), self.warm_up.batched)
            .map_err(failed)?;
        let ran = self.engine.run(&inputs, &mut self.slots.slot(slot)).map_err(failed)?;
        let mut stream = ProofStream { id, answered: 0, tensors: Vec::new(), more: ran.more };
        self.add_answer(&mut stream, ran);
        Ok(stream)
    }

    /// Advances all streams that have further answers. Returns true if these are all streams.
    fn step_streams(&mut self, run: ProofBatch, streams: &mut [ProofStream]) -> Result<bool, BootRefusal> {
        let ProofBatch { slot, groups, .. } = run;
        let ids: Vec<u64> =
            streams.iter().filter(|stream| stream.is_next()).map(|stream| stream.id).collect();
        let is_whole = ids.len() == streams.len();
        let step = StreamStep { id: 0, slot, sent_ns: 0, groups, streams: ids };
        let results = self.engine.step(&step, &mut self.slots.slot(slot));
        let next = streams.iter_mut().filter(|stream| stream.is_next());
        for (stream, result) in next.zip(results) {
            let ran = result.map_err(|failure| run_failed(run, failure))?;
            stream.more = ran.more;
            self.add_answer(stream, ran);
        }
        Ok(is_whole)
    }

    fn add_answer(&self, stream: &mut ProofStream, EngineAnswer { outputs, .. }: EngineAnswer) {
        stream.answered += usize::from(!outputs.is_empty());
        stream.tensors.extend(self.written(outputs));
    }

    /// Returns an error unless each of `streams` streams that advanced together gave the answers of one
    /// stream alone.
    pub(super) fn check_independence(
        &self,
        alone: &[TensorData],
        together: &[TensorData],
        streams: u32,
    ) -> Result<(), BootRefusal> {
        let expected: Vec<TensorData> = (0..streams.max(1)).flat_map(|_| alone.iter().cloned()).collect();
        let compared = compare_answers(self, &expected, together, streams);
        compared.map(drop).map_err(|refusal| match refusal {
            BootRefusal::Proof { size, why } => BootRefusal::Proof {
                size,
                why: format!("a stream gives other answers beside {} streams: {why}", size.saturating_sub(1)),
            },
            refusal => refusal,
        })
    }
}

fn since(begun_ns: u64) -> Duration {
    Duration::from_nanos(now_ns().saturating_sub(begun_ns))
}
