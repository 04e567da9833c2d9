//! The engine ONNX Runtime, which the worker loads as a library at run time. On an emulated device,
//! ONNX Runtime computes on the CPU. On a real GPU, it uses the execution providers that the
//! supervisor assigns.

mod bound;
mod channels_last;
mod constants;
mod content;
mod gather;
mod input;
mod instantiator;
mod libraries;
mod loader;
mod model_file;
mod on_gpu;
mod optimised;
mod output;
mod partitions;
mod providers;
mod scratch;
mod sessions;
mod sleep;
mod strings;
mod tensor;
mod weights;

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use ort::environment::Environment;
use ort::session::builder::SessionBuilder;
use ort::session::{OverridableInitializer, Session};
use ort::value::{Outlet, TensorElementType, ValueType};
use ort::{ErrorCode, LoadDynamicError};
use shadowslice_shared::batch::RunFailure;
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::tensor::{Datatype, TensorSpec};

use self::optimised::Optimised;
use super::{Engine, EngineAnswer, Signature};
use crate::answer::AnswerSlot;
use crate::inputs::{Inputs, OptionalInput};
pub use constants::Constants;
use gather::GatherBuffer;
pub use libraries::try_libraries;
pub(super) use on_gpu::RetainedModel;
pub use on_gpu::{GpuEngine, GpuSettings};
use shadowslice_shared::errors::chain;

/// Sets the environment variables that libraries read when they are loaded. Call this before any
/// library is loaded. `cache` is the folder of the model's optimised forms.
pub(super) fn prepare(model: &Path, cache: &Path) {
    if Optimised::is_convolutional(cache, model) {
        providers::give_small_workspaces();
    }
}

/// Sets the variables for a process with several models, in which each model has handles of cuBLAS.
pub(super) fn prepare_shared() {
    providers::give_small_workspaces();
}

/// The loaded library of ONNX Runtime.
#[derive(Debug, Clone)]
pub struct Library {
    environment: Environment,
}

impl Library {
    /// Loads the library. If `gpu` is true, also loads the libraries that ONNX Runtime needs to
    /// compute on GPUs. Loading does not access the GPU. Call this only once in a process.
    ///
    /// The supervisor disables telemetry with `ORT_DISABLE_TELEMETRY` before the worker starts.
    /// `with_telemetry(false)` alone would be too late: the library sends its first event while it
    /// is being loaded.
    pub fn load(library: &Path, gpu: bool) -> Result<Self, BootRefusal> {
        let fault = |fault: ort::Error| BootRefusal::Library(fault.to_string());
        let unloadable = |fault: LoadDynamicError| match fault {
            LoadDynamicError::Dlopen { error, .. } => BootRefusal::Library(linker_says(&error)),
            other => BootRefusal::Library(other.to_string()),
        };
        let environment = ort::init_from(library)
            .map_err(unloadable)?
            .with_name("shadowslice")
            .with_telemetry(false)
            .build()
            .map_err(fault)?;
        if gpu {
            providers::load_libraries();
        }
        Ok(Self { environment })
    }
}

/// Returns the cause of a "dlopen failed" error. Unlike the error itself, the cause names the file.
fn linker_says(fault: &dyn Error) -> String {
    chain(fault.source().unwrap_or(fault))
}

/// A session of ONNX Runtime, and the buffers of its inputs.
#[derive(Debug)]
pub struct OnnxSession {
    session: Session,
    outputs: Vec<TensorSpec>,
    buffers: Vec<GatherBuffer>,
}

impl OnnxSession {
    /// Loads a model on the host's CPU. `threads` is the number of threads within an operator.
    pub fn load(library: &Library, model: &Path, threads: u32) -> Result<(Self, Signature), BootRefusal> {
        let builder = options(&library.environment, threads).map_err(unusable)?;
        let (engine, signature) = Self::commit(builder, model)?;
        let optional = optional(&engine.session);
        Ok((engine, Signature { optional, ..signature }))
    }

