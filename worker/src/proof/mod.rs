//! The proof that a worker answers rightly: at every batch size, on inputs that every worker can
//! make again, it must agree with the model's reference answers. Every size is tried because the
//! kernel that runs depends on it, and so may a kernel's faults.

mod compare;
mod extremes;
mod inputs;
mod made_up;
mod reference;
mod rows;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use shadowslice_shared::batch::{Batch, BatchOutput, Extent, IN_FLIGHT, RunFailure, StreamStep};
use shadowslice_shared::boot::{BootRefusal, BootReply, InputValues, WarmTime, WarmUp};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::slab::ReadableSlab;
use shadowslice_shared::tensor::TensorSpec;

use crate::answer::AnswerSlots;
use crate::boot::Link;
use crate::clock::{HungUp, now_ns, still_wanted};
use crate::engine::{Basis, Engine, GivenInput, Ran, Signature};
use crate::inputs::Inputs;
use crate::say;
use inputs::MadeUp;
pub use made_up::Draw;
use made_up::Fill;
use reference::{Reference, ReferenceOutput, SizeAnswers};
use shadowslice_shared::errors::chain;

/// Of a stream, so many answers are proved: those after the first run other kernels.
const PROVED_ANSWERS: usize = 4;

/// The lengths that are tried for axes that neither the model nor the operator fixes. Convolutions
/// and pooling of whole networks need some hundreds.
const OPEN_AXES: [i64; 4] = [1, 8, 64, 256];

/// A model on trial. It answers as it does in service.
#[derive(Debug)]
pub struct Trial<'a> {
    pub engine: &'a mut Engine,
    pub signature: &'a Signature,
    pub slots: &'a AnswerSlots,
    /// The memory of the slots, to read.
    pub answers: &'a ReadableSlab,
    pub warm_up: &'a WarmUp,
    /// Closes when the supervisor no longer waits for the trial; `None` if it always does.
    pub socket: Option<BorrowedFd<'a>>,
    /// Tells the supervisor how far the trial is; `None` if nobody wants to know.
    pub link: Option<&'a Link>,
    /// True if the model executes on a real GPU, where batches of each slot have their own memory, so
    /// that every slot is tried.
    pub on_gpu: bool,
    /// The inputs made up so far; to make inputs takes longer than to run them.
    pub inputs: BTreeMap<(u32, Draw), Rc<MadeUp>>,
    /// The model's file, if it is an ONNX model.
    pub file: Option<&'a Path>,
    /// Per input: the values that the operator gives, or that the reference worker found; they come
    /// with the reference answers.
    pub values: Vec<Option<InputValues>>,
    /// The length of axes that neither the model nor the operator fixes; it comes with the reference
    /// answers.
    pub open_axis: i64,
    /// The model's own, of which inputs are made instead; with the reference answers they come.
    pub given: Option<Vec<GivenInput>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    size: u32,
    fill: Fill,
    draw: Draw,
    slot: u8,
    groups: Groups,
}

