//! The proof that a worker's answers are correct. At every batch size, the answers must agree with
//! the model's reference answers on the same inputs, which every worker can reproduce. The batch
//! size determines which kernels run, and therefore which faults are possible, so the worker tries
//! every size.

mod extremes;
mod floats;
mod inputs;
mod made_up;
mod reference;
mod rows;
mod streams;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use shadowslice_shared::batch::{Batch, BatchOutput, Extent, IN_FLIGHT, RunFailure};
use shadowslice_shared::boot::{BootRefusal, BootReply, InputValues, WarmTime, WarmUp};
use shadowslice_shared::compare::compare;
use shadowslice_shared::groups::Groups;
use shadowslice_shared::slab::ReadableSlab;
use shadowslice_shared::tensor::TensorSpec;

use crate::answer::AnswerSlots;
use crate::boot::BootChannel;
use crate::clock::{HungUp, now_ns, still_wanted};
use crate::device::cuda::exclusion::Exclusion;
use crate::engine::{EngineAnswer, ModelEngine, ProofBasis, Signature, TensorData};
use crate::inputs::Inputs;
use crate::log_line;
use inputs::ProofInputs;
use made_up::Fill;
pub use made_up::{Draw, InputSettings};
use reference::{Reference, SizeAnswers};
use shadowslice_shared::errors::chain;

/// The lengths to try for axes whose length neither the model nor the operator fixes. Deep networks
/// with convolutions and pooling need lengths of a few hundred.
const OPEN_AXES: [i64; 4] = [1, 8, 64, 256];

/// The state of a proof. The model runs in the same way as when the worker serves.
#[derive(Debug)]
pub struct Prover<'a> {
    pub engine: &'a mut ModelEngine,
    pub signature: &'a Signature,
    pub slots: &'a AnswerSlots,
    /// The memory of the response slots, from which the prover reads the answers.
    pub answers: &'a ReadableSlab,
    pub warm_up: &'a WarmUp,
    /// A socket that the supervisor closes when it no longer waits for the proof.
    pub socket: BorrowedFd<'a>,
    /// The channel on which the worker reports progress to the supervisor.
    pub channel: &'a BootChannel,
    /// True if the model executes on a real GPU. In that case, the batches of each slot use
    /// separate memory, so the proof tries every slot.
    pub on_gpu: bool,
    /// The inputs that have been made up so far. They are kept, because making them takes longer
    /// than running the model on them.
    pub inputs: BTreeMap<(u32, Draw), Rc<ProofInputs>>,
    /// The model's file, if it is an ONNX model.
    pub file: Option<&'a Path>,
    /// The settings of the next batch. Later workers take them from the reference answers.
    pub settings: InputSettings,
    /// The inputs that the model itself supplies, which replace made-up inputs. Later workers take
    /// these inputs from the reference answers.
    pub given: Option<Vec<TensorData>>,
}

/// A batch of the proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProofBatch {
    size: u32,
    draw: Draw,
    slot: u8,
    groups: Groups,
}

/// The reasons why a proof does not succeed.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    #[error(transparent)]
    Refused(#[from] BootRefusal),
    #[error("the supervisor has closed its socket")]
    HungUp,
}

impl From<HungUp> for ProofError {
    fn from(_: HungUp) -> Self {
        Self::HungUp
    }
}

/// Writes the reference answers, and returns the time of each batch size. Some models cannot run on
/// some made-up inputs, for example because the model divides by them. In that case, tries other
/// inputs.
pub fn write_reference(prover: &mut Prover<'_>, file: &File) -> Result<Vec<WarmTime>, BootRefusal> {
    let basis = prover.engine.basis()?;
    prover.given.clone_from(&basis.inputs);
    let mut first = None;
    let mut found = first_that_runs(prover, &basis, prover.made_up_attempts(&OPEN_AXES[..1]), &mut first);
    if found.is_none() && prover.may_need_others(first.as_ref()) {
        let further = [prover.made_up_attempts(prover.further_lengths()), prover.attempts_of_file()].concat();
        found = first_that_runs(prover, &basis, further, &mut first);
    }
    if let Some((reference, times)) = found {
        if times.iter().any(|time| time.rows > 1 && !prover.is_useless(time.took)) {
            prover.check_rows(&reference.basis, &times)?;
        }
        reference.write(file).map_err(|fault| BootRefusal::Setup(chain(&fault)))?;
        return Ok(times);
    }
    Err(first.unwrap_or_else(|| BootRefusal::Setup("no made-up values to try".to_owned())))
}

