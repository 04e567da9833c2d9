//! The proof that a worker answers rightly: at every batch size, on inputs that anyone can make again,
//! it must agree with the model's reference answers, which were computed on the CPU.
//!
//! Every size is tried since the kernel that runs depends on it, and so may its faults.

mod compare;
mod made_up;
mod reference;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use shadowslice_shared::batch::{Batch, BatchRequest, Extent, IN_FLIGHT, RunFailure};
use shadowslice_shared::boot::{Refusal, WarmTime, WarmUp};
use shadowslice_shared::slab::{ALIGNMENT, ReadableSlab, WritableSlab};
use shadowslice_shared::tensor::elements;

use crate::answer::AnswerSlots;
use crate::clock::{HungUp, now_ns, still_wanted};
use crate::engine::{Engine, Signature};
use crate::errors::chain;
use crate::inputs::Inputs;
use made_up::Fill;
use reference::{Answer, Reference, SizeAnswers};

/// A model on trial. It answers as it does in service.
#[derive(Debug)]
pub struct Trial<'a> {
    /// What runs the model.
    pub engine: &'a mut Engine,
    /// The model's inputs and outputs.
    pub signature: &'a Signature,
    /// Where it answers.
    pub slots: &'a AnswerSlots,
    /// The same, to read.
    pub answers: &'a ReadableSlab,
    /// What to run.
    pub warm_up: &'a WarmUp,
    /// Where it is heard that nobody waits for the end any more; `None` where somebody does.
    pub socket: Option<BorrowedFd<'a>>,
    /// How long each size executed.
    pub times: Vec<WarmTime>,
}

/// Why a worker is not proven.
#[derive(Debug, thiserror::Error)]
pub enum Unproven {
    /// It cannot run, or answers wrongly.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Nobody waits for it any more.
    #[error("the supervisor has hung up")]
    HungUp,
}

impl From<HungUp> for Unproven {
    fn from(_: HungUp) -> Self {
        Self::HungUp
    }
}

/// Runs every size, and writes the answers for others to be held against. A model that cannot run on
/// some made-up inputs, as one that divides by them, is tried on others.
pub fn write_reference(trial: &mut Trial<'_>, file: &File) -> Result<(), Refusal> {
    let mut refusals = Vec::new();
    for fill in Fill::ALL {
        match reference_of(trial, fill) {
            Ok(reference) => {
                return reference.write(file).map_err(|fault| Refusal::Setup(chain(&fault)));
            }
            Err(refusal) => refusals.push(refusal),
        }
    }
    Err(refusals.swap_remove(0))
}

fn reference_of(trial: &mut Trial<'_>, fill: Fill) -> Result<Reference, Refusal> {
    trial.times.clear();
    let sizes = trial.warm_up.sizes.iter().map(|&size| {
        let answers = trial.run(size, fill, 0)?;
        Ok(SizeAnswers { size, answers })
    });
    Ok(Reference { fill, sizes: sizes.collect::<Result<_, Refusal>>()? })
}

/// Runs every size, in the slot that the trial itself does not use, so that whatever happens only once in a
/// process has happened: memory taken, kernels loaded and chosen. On the inputs of the reference answers, since
/// others may be none that the model can run on; without any, on the first that are made up.
pub fn warm(trial: &mut Trial<'_>, file: Option<&File>) -> Result<(), Unproven> {
    let fill = match file {
        Some(file) => read(file)?.fill,
        None => Fill::ALL[0],
    };
    let slot = u8::try_from(IN_FLIGHT - 1).expect("there are a handful of slots");
    for &size in &trial.warm_up.sizes {
        trial.still_wanted()?;
        trial.run(size, fill, slot)?;
    }
    trial.times.clear();
    Ok(())
}

fn read(file: &File) -> Result<Reference, Refusal> {
    Reference::read(file).map_err(|fault| Refusal::Setup(chain(&fault)))
}

