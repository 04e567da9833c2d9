//! Calls between the worker and the package's `Runner`.
#![allow(unsafe_code)] // memory that both sides see without a copy

use std::ffi::{c_char, c_int};

use pyo3::ffi::PyMemoryView_FromMemory;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use shadowslice_shared::batch::{BatchOutput, RunFailure};
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::tensor::TensorSpec;
use shadowslice_worker::answer::AnswerSlot;
use shadowslice_worker::engine::{
    Basis, GivenInput, Host, HostRecording, Ran, RecordedOutput, Setting, Signature,
};
use shadowslice_worker::inputs::Inputs;

/// `PyBUF_READ`, which the stable interface of older interpreters does not name.
const READ: c_int = 0x100;

#[derive(Debug)]
pub(crate) struct PythonHost {
    runner: Py<PyAny>,
    /// Whether inputs lie in memory that stays.
    lasting: bool,
}

/// Name, datatype in the protocol's word, whole shape.
type Spec = (String, String, Vec<i64>);

/// What `Runner.load` returns: the inputs, the outputs and how many streams it generates at a time, or
/// why there are none.
type Found = (Option<(Vec<Spec>, Vec<Spec>, u32)>, String);

/// What `Runner.basis` returns: whether answers are always the same, and the inputs, each as shape and
/// bytes, if the model gives some; or why there is none.
type Grounds = (Option<(bool, Option<Vec<(Vec<i64>, Vec<u8>)>>)>, String);

/// One output: its shape without the batch axis, and each request's part, as address and length.
type Answered = (Vec<i64>, Vec<(usize, usize)>);

/// What `Runner.run` and `Runner.step` return: the outputs, what keeps them, and whether there is more;
/// or whether the input is at fault, and why.
type Told = (Option<(Vec<Answered>, Py<PyAny>, bool)>, bool, String);

/// What `Runner.record` returns: the graph, the inputs' addresses, and each output's row as shape, address
/// and bytes, if the model is to be recorded; or why it cannot be.
type Taken = (Option<(usize, Vec<usize>, Vec<(Vec<i64>, usize, usize)>)>, Option<String>);

impl PythonHost {
    pub(crate) fn new(runner: Py<PyAny>) -> Self {
        Self { runner, lasting: false }
    }
}

impl Host for PythonHost {
    fn load(&mut self, Setting { name, path, cache, on_gpu }: Setting<'_>) -> Result<Signature, BootRefusal> {
        let found = Python::attach(|py| -> PyResult<Found> {
            self.runner.bind(py).call_method1("load", (name, path, cache, on_gpu))?.extract()
        });
        let (found, why) = found.map_err(|error| BootRefusal::Setup(error.to_string()))?;
        let (inputs, outputs, streams) = found.ok_or(BootRefusal::Model(why))?;
        Ok(Signature { inputs: specs(inputs)?, optional: Vec::new(), outputs: specs(outputs)?, streams })
    }

    fn basis(&mut self) -> Result<Basis, BootRefusal> {
        let found = Python::attach(|py| -> PyResult<Grounds> {
            self.runner.bind(py).call_method0("basis")?.extract()
        });
        let (found, why) = found.map_err(|error| BootRefusal::Setup(error.to_string()))?;
        let (deterministic, inputs) = found.ok_or(BootRefusal::Model(why))?;
        let given = |(shape, bytes)| GivenInput { shape, bytes };
        Ok(Basis { deterministic, inputs: inputs.map(|inputs| inputs.into_iter().map(given).collect()) })
    }

    fn warmed_up(&mut self) {
        self.lasting = true;
        // Else it keeps more than it needs.
        Python::attach(|py| self.runner.bind(py).call_method0("warmed_up").map(drop)).ok();
    }

    fn try_on(&mut self, cuda: usize) -> Result<(), String> {
        let why = Python::attach(|py| {
            self.runner.bind(py).call_method1("unfit", (cuda,))?.extract::<Option<String>>()
        });
        why.map_err(|error| error.to_string())?.map_or(Ok(()), Err)
    }

    fn movable(&self) -> Result<(), String> {
        let why =
            Python::attach(|py| self.runner.bind(py).call_method0("movable")?.extract::<Option<String>>());
        why.map_err(|error| error.to_string())?.map_or(Ok(()), Err)
    }

    fn left(&mut self) {
        // What is not freed is used again.
        Python::attach(|py| self.runner.bind(py).call_method0("left").map(drop)).ok();
    }