    fn commit(mut builder: SessionBuilder, model: &Path) -> Result<(Self, Signature), BootRefusal> {
        // `ort` panics if an input or output has a type that `ort` does not know.
        let session = catch_unwind(AssertUnwindSafe(|| builder.commit_from_file(model)))
            .map_err(|_| {
                BootRefusal::Model("an input or output is not a tensor; only tensors are supported".into())
            })?
            .map_err(|fault| match fault.code() {
                ErrorCode::NotImplemented => BootRefusal::NoOperator(fault.message().to_owned()),
                _ => BootRefusal::Model(fault.message().to_owned()),
            })?;
        let inputs = specs("input", session.inputs()).map_err(BootRefusal::Model)?;
        // ONNX Runtime reports an input without a shape as if it were a scalar.
        let scalars: Vec<_> =
            inputs.iter().filter(|input| input.shape.is_empty()).map(|input| input.name.as_str()).collect();
        if !scalars.is_empty()
            && let Some(input) = model_file::input_without_rank(model, &scalars)
        {
            return Err(BootRefusal::Model(format!(
                "input `{input}` has no known rank; export the model with a shape for it, whose axes may be free"
            )));
        }
        let outputs = specs("output", session.outputs()).map_err(BootRefusal::Model)?;
        let buffers = inputs.iter().map(|_| GatherBuffer::default()).collect();
        let engine = Self { session, outputs: outputs.clone(), buffers };
        Ok((engine, Signature { inputs, optional: Vec::new(), outputs, streams: None }))
    }
}

impl Engine for OnnxSession {
    fn run(&mut self, inputs: &Inputs<'_>, slot: &mut AnswerSlot<'_>) -> Result<EngineAnswer, RunFailure> {
        let buffers = self.buffers.iter_mut().enumerate();
        let values = buffers.map(|(input, buffer)| input::value(inputs, input, buffer));
        let values = values.collect::<Result<Vec<_>, _>>()?;
        let optional = inputs.optional().map(|OptionalInput { spec, shape, bytes }| {
            input::whole(spec.datatype, shape, bytes).map(|value| (spec.name.as_str(), value))
        });
        let optional = optional.collect::<Result<Vec<_>, _>>()?;
        let answer = if optional.is_empty() {
            self.session.run(&values[..])
        } else {
            let names = inputs.specs().iter().map(|spec| spec.name.as_str());
            self.session.run(names.zip(values).chain(optional).collect::<Vec<_>>())
        };
        let answer = answer.map_err(|fault| run_failure(&fault))?;
        let outputs = self.outputs.iter().enumerate();
        let split = |(index, spec)| output::split(spec, &answer[index], inputs, slot);
        let outputs = outputs.map(split).collect::<Result<_, _>>()?;
        slot.check().map(|()| EngineAnswer::complete(outputs))
    }
}

/// Returns the options of all sessions. Spinning is off. With pauses of 10 ms between runs,
/// spinning costs 10 ms of CPU time per run, and other workers need these cores.
fn options(environment: &Environment, threads: u32) -> ort::Result<SessionBuilder> {
    Ok(Session::builder(environment)?
        .with_intra_threads(threads as usize)?
        .with_inter_threads(1)?
        .with_intra_op_spinning(false)?
        .with_inter_op_spinning(false)?)
}

/// Converts an error of ONNX Runtime that does not depend on the model.
fn unusable(fault: ort::Error) -> BootRefusal {
    BootRefusal::Library(fault.message().to_owned())
}

/// Advice for classifiers whose probabilities skl2onnx or onnxmltools exported as maps.
const ZIPMAP: &str = "; export the classifier with options={'zipmap': False}";

fn unsupported(side: &str, name: &str, kind: &ValueType) -> String {
    let hint = if holds_maps(kind) { ZIPMAP } else { "" };
    format!("{side} `{name}` has the unsupported type {kind}{hint}")
}