fn with_advice(prover: &Prover<'_>, refusal: BootRefusal) -> BootRefusal {
    match refusal {
        BootRefusal::WarmUp { size, why } if prover.given.is_none() => {
            let advice = prover.engine.advice_on_failure().map_or_else(|| prover.advice(), str::to_owned);
            BootRefusal::WarmUp { size, why: format!("{why}{advice}") }
        }
        refusal => refusal,
    }
}

fn first_that_runs(
    prover: &mut Prover<'_>,
    basis: &ProofBasis,
    attempts: Vec<InputSettings>,
    first: &mut Option<BootRefusal>,
) -> Option<(Reference, Vec<WarmTime>)> {
    attempts.into_iter().find_map(|settings| {
        prover.settings = settings;
        match reference_of(prover, basis) {
            Ok(found) => Some(found),
            Err(refusal) => {
                // The advice must be read now, because the engine keeps only its last failure.
                first.get_or_insert_with(|| with_advice(prover, refusal));
                None
            }
        }
    })
}

fn reference_of(
    prover: &mut Prover<'_>,
    basis: &ProofBasis,
) -> Result<(Reference, Vec<WarmTime>), BootRefusal> {
    let mut basis = basis.clone();
    let mut sizes = Vec::with_capacity(prover.warm_up.sizes.len());
    let mut times = Vec::new();
    for &size in &prover.warm_up.sizes {
        prover.begin(size);
        let run = ProofBatch { size, draw: Draw::Proof, slot: 0, groups: Groups::WHOLE };
        let (answers, mut took) = prover.run(run)?;
        if answers.is_empty() {
            let why = "the stream ended without an answer, so it proves nothing".to_owned();
            return Err(BootRefusal::WarmUp { size, why });
        }
        if sizes.is_empty() && basis.deterministic && prover.signature.streams.is_none() {
            let (again, _) = prover.run(run)?;
            if let Err(BootRefusal::Proof { why, .. }) = compare_answers(prover, &answers, &again, size) {
                basis.deterministic = false;
                log_line(&format!(
                    "the model gives different answers to the same input ({why}), so its answers count as \
                     random and are not compared with the reference"
                ));
            }
        }
        if let Some(SizeAnswers { answers: alone, .. }) = sizes.first()
            && prover.signature.streams.is_some()
            && basis.deterministic
        {
            prover.check_independence(alone, &answers, size)?;
        }
        sizes.push(SizeAnswers { size, answers });
        if prover.is_useless(took) {
            // The first run of a size may take longer than later runs, so the minimum of two runs
            // counts.
            took = took.min(prover.run(run)?.1);
        }
        times.push(WarmTime { rows: size, took, error: 0.0 });
        if prover.is_useless(took) {
            break;
        }
    }
    Ok((Reference { basis, settings: prover.settings.clone(), sizes }, times))
}

/// Runs every batch size in every slot. This does all one-time work of a process: it allocates
/// memory, loads and chooses kernels, and records executions. The inputs have the same fill as
/// those of the reference answers, because the model may not run on another fill. Their values
/// differ from those of the reference answers.
pub fn warm(prover: &mut Prover<'_>, file: &File) -> Result<(), ProofError> {
    prover.read(file)?;
    // The largest size comes first, because all smaller sizes then fit into the memory that it
    // allocates.
    for &size in prover.warm_up.sizes.iter().rev() {
        prover.begin(size);
        for slot in (0..prover.slots()).rev() {
            prover.still_wanted()?;
            prover.run(ProofBatch { size, draw: Draw::WarmUp, slot, groups: Groups::WHOLE })?;
        }
    }
    // The other models of a shared worker wait for the recordings only once.
    let _exclusion = Exclusion::of_recording();
    for &size in prover.warm_up.sizes.iter().rev() {
        prover.still_wanted()?;
        let failed = |failure: RunFailure| BootRefusal::WarmUp { size, why: failure.to_string() };
        prover.engine.record(size).map_err(failed)?;
    }
    Ok(())
}

