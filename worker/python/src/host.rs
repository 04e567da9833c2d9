//! The calls from the worker to the `Runner` of the Python package.
#![allow(unsafe_code)] // Rust and Python share memory without a copy.

use std::ffi::{c_char, c_int};
use std::ops::Range;

use pyo3::call::PyCallArgs;
use pyo3::conversion::FromPyObjectOwned;
use pyo3::ffi::PyMemoryView_FromMemory;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use shadowslice_shared::batch::{BatchOutput, RunFailure, StreamLimits};
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::tensor::TensorSpec;
use shadowslice_worker::answer::AnswerSlot;
use shadowslice_worker::engine::{
    EngineAnswer, HostRecording, LoadRequest, ModelHost, ProofBasis, RecordedOutput, Seats, Signature,
    StreamResult, TensorData,
};
use shadowslice_worker::inputs::Inputs;

/// The value of `PyBUF_READ`, which the stable ABI of older interpreters does not define.
const READ: c_int = 0x100;

/// A Python model, which the worker calls through the `Runner` of the package.
#[derive(Debug)]
pub(crate) struct PythonHost {
    runner: Py<PyAny>,
    /// True if inputs lie in the request slab, which stays mapped. False during the warm-up, whose
    /// inputs do not lie in the slab.
    stays_mapped: bool,
}

/// The signature of a model in the reply of `Runner.load`.
#[derive(FromPyObject)]
struct SignatureReply {
    #[pyo3(item(0))]
    inputs: Vec<TensorReply>,
    #[pyo3(item(1))]
    outputs: Vec<TensorReply>,
    #[pyo3(item(2))]
    streams: Option<StreamLimitsReply>,
}

/// The number of streams that the model can generate.
#[derive(FromPyObject)]
struct StreamLimitsReply {
    #[pyo3(item(0))]
    open: u32,
    #[pyo3(item(1))]
    per_step: u32,
}

#[derive(FromPyObject)]
struct TensorReply {
    #[pyo3(item(0))]
    name: String,
    /// The datatype's name in the protocol, for example `FP32`.
    #[pyo3(item(1))]
    datatype: String,
    /// The shape, including the batch axis.
    #[pyo3(item(2))]
    shape: Vec<i64>,
}

/// The shape of an input that the model supplies for its own proof, and the input's bytes.
type WarmupInput = (Vec<i64>, Vec<u8>);

/// True if the model is deterministic, and the inputs that it supplies for its own proof, if any.
type BasisParts = (bool, Option<Vec<WarmupInput>>);

/// The shape of an output without the batch axis, and the address and the length in bytes of each
/// request's part.
type OutputParts = (Vec<i64>, Vec<(usize, usize)>);

/// The reply of `Runner.run`, and the reply of `Runner.step` for each stream.
#[derive(FromPyObject)]
struct RunReply {
    /// The answer, or `None` if the model failed.
    #[pyo3(item(0))]
    answer: Option<AnswerReply>,
    /// True if the request's input caused the failure.
    #[pyo3(item(1))]
    is_input_fault: bool,
    /// The reason for the failure.
    #[pyo3(item(2))]
    why: String,
}

#[derive(FromPyObject)]
struct AnswerReply {
    #[pyo3(item(0))]
    outputs: Vec<OutputParts>,
    /// The arrays that hold the outputs' bytes. The addresses in `outputs` are valid while this
    /// reference to the arrays exists.
    #[pyo3(item(1))]
    _arrays: Py<PyAny>,
    /// True if more answers of the stream follow.
    #[pyo3(item(2))]
    more: bool,
}

/// A recording in the reply of `Runner.record`.
#[derive(FromPyObject)]
struct RecordingReply {
    /// The handle of the `CUgraph`.
    #[pyo3(item(0))]
    graph: usize,
    /// The addresses of the inputs on the GPU.
    #[pyo3(item(1))]
    inputs: Vec<usize>,
    #[pyo3(item(2))]
    outputs: Vec<RecordedOutputReply>,
}

#[derive(FromPyObject)]
struct RecordedOutputReply {
    /// The shape without the batch axis.
    #[pyo3(item(0))]
    shape: Vec<i64>,
    #[pyo3(item(1))]
    address: usize,
    /// The number of bytes in a row.
    #[pyo3(item(2))]
    row: usize,
}

impl PythonHost {
    pub(crate) fn new(runner: Py<PyAny>) -> Self {
        Self { runner, stays_mapped: false }
    }