    fn run(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
        cuda: Option<usize>,
    ) -> Result<Ran, RunFailure> {
        let told = Python::attach(|py| -> PyResult<Told> {
            let tensors: Vec<Bound<'_, PyAny>> = (0..inputs.specs().len())
                .map(|input| tensor(py, inputs, (input, self.lasting)))
                .collect::<Result<_, _>>()?;
            let tensors = PyList::new(py, tensors)?;
            let shapes: Vec<Vec<i64>> =
                (0..inputs.specs().len()).map(|input| inputs.shape(input).collect()).collect();
            let rows: Vec<u32> = (0..inputs.requests()).map(|request| inputs.rows_of(request)).collect();
            let rows = inputs.rows().map(|_| rows);
            let stream = inputs.id();
            self.runner.bind(py).call_method1("run", (tensors, shapes, rows, cuda, stream))?.extract()
        });
        ran(told, slot)
    }

    fn record(&mut self, shapes: &[Vec<i64>]) -> Result<Option<HostRecording>, RunFailure> {
        let taken = Python::attach(|py| -> PyResult<Taken> {
            self.runner.bind(py).call_method1("record", (shapes.to_vec(),))?.extract()
        });
        let (recorded, why) = taken.map_err(|error| RunFailure::Engine(error.to_string()))?;
        if let Some(why) = why {
            return Err(RunFailure::Engine(why));
        }
        Ok(recorded.map(|(graph, inputs, outputs)| {
            let output = |(shape, address, row)| RecordedOutput { shape, address, row };
            HostRecording { graph, inputs, outputs: outputs.into_iter().map(output).collect() }
        }))
    }

    fn step(
        &mut self,
        stream: u64,
        slot: &mut AnswerSlot<'_>,
        cuda: Option<usize>,
    ) -> Result<Ran, RunFailure> {
        let told = Python::attach(|py| -> PyResult<Told> {
            self.runner.bind(py).call_method1("step", (stream, cuda))?.extract()
        });
        ran(told, slot)
    }

    fn may_need_warmup(&self) -> bool {
        let asked = Python::attach(|py| self.runner.bind(py).call_method0("may_need_warmup")?.extract());
        asked.unwrap_or(true)
    }

    fn close(&mut self, stream: u64) {
        // What its generator raises is in the log.
        Python::attach(|py| self.runner.bind(py).call_method1("close", (stream,)).map(drop)).ok();
    }
}

fn ran(told: PyResult<Told>, slot: &mut AnswerSlot<'_>) -> Result<Ran, RunFailure> {
    match told.map_err(|error| RunFailure::Engine(error.to_string()))? {
        // The arrays live as long as `_kept`.
        (Some((outputs, _kept, more)), ..) => {
            Ok(Ran { outputs: outputs.into_iter().map(|output| put(output, slot)).collect(), more })
        }
        (None, true, why) => Err(RunFailure::Input(why)),
        (None, false, why) => Err(RunFailure::Engine(why)),
    }
}

/// The bytes of an input in one piece: in place if they lie in one, in memory that stays.
fn tensor<'py>(
    py: Python<'py>,
    inputs: &Inputs<'_>,
    (input, lasting): (usize, bool),
) -> PyResult<Bound<'py, PyAny>> {
    if inputs.requests() > 1 || !lasting {
        let parts: Vec<&[u8]> = (0..inputs.requests()).map(|request| inputs.part(request, input)).collect();
        return Ok(PyBytes::new(py, &parts.concat()).into_any());
    }
    let part = inputs.part(0, input);
    let length = isize::try_from(part.len())?;
    // SAFETY: the request slab stays mapped as long as the process serves, so that a view which a model
    // keeps is one of valid memory, whatever lies there later. Nothing is written through it.
    let view = unsafe { PyMemoryView_FromMemory(part.as_ptr().cast::<c_char>().cast_mut(), length, READ) };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, view) }
}

fn put((shape, parts): Answered, slot: &mut AnswerSlot<'_>) -> BatchOutput {
    let bytes = |(address, length): (usize, usize)| match length {
        0 => &[][..],
        // SAFETY: `Runner.run` gives addresses of contiguous arrays of that many bytes, which the caller
        // keeps alive, and which nobody writes before the next batch.
        _ => unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(address), length) },
    };
    BatchOutput { shape, parts: parts.into_iter().map(|part| slot.put(bytes(part))).collect() }
}

fn specs(found: Vec<Spec>) -> Result<Vec<TensorSpec>, BootRefusal> {
    let spec = |(name, datatype, shape): Spec| match datatype.parse() {
        Ok(datatype) => Ok(TensorSpec { name, datatype, shape }),
        Err(unknown) => Err(BootRefusal::Model(format!("tensor '{name}': {unknown}"))),
    };
    found.into_iter().map(spec).collect()
}