/// Runs every size, and compares the answers with those that were written.
pub fn prove(trial: &mut Trial<'_>, file: &File) -> Result<(), Unproven> {
    let reference = read(file)?;
    for &size in &trial.warm_up.sizes {
        trial.still_wanted()?;
        let expected = reference.at(size).filter(|expected| expected.len() == trial.signature.outputs.len());
        let expected = expected.ok_or_else(|| {
            Refusal::Setup(format!("the reference answers are not this model's at batch size {size}"))
        })?;
        let answers = trial.run(size, reference.fill, 0)?;
        let mut farthest = 0.0_f64;
        for ((spec, expected), answer) in trial.signature.outputs.iter().zip(expected).zip(&answers) {
            let off = compare::compare(spec.datatype, expected, answer)
                .map_err(|wrong| Refusal::Proof { size, why: format!("output `{}` {wrong}", spec.name) })?;
            farthest = farthest.max(off);
        }
        if let Some(last) = trial.times.last_mut() {
            last.error = farthest;
        }
    }
    Ok(())
}

impl Trial<'_> {
    /// Asked between two sizes: what runs on a GPU keeps others waiting, and is not cut.
    fn still_wanted(&self) -> Result<(), HungUp> {
        self.socket.map_or(Ok(()), still_wanted)
    }

    /// Runs one batch of a single request of `size` rows.
    fn run(&mut self, size: u32, fill: Fill, slot: u8) -> Result<Vec<Answer>, Refusal> {
        let (slab, batch) = self.batch(size, fill, slot)?;
        let failed = |failure: RunFailure| Refusal::WarmUp { size, why: failure.to_string() };
        let inputs =
            Inputs::check(&batch, &slab, &self.signature.inputs, self.warm_up.batched).map_err(failed)?;
        let begun_ns = now_ns();
        let outputs = self.engine.run(&inputs, &mut self.slots.slot(batch.slot)).map_err(failed)?;
        let waited = Duration::from_nanos(now_ns().saturating_sub(begun_ns));
        let took = self.engine.executed(slot).unwrap_or(waited);
        self.times.push(WarmTime { rows: size, took, error: 0.0 });
        let answers = outputs.into_iter().map(|output| {
            let part =
                |part: &Extent| self.answers.bytes(part.offset, part.len).expect("it was just written");
            let parts = output.parts.iter().map(part).collect::<Vec<_>>();
            Answer { shape: output.shape, bytes: parts.concat() }
        });
        Ok(answers.collect())
    }

    /// A batch of made-up inputs, and the slab in which they lie.
    fn batch(&self, size: u32, fill: Fill, slot: u8) -> Result<(ReadableSlab, Batch), Refusal> {
        let setup =
            |why: &str| Refusal::Setup(format!("a warm-up at batch size {size} cannot be made: {why}"));
        let WarmUp { shapes, .. } = self.warm_up;
        if shapes.len() != self.signature.inputs.len() {
            return Err(setup("the model has another number of inputs"));
        }
        let (mut bytes, mut extents) = (Vec::new(), Vec::new());
        for (index, (spec, shape)) in self.signature.inputs.iter().zip(shapes).enumerate() {
            let count = elements(shape).and_then(|row| row.checked_mul(size as usize));
            let count = count.ok_or_else(|| {
                setup(&format!(
                    "input `{}` needs a shape without unknown axes; give `warmup:` one",
                    spec.name
                ))
            })?;
            let tensor = made_up::tensor(spec.datatype, count, size, (index, fill));
            bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
            extents.push(Extent { offset: bytes.len() as u64, len: tensor.len() as u64 });
            bytes.extend(tensor);
        }
        // A slab is never empty.
        bytes.push(0);
        let len = bytes.len() as u64;
        let slab = WritableSlab::create("shadowslice-warmup", len).map_err(|fault| setup(&chain(&fault)))?;
        slab.write(0, &bytes).expect("it was made for these bytes");
        let view = ReadableSlab::map(slab.as_fd(), len).map_err(|fault| setup(&chain(&fault)))?;
        let requests = vec![BatchRequest { rows: size, inputs: extents }];
        Ok((view, Batch { id: 0, slot, sent_ns: 0, shapes: shapes.clone(), requests }))
    }
}