#[derive(Debug, thiserror::Error)]
pub enum Unproven {
    #[error(transparent)]
    Refused(#[from] BootRefusal),
    #[error("the supervisor has hung up")]
    HungUp,
}

impl From<HungUp> for Unproven {
    fn from(_: HungUp) -> Self {
        Self::HungUp
    }
}

/// Inputs to try, besides those that the model gives.
#[derive(Debug, Clone, PartialEq)]
struct Attempt {
    fill: Fill,
    open_axis: i64,
    values: Vec<Option<InputValues>>,
}

/// Writes the reference answers, and returns how long each size took. If a model cannot run on some
/// made-up inputs, as when it divides by them, others are tried.
pub fn write_reference(trial: &mut Trial<'_>, file: &File) -> Result<Vec<WarmTime>, BootRefusal> {
    let basis = trial.engine.basis()?;
    trial.given.clone_from(&basis.inputs);
    let mut first = None;
    let mut found = first_that_runs(trial, &basis, trial.made_up_attempts(&OPEN_AXES[..1]), &mut first);
    if found.is_none() && trial.may_need_others(first.as_ref()) {
        let further = [trial.made_up_attempts(trial.further_lengths()), trial.attempts_of_file()].concat();
        found = first_that_runs(trial, &basis, further, &mut first);
    }
    if let Some((reference, times)) = found {
        if times.iter().any(|time| time.rows > 1 && !trial.is_useless(time.took)) {
            trial.check_rows(&reference.basis, reference.fill, &times)?;
        }
        reference.write(file).map_err(|fault| BootRefusal::Setup(chain(&fault)))?;
        return Ok(times);
    }
    Err(first.unwrap_or_else(|| BootRefusal::Setup("no values could be made up".to_owned())))
}

fn with_advice(trial: &Trial<'_>, refusal: BootRefusal) -> BootRefusal {
    match refusal {
        BootRefusal::WarmUp { size, why } if trial.given.is_none() => {
            let advice = trial.engine.if_made_up_fails().map_or_else(|| trial.advice(), str::to_owned);
            BootRefusal::WarmUp { size, why: format!("{why}{advice}") }
        }
        refusal => refusal,
    }
}

fn first_that_runs(
    trial: &mut Trial<'_>,
    basis: &Basis,
    attempts: Vec<Attempt>,
    first: &mut Option<BootRefusal>,
) -> Option<(Reference, Vec<WarmTime>)> {
    attempts.into_iter().find_map(|Attempt { fill, open_axis, values }| {
        (trial.open_axis, trial.values) = (open_axis, values);
        match reference_of(trial, basis, fill) {
            Ok(found) => Some(found),
            Err(refusal) => {
                // Advice is asked for now: the engine knows its last failure only.
                first.get_or_insert_with(|| with_advice(trial, refusal));
                None
            }
        }
    })
}

fn reference_of(
    trial: &mut Trial<'_>,
    basis: &Basis,
    fill: Fill,
) -> Result<(Reference, Vec<WarmTime>), BootRefusal> {
    let mut basis = basis.clone();
    let mut sizes = Vec::with_capacity(trial.warm_up.sizes.len());
    let mut times = Vec::new();
    for &size in &trial.warm_up.sizes {
        trial.begin(size);
        let run = Run { size, fill, draw: Draw::Proof, slot: 0, groups: Groups::WHOLE };
        let (answers, mut took) = trial.run(run)?;
        if answers.is_empty() {
            let why = "its stream ends without an answer, which proves nothing".to_owned();
            return Err(BootRefusal::WarmUp { size, why });
        }
        if sizes.is_empty() && basis.deterministic && trial.signature.streams == 0 {
            let (again, _) = trial.run(run)?;
            if let Err(BootRefusal::Proof { why, .. }) = off(trial, &answers, &again, size) {
                basis.deterministic = false;
                say(&format!(
                    "the model answers the same input differently ({why}): its answers are taken for random \
                     and are not compared with the reference"
                ));
            }
        }
        sizes.push(SizeAnswers { size, answers });
        if trial.is_useless(took) {
            // A first run may take longer.
            took = took.min(trial.run(run)?.1);
        }
        times.push(WarmTime { rows: size, took, error: 0.0 });
        if trial.is_useless(took) {
            break;
        }
    }
    let (open_axis, values) = (trial.open_axis, trial.values.clone());
    Ok((Reference { basis, fill, open_axis, values, sizes }, times))
}

/// Runs every size in every slot, so that whatever happens only once in a process has happened:
/// memory taken, kernels loaded and chosen, executions recorded. The inputs are of the reference
/// answers' kind, because the model may not run on another, but have other values. Without
/// reference answers the first kind is used.
pub fn warm(trial: &mut Trial<'_>, file: Option<&File>) -> Result<(), Unproven> {
    let fill = match file {
        Some(file) => trial.read(file)?.fill,
        None => Fill::ALL[0],
    };
    // The largest first: the others fit into the memory that it took.
    for &size in trial.warm_up.sizes.iter().rev() {
        trial.begin(size);
        for slot in (0..trial.slots()).rev() {
            trial.still_wanted()?;
            trial.run(Run { size, fill, draw: Draw::WarmUp, slot, groups: Groups::WHOLE })?;
        }
    }
    for &size in trial.warm_up.sizes.iter().rev() {
        trial.still_wanted()?;
        let failed = |failure: RunFailure| BootRefusal::WarmUp { size, why: failure.to_string() };
        trial.engine.record(size).map_err(failed)?;
    }
    Ok(())
}

/// Returns how long each size took, up to the first one that does not fit on the groups.
pub fn prove(trial: &mut Trial<'_>, file: &File, groups: Groups) -> Result<Vec<WarmTime>, Unproven> {
    let Reference { basis, fill, sizes, .. } = trial.read(file)?;
    let mut times = Vec::with_capacity(trial.warm_up.sizes.len());
    for &size in &trial.warm_up.sizes {
        if !trial.engine.fits(groups, size) {
            break;
        }
        if groups == Groups::WHOLE {
            trial.begin(size);
        }
        let known = sizes.iter().find(|answers| answers.size == size).map(|answers| &answers.answers);
        let (streams, outputs) = (trial.signature.streams > 0, trial.signature.outputs.len());
        let expected = known.filter(|expected| streams || expected.len() == outputs);
        let expected = expected.ok_or_else(|| {
            BootRefusal::Setup(format!("the reference answers are not this model's at batch size {size}"))
        })?;
        let mut time = WarmTime { rows: size, took: Duration::MAX, error: 0.0 };
        for slot in (0..trial.slots()).rev() {
            trial.still_wanted()?;
            let (answers, took) = trial.run(Run { size, fill, draw: Draw::Proof, slot, groups })?;
            time.took = time.took.min(took);
            if basis.deterministic {
                time.error = time.error.max(off(trial, expected, &answers, size)?);
            }
        }
        times.push(time);
    }
    Ok(times)
}

/// Returns how far answers lie from the reference; an error if too far.
fn off(
    trial: &Trial<'_>,
    expected: &[ReferenceOutput],
    answers: &[ReferenceOutput],
    size: u32,
) -> Result<f64, BootRefusal> {
    if expected.len() != answers.len() {
        let per = trial.signature.outputs.len().max(1);
        let (got, want) = (answers.len() / per, expected.len() / per);
        let why = format!("the stream ends after {got} answers instead of {want}");
        return Err(BootRefusal::Proof { size, why });
    }
    let mut farthest = 0.0_f64;
    let specs = trial.signature.outputs.iter().cycle();
    for ((spec, expected), answer) in specs.zip(expected).zip(answers) {
        let off = compare::compare(spec.datatype, expected, answer, 1.0).map_err(|wrong| {
            let why = format!("output `{}` {wrong}{}", spec.name, trial.engine.if_it_differs());
            BootRefusal::Proof { size, why }
        })?;
        farthest = farthest.max(off);
    }
    Ok(farthest)
}

impl Trial<'_> {
    /// Tells the supervisor which size runs. If that fails, the next look at the socket says why.
    fn begin(&self, size: u32) {
        if let Some(link) = self.link {
            let _hung_up = link.say(BootReply::Warming { rows: size });
        }
    }