    /// Calls a method of the runner.
    fn call<T>(&self, method: &str, arguments: impl for<'py> PyCallArgs<'py>) -> PyResult<T>
    where
        T: for<'py> FromPyObjectOwned<'py>,
    {
        Python::attach(|py| {
            self.runner.bind(py).call_method1(method, arguments)?.extract().map_err(Into::into)
        })
    }

    /// Calls a method of the runner that returns the reason for a failure, or `None`.
    fn attempt(&self, method: &str, arguments: impl for<'py> PyCallArgs<'py>) -> Result<(), String> {
        let why: PyResult<Option<String>> = self.call(method, arguments);
        why.map_err(|error| error.to_string())?.map_or(Ok(()), Err)
    }
}

fn setup_error(error: PyErr) -> BootRefusal {
    BootRefusal::Setup(error.to_string())
}

fn engine_error(error: PyErr) -> RunFailure {
    RunFailure::Engine(error.to_string())
}

impl ModelHost for PythonHost {
    fn load(
        &mut self,
        LoadRequest { name, path, cache, on_gpu, step_timeout }: LoadRequest<'_>,
    ) -> Result<Signature, BootRefusal> {
        let reply: PyResult<(Option<SignatureReply>, String)> =
            self.call("load", (name, path, cache, on_gpu, step_timeout.as_secs_f64()));
        let (signature, why) = reply.map_err(setup_error)?;
        let SignatureReply { inputs, outputs, streams } = signature.ok_or(BootRefusal::Model(why))?;
        let streams = streams.map(|StreamLimitsReply { open, per_step }| StreamLimits { open, per_step });
        Ok(Signature { inputs: specs(inputs)?, optional: Vec::new(), outputs: specs(outputs)?, streams })
    }

    fn basis(&mut self) -> Result<ProofBasis, BootRefusal> {
        let reply: PyResult<(Option<BasisParts>, String)> = self.call("basis", ());
        let (basis, why) = reply.map_err(setup_error)?;
        let (deterministic, inputs) = basis.ok_or(BootRefusal::Model(why))?;
        let given = |(shape, bytes): WarmupInput| TensorData { shape, bytes };
        Ok(ProofBasis { deterministic, inputs: inputs.map(|inputs| inputs.into_iter().map(given).collect()) })
    }

    fn finish_warm_up(&mut self) {
        self.stays_mapped = true;
        // The error is ignored, because a failed call only makes the runner keep more memory than
        // it needs.
        self.call::<Py<PyAny>>("warmed_up", ()).ok();
    }

    fn try_on(&mut self, cuda: usize) -> Result<(), String> {
        self.attempt("unfit", (cuda,))
    }

    fn check_movable(&self) -> Result<(), String> {
        self.attempt("movable", ())
    }

    fn check_arena(&self) -> Result<(), String> {
        self.attempt("outside_arena", ())
    }

    fn arena_content(&self) -> Result<Vec<Range<u64>>, String> {
        let blocks: PyResult<Vec<(u64, u64)>> = self.call("arena_content", ());
        let blocks = blocks.map_err(|error| error.to_string())?;
        Ok(blocks.into_iter().map(|(address, bytes)| address..address + bytes).collect())
    }

    fn release_partition(&mut self) {
        // The error is ignored, because a failed call only means that the memory is not freed.
        self.call::<Py<PyAny>>("left", ()).ok();
    }

    fn run(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
        cuda: Option<usize>,
    ) -> Result<EngineAnswer, RunFailure> {
        let reply = Python::attach(|py| -> PyResult<RunReply> {
            let tensors: Vec<Bound<'_, PyAny>> = (0..inputs.specs().len())
                .map(|input| tensor(py, inputs, input, self.stays_mapped))
                .collect::<Result<_, _>>()?;
            let tensors = PyList::new(py, tensors)?;
            let shapes: Vec<Vec<i64>> =
                (0..inputs.specs().len()).map(|input| inputs.shape(input).collect()).collect();
            let rows: Vec<u32> = (0..inputs.requests()).map(|request| inputs.rows_of(request)).collect();
            let rows = inputs.rows().map(|_| rows);
            let stream = inputs.id();
            self.runner.bind(py).call_method1("run", (tensors, shapes, rows, cuda, stream))?.extract()
        });
        answer(reply, slot)
    }

    fn record(&mut self, shapes: &[Vec<i64>]) -> Result<Option<HostRecording>, RunFailure> {
        let reply: PyResult<(Option<RecordingReply>, Option<String>)> =
            self.call("record", (shapes.to_vec(),));
        let (recording, why) = reply.map_err(engine_error)?;
        if let Some(why) = why {
            return Err(RunFailure::Engine(why));
        }
        Ok(recording.map(|RecordingReply { graph, inputs, outputs }| {
            let output = |RecordedOutputReply { shape, address, row }| RecordedOutput { shape, address, row };
            HostRecording { graph, inputs, outputs: outputs.into_iter().map(output).collect() }
        }))
    }