fn holds_maps(kind: &ValueType) -> bool {
    match kind {
        ValueType::Map { .. } => true,
        ValueType::Sequence(inner) | ValueType::Optional(inner) => holds_maps(inner),
        ValueType::Tensor { .. } => false,
    }
}

fn specs(side: &str, outlets: &[Outlet]) -> Result<Vec<TensorSpec>, String> {
    let spec = |outlet: &Outlet| {
        let unsupported = || unsupported(side, outlet.name(), outlet.dtype());
        let ValueType::Tensor { ty, shape, .. } = outlet.dtype() else { return Err(unsupported()) };
        let datatype = datatype(*ty).ok_or_else(unsupported)?;
        Ok(TensorSpec { name: outlet.name().to_owned(), datatype, shape: shape.to_vec() })
    };
    outlets.iter().map(spec).collect()
}

/// The maximum number of optional inputs of a model. If a model has more optional inputs, they are
/// probably its weights, because exporters with `keep_initializers_as_inputs` list the weights as
/// inputs.
const MAX_OPTIONAL: usize = 16;

/// Returns the inputs with a default in the model's file, or no inputs if there are more than
/// [`MAX_OPTIONAL`]. String inputs are not included, because they always keep their defaults.
fn optional(session: &Session) -> Vec<TensorSpec> {
    let spec = |input: &OverridableInitializer| {
        let ValueType::Tensor { ty, shape, .. } = input.dtype() else { return None };
        let datatype = datatype(*ty).filter(|&datatype| datatype != Datatype::Bytes)?;
        Some(TensorSpec { name: input.name().to_owned(), datatype, shape: shape.to_vec() })
    };
    let inputs = session.overridable_initializers();
    if inputs.len() > MAX_OPTIONAL { Vec::new() } else { inputs.iter().filter_map(spec).collect() }
}

fn datatype(element: TensorElementType) -> Option<Datatype> {
    Datatype::ALL.into_iter().find(|&datatype| element_type(datatype) == element)
}

fn element_type(datatype: Datatype) -> TensorElementType {
    match datatype {
        Datatype::Bool => TensorElementType::Bool,
        Datatype::Uint8 => TensorElementType::Uint8,
        Datatype::Uint16 => TensorElementType::Uint16,
        Datatype::Uint32 => TensorElementType::Uint32,
        Datatype::Uint64 => TensorElementType::Uint64,
        Datatype::Int8 => TensorElementType::Int8,
        Datatype::Int16 => TensorElementType::Int16,
        Datatype::Int32 => TensorElementType::Int32,
        Datatype::Int64 => TensorElementType::Int64,
        Datatype::Fp16 => TensorElementType::Float16,
        Datatype::Bf16 => TensorElementType::Bfloat16,
        Datatype::Fp32 => TensorElementType::Float32,
        Datatype::Fp64 => TensorElementType::Float64,
        Datatype::Bytes => TensorElementType::String,
    }
}

/// Converts an error of ONNX Runtime to the failure of a run. The model has already run in the
/// warm-up, so an invalid argument must come from the request.
fn run_failure(fault: &ort::Error) -> RunFailure {
    let why = fault.message().to_owned();
    match fault.code() {
        ErrorCode::InvalidArgument => RunFailure::Input(why),
        _ => RunFailure::Engine(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_of_probabilities_come_with_advice() {
        let maps = || ValueType::Map { key: TensorElementType::Int64, value: TensorElementType::Float32 };
        for kind in [maps(), ValueType::Sequence(Box::new(maps()))] {
            let why = unsupported("output", "output_probability", &kind);
            assert!(why.contains("`output_probability`") && why.contains("{'zipmap': False}"), "{why}");
        }
        let tensor = ValueType::Tensor {
            ty: TensorElementType::Float32,
            shape: [1_i64].into_iter().collect(),
            dimension_symbols: [String::new()].into_iter().collect(),
        };
        let why = unsupported("output", "list", &ValueType::Sequence(Box::new(tensor)));
        assert!(why.contains("unsupported type") && !why.contains("zipmap"), "{why}");
    }
}