    /// Returns whether a value that the model refuses is an error and no more. On a GPU an index beyond
    /// its table may end the worker.
    fn survives_any_value(&self) -> bool {
        !self.on_gpu
    }

    fn is_useless(&self, took: Duration) -> bool {
        self.warm_up.useful.is_some_and(|useful| took > useful)
    }

    /// Asked between two sizes: a run on a GPU keeps other workers waiting, and is not interrupted.
    fn still_wanted(&self) -> Result<(), HungUp> {
        self.socket.map_or(Ok(()), still_wanted)
    }

    /// Returns how many slots are tried.
    fn slots(&self) -> u8 {
        if self.on_gpu { IN_FLIGHT as u8 } else { 1 }
    }

    fn read(&mut self, file: &File) -> Result<Reference, BootRefusal> {
        let read = Reference::read(file).map_err(|fault| BootRefusal::Setup(chain(&fault)))?;
        self.given.clone_from(&read.basis.inputs);
        self.open_axis = read.open_axis;
        self.values.clone_from(&read.values);
        Ok(read)
    }

    /// Returns whether other shapes and values may help. If a batch of the smallest size ran, larger
    /// ones fail for another reason, such as memory.
    fn may_need_others(&self, refusal: Option<&BootRefusal>) -> bool {
        let smallest = self.warm_up.sizes.first();
        let at_smallest = matches!(refusal, Some(BootRefusal::WarmUp { size, .. }) if Some(size) == smallest);
        at_smallest && self.given.is_none()
    }

    fn made_up_attempts(&self, lengths: &[i64]) -> Vec<Attempt> {
        let fills = if self.given.is_some() { &Fill::ALL[..1] } else { &Fill::ALL[..] };
        let values = &self.values;
        let of = |&open_axis: &i64| {
            fills.iter().map(move |&fill| Attempt { fill, open_axis, values: values.clone() })
        };
        lengths.iter().flat_map(of).collect()
    }

    fn attempts_of_file(&self) -> Vec<Attempt> {
        let of = |values: Vec<Option<InputValues>>| {
            let with =
                move |&open_axis: &i64| Attempt { fill: Fill::ALL[0], open_axis, values: values.clone() };
            OPEN_AXES[..1].iter().chain(self.further_lengths()).map(with)
        };
        self.values_of_file().into_iter().flat_map(of).collect()
    }