/// Proves the answers on these groups. Returns the time of each batch size. Stops at the first size
/// that does not fit on the groups.
pub fn prove(prover: &mut Prover<'_>, file: &File, groups: Groups) -> Result<Vec<WarmTime>, ProofError> {
    let Reference { basis, sizes, .. } = prover.read(file)?;
    let mut times = Vec::with_capacity(prover.warm_up.sizes.len());
    for &size in &prover.warm_up.sizes {
        if !prover.engine.fits(groups, size) {
            break;
        }
        if groups == Groups::WHOLE {
            prover.begin(size);
        }
        let known = sizes.iter().find(|answers| answers.size == size).map(|answers| &answers.answers);
        let (streams, outputs) = (prover.signature.streams.is_some(), prover.signature.outputs.len());
        let expected = known.filter(|expected| streams || expected.len() == outputs);
        let expected = expected.ok_or_else(|| {
            BootRefusal::Setup(format!("the reference answers do not fit this model at batch size {size}"))
        })?;
        let mut time = WarmTime { rows: size, took: Duration::MAX, error: 0.0 };
        for slot in (0..prover.slots()).rev() {
            prover.still_wanted()?;
            let (answers, took) = prover.run(ProofBatch { size, draw: Draw::Proof, slot, groups })?;
            time.took = time.took.min(took);
            if basis.deterministic {
                time.error = time.error.max(compare_answers(prover, expected, &answers, size)?);
            }
        }
        times.push(time);
    }
    Ok(times)
}

/// Returns the difference between the answers and the expected answers. Returns an error if the
/// difference is too large.
fn compare_answers(
    prover: &Prover<'_>,
    expected: &[TensorData],
    answers: &[TensorData],
    size: u32,
) -> Result<f64, BootRefusal> {
    if expected.len() != answers.len() {
        let per = prover.signature.outputs.len().max(1);
        let (got, want) = (answers.len() / per, expected.len() / per);
        let why = format!("the stream ended after {got} answers instead of {want}");
        return Err(BootRefusal::Proof { size, why });
    }
    let mut farthest = 0.0_f64;
    let specs = prover.signature.outputs.iter().cycle();
    for ((spec, expected), answer) in specs.zip(expected).zip(answers) {
        let off = compare(spec.datatype, expected.view(), answer.view(), 1.0).map_err(|wrong| {
            let why = format!("output `{}` {wrong}{}", spec.name, prover.engine.advice_on_difference());
            BootRefusal::Proof { size, why }
        })?;
        farthest = farthest.max(off);
    }
    Ok(farthest)
}