    fn step(&mut self, streams: &[u64], slot: &mut AnswerSlot<'_>, cuda: Option<usize>) -> Vec<StreamResult> {
        let replies: PyResult<Vec<RunReply>> = self.call("step", (streams.to_vec(), cuda));
        let replies = match replies {
            Ok(replies) if replies.len() == streams.len() => replies,
            Ok(_) => return failed(streams, &RunFailure::Engine("the step lost streams".to_owned())),
            Err(error) => return failed(streams, &engine_error(error)),
        };
        let put = |(stream, reply): (&u64, RunReply)| {
            let written = slot.put_stream(|slot| answer(Ok(reply), slot)).flatten();
            // The model does not know that the answer does not fit.
            written.inspect_err(|_| self.close(*stream))
        };
        streams.iter().zip(replies).map(put).collect()
    }

    fn seats(&mut self, streams: &[u64]) -> Option<Seats> {
        // The error is ignored, because `step` then reports it.
        let reply: Option<(Vec<i64>, i64)> = self.call("seats", (streams.to_vec(),)).ok().flatten();
        reply.map(|(seats, spare)| Seats { seats, spare })
    }

    fn end_streams(&mut self, streams: &[u64]) {
        streams.iter().for_each(|&stream| self.close(stream));
    }

    fn may_need_warmup(&self) -> bool {
        self.call("may_need_warmup", ()).unwrap_or(true)
    }

    fn close(&mut self, stream: u64) {
        // The error is ignored, because the Python package logs any exception that the generator
        // raises.
        self.call::<Py<PyAny>>("close", (stream,)).ok();
    }
}

fn failed(streams: &[u64], failure: &RunFailure) -> Vec<StreamResult> {
    streams.iter().map(|_| Err(failure.clone())).collect()
}

fn answer(reply: PyResult<RunReply>, slot: &mut AnswerSlot<'_>) -> Result<EngineAnswer, RunFailure> {
    let reply = reply.map_err(engine_error)?;
    match reply.answer {
        // `_arrays` keeps the outputs' bytes alive until they are copied.
        Some(AnswerReply { outputs, _arrays, more }) => {
            Ok(EngineAnswer { outputs: outputs.into_iter().map(|output| put(output, slot)).collect(), more })
        }
        None if reply.is_input_fault => Err(RunFailure::Input(reply.why)),
        None => Err(RunFailure::Engine(reply.why)),
    }
}

/// Returns the contiguous bytes of an input. Does not copy bytes that are already contiguous in
/// memory that stays mapped.
fn tensor<'py>(
    py: Python<'py>,
    inputs: &Inputs<'_>,
    input: usize,
    stays_mapped: bool,
) -> PyResult<Bound<'py, PyAny>> {
    if inputs.requests() > 1 || !stays_mapped {
        let parts: Vec<&[u8]> = (0..inputs.requests()).map(|request| inputs.part(request, input)).collect();
        return Ok(PyBytes::new(py, &parts.concat()).into_any());
    }
    let part = inputs.part(0, input);
    let length = isize::try_from(part.len())?;
    // SAFETY: the request slab stays mapped while the process serves. If a model keeps a view of
    // the slab, that view therefore remains valid, although its bytes can change. The view is
    // read-only.
    let view = unsafe { PyMemoryView_FromMemory(part.as_ptr().cast::<c_char>().cast_mut(), length, READ) };
    // SAFETY: the pointer is a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, view) }
}

fn put((shape, parts): OutputParts, slot: &mut AnswerSlot<'_>) -> BatchOutput {
    let bytes = |(address, length): (usize, usize)| match length {
        0 => &[][..],
        // SAFETY: `Runner.run` returns the addresses of contiguous arrays with this number of
        // bytes. The caller keeps the arrays alive, and nothing writes to them before the next
        // batch.
        _ => unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(address), length) },
    };
    BatchOutput { shape, parts: parts.into_iter().map(|part| slot.put(bytes(part))).collect() }
}

fn specs(tensors: Vec<TensorReply>) -> Result<Vec<TensorSpec>, BootRefusal> {
    let spec = |TensorReply { name, datatype, shape }| match datatype.parse() {
        Ok(datatype) => Ok(TensorSpec { name, datatype, shape }),
        Err(unknown) => Err(BootRefusal::Model(format!("tensor '{name}': {unknown}"))),
    };
    tensors.into_iter().map(spec).collect()
}