    /// Returns the lengths to try for free axes after the first one; none if no axis is free.
    fn further_lengths(&self) -> &'static [i64] {
        let has_open = self.warm_up.shapes.iter().flatten().any(|&axis| axis < 0);
        if has_open { &OPEN_AXES[1..] } else { &[] }
    }

    /// Returns the line with which the operator gives values that the model takes.
    fn advice(&self) -> String {
        if !self.warm_up.values.is_empty() && self.warm_up.values.iter().all(Option::is_some) {
            return "; the values are those of `warmup`; give others, which the model takes".to_owned();
        }
        let input = |(spec, shape): (&TensorSpec, &Vec<i64>)| match shape.iter().any(|&axis| axis < 0) {
            true => format!("{}: {{shape: {shape:?}, values: VALUE}}", spec.name).replace("-1", "N"),
            false => format!("{}: VALUE", spec.name),
        };
        let inputs: Vec<String> = self.signature.inputs.iter().zip(&self.warm_up.shapes).map(input).collect();
        let tried = OPEN_AXES.map(|length| length.to_string()).join(", ");
        let lengths = match self.warm_up.shapes.iter().flatten().any(|&axis| axis < 0) {
            true => format!(", and free axes of length {tried}"),
            false => String::new(),
        };
        format!(
            "; the values were made up{lengths}; if the model needs others, give them as \
             `warmup: {{{}}}` (VALUE is a number, text, or a list of them), or as a file of arrays: \
             `warmup: PATH` (.npz, or a request as .json)",
            inputs.join(", ")
        )
    }

    fn run(&mut self, run: Run) -> Result<(Vec<ReferenceOutput>, Duration), BootRefusal> {
        let made_up = self.made_up(run)?;
        self.run_on(run, &made_up)
    }

    fn run_on(
        &mut self,
        run: Run,
        made_up: &MadeUp,
    ) -> Result<(Vec<ReferenceOutput>, Duration), BootRefusal> {
        let Run { slot, groups, .. } = run;
        let (shapes, requests) = (made_up.shapes.clone(), made_up.requests.clone());
        let batch = Batch { id: 0, slot, sent_ns: 0, groups, shapes, requests, optional: Vec::new() };
        let failed = |failure| match failure {
            RunFailure::NotBatched(why) => BootRefusal::RowsDepend(why),
            failure => BootRefusal::WarmUp { size: run.size, why: failure.to_string() },
        };
        let inputs = Inputs::check(&batch, &made_up.slab, self.signature.all_inputs(), self.warm_up.batched)
            .map_err(failed)?;
        let begun_ns = now_ns();
        let Ran { outputs, mut more } =
            self.engine.run(&inputs, &mut self.slots.slot(batch.slot)).map_err(failed)?;
        let waited = Duration::from_nanos(now_ns().saturating_sub(begun_ns));
        let took = self.engine.executed(run.slot).unwrap_or(waited);
        let mut answers = self.written(outputs);
        for _ in 1..PROVED_ANSWERS {
            if !more {
                break;
            }
            let step = StreamStep { id: 0, slot, sent_ns: 0, groups, stream: batch.id };
            let ran = self.engine.step(&step, &mut self.slots.slot(slot)).map_err(failed)?;
            answers.extend(self.written(ran.outputs));
            more = ran.more;
        }
        self.engine.close(batch.id);
        Ok((answers, took))
    }

    fn written(&self, outputs: Vec<BatchOutput>) -> Vec<ReferenceOutput> {
        let read = |output: BatchOutput| {
            let part =
                |part: &Extent| self.answers.bytes(part.offset, part.len).expect("it was just written");
            let parts = output.parts.iter().map(part).collect::<Vec<_>>();
            ReferenceOutput { shape: output.shape, bytes: parts.concat() }
        };
        outputs.into_iter().map(read).collect()
    }

    fn made_up(&mut self, run: Run) -> Result<Rc<MadeUp>, BootRefusal> {
        let key = (run.size, run.draw);
        if let Some(known) = self.inputs.get(&key).filter(|known| known.is_of(run.fill, self)) {
            return Ok(Rc::clone(known));
        }
        let made_up = Rc::new(self.make_up(run)?);
        self.inputs.insert(key, Rc::clone(&made_up));
        Ok(made_up)
    }
}