impl Prover<'_> {
    /// Tells the supervisor which batch size the worker runs next.
    fn begin(&self, size: u32) {
        // A failure is ignored here, because the next check of the socket finds the reason.
        self.channel.send(BootReply::Warming { rows: size }).ok();
    }

    /// Returns true if every value is safe to try. On the CPU, a model only returns an error if it
    /// does not accept a value. On a GPU, an index outside its table may crash the worker.
    fn survives_any_value(&self) -> bool {
        !self.on_gpu
    }

    fn is_useless(&self, took: Duration) -> bool {
        self.warm_up.useful.is_some_and(|useful| took > useful)
    }

    /// Returns an error if the supervisor no longer waits for the proof. Call this between two
    /// runs, because a run on a GPU delays other workers and cannot be interrupted.
    fn still_wanted(&self) -> Result<(), HungUp> {
        still_wanted(self.socket)
    }

    /// Returns the number of slots to try. On a GPU, each slot has its own memory and recordings,
    /// so each slot needs a proof. On the CPU, the slot only determines where the answer is
    /// written, so one slot is enough.
    fn slots(&self) -> u8 {
        if self.on_gpu { IN_FLIGHT as u8 } else { 1 }
    }

    fn read(&mut self, file: &File) -> Result<Reference, BootRefusal> {
        let read = Reference::read(file).map_err(|fault| BootRefusal::Setup(chain(&fault)))?;
        self.given.clone_from(&read.basis.inputs);
        self.settings.clone_from(&read.settings);
        Ok(read)
    }

    /// Returns true if the model may run on other shapes and values. If a batch of the smallest
    /// size has run, larger batches fail for another reason, such as memory.
    fn may_need_others(&self, refusal: Option<&BootRefusal>) -> bool {
        let smallest = self.warm_up.sizes.first();
        let at_smallest = matches!(refusal, Some(BootRefusal::WarmUp { size, .. }) if Some(size) == smallest);
        at_smallest && self.given.is_none()
    }

    fn made_up_attempts(&self, lengths: &[i64]) -> Vec<InputSettings> {
        let fills = if self.given.is_some() { &Fill::ALL[..1] } else { &Fill::ALL[..] };
        let values = &self.settings.values;
        let of = |&open_axis: &i64| {
            fills.iter().map(move |&fill| InputSettings { fill, open_axis, values: values.clone() })
        };
        lengths.iter().flat_map(of).collect()
    }

    fn attempts_of_file(&self) -> Vec<InputSettings> {
        let of = |values: Vec<Option<InputValues>>| {
            let with = move |&open_axis: &i64| InputSettings {
                fill: Fill::ALL[0],
                open_axis,
                values: values.clone(),
            };
            OPEN_AXES[..1].iter().chain(self.further_lengths()).map(with)
        };
        self.values_of_file().into_iter().flat_map(of).collect()
    }

    /// Returns the remaining lengths to try for free axes. Returns no lengths if no axis is free.
    fn further_lengths(&self) -> &'static [i64] {
        let has_open = self.warm_up.shapes.iter().flatten().any(|&axis| axis < 0);
        if has_open { &OPEN_AXES[1..] } else { &[] }
    }

    /// Returns advice for the operator: the `warmup` line to add to the configuration, or to
    /// correct the values already there.
    fn advice(&self) -> String {
        if !self.warm_up.values.is_empty() && self.warm_up.values.iter().all(Option::is_some) {
            return "; the values come from `warmup`; set values there that the model accepts".to_owned();
        }
        let input = |(spec, shape): (&TensorSpec, &Vec<i64>)| match shape.iter().any(|&axis| axis < 0) {
            true => format!("{}: {{shape: {shape:?}, values: VALUE}}", spec.name).replace("-1", "N"),
            false => format!("{}: VALUE", spec.name),
        };
        let inputs: Vec<String> = self.signature.inputs.iter().zip(&self.warm_up.shapes).map(input).collect();
        let tried = OPEN_AXES.map(|length| length.to_string()).join(", ");
        let lengths = match self.warm_up.shapes.iter().flatten().any(|&axis| axis < 0) {
            true => format!(", with free axes of length {tried}"),
            false => String::new(),
        };
        format!(
            "; the values were made up{lengths}; if the model needs others, set \
             `warmup: {{{}}}` (VALUE is a number, text, or a list of them), or as a file of arrays: \
             `warmup: PATH` (.npz, or a request as .json)",
            inputs.join(", ")
        )
    }

    fn run(&mut self, run: ProofBatch) -> Result<(Vec<TensorData>, Duration), BootRefusal> {
        let made_up = self.made_up(run)?;
        self.run_on(run, &made_up)
    }

    fn run_on(
        &mut self,
        run: ProofBatch,
        made_up: &ProofInputs,
    ) -> Result<(Vec<TensorData>, Duration), BootRefusal> {
        if let Some(streams) = self.signature.streams {
            return self.run_streams(run, streams, made_up);
        }
        let ProofBatch { slot, groups, .. } = run;
        let (shapes, requests) = (made_up.shapes.clone(), made_up.requests.clone());
        let batch = Batch { id: 0, slot, sent_ns: 0, groups, shapes, requests, optional: Vec::new() };
        let failed = |failure| run_failed(run, failure);
        let inputs = Inputs::check(&batch, &made_up.slab, self.signature.all_inputs(), self.warm_up.batched)
            .map_err(failed)?;
        let begun_ns = now_ns();
        let EngineAnswer { outputs, .. } =
            self.engine.run(&inputs, &mut self.slots.slot(batch.slot)).map_err(failed)?;
        let waited = Duration::from_nanos(now_ns().saturating_sub(begun_ns));
        let took = self.engine.execution_time(run.slot).unwrap_or(waited);
        Ok((self.written(outputs), took))
    }

    fn written(&self, outputs: Vec<BatchOutput>) -> Vec<TensorData> {
        let read = |output: BatchOutput| {
            let part = |part: &Extent| {
                self.answers.bytes(part.offset, part.len).expect("the engine has written this part")
            };
            let parts = output.parts.iter().map(part).collect::<Vec<_>>();
            TensorData { shape: output.shape, bytes: parts.concat() }
        };
        outputs.into_iter().map(read).collect()
    }

    fn made_up(&mut self, run: ProofBatch) -> Result<Rc<ProofInputs>, BootRefusal> {
        // All streams of a step get the same inputs.
        let run = if self.signature.streams.is_some() { ProofBatch { size: 1, ..run } } else { run };
        let key = (run.size, run.draw);
        if let Some(known) = self.inputs.get(&key).filter(|known| known.settings == self.settings) {
            return Ok(Rc::clone(known));
        }
        let made_up = Rc::new(self.make_up(run)?);
        self.inputs.insert(key, Rc::clone(&made_up));
        Ok(made_up)
    }
}

fn run_failed(run: ProofBatch, failure: RunFailure) -> BootRefusal {
    match failure {
        RunFailure::NotBatched(why) => BootRefusal::RowsDepend(why),
        failure => BootRefusal::WarmUp { size: run.size, why: failure.to_string() },
    }
}
