//! The loader of a model's sessions on a GPU.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ort::environment::Environment;
use ort::logging::LogLevel;
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use ort::value::{Outlet, ValueType};
use shadowslice_shared::boot::{BootRefusal, ProviderSpec};

use super::optimised::{LARGE_TENSOR_BYTES, Optimised, OptimisedForm, WEIGHTS};
use super::scratch::Scratch;
use super::weights::Weights;
use super::{OnnxSession, Signature, channels_last, options, providers, unusable};
use crate::device::cuda::exclusion::Exclusion;
use crate::device::cuda::{CudaGpu, arena};
use crate::engine::shapes::InputShapes;
use shadowslice_shared::errors::chain;

/// The settings and resources that all sessions of a model share.
pub(super) struct Loader {
    pub(super) environment: Environment,
    pub(super) model: PathBuf,
    pub(super) threads: u32,
    pub(super) providers: Vec<ProviderSpec>,
    pub(super) optimised: Option<Optimised>,
    /// The large tensors of the optimised forms, which all sessions share.
    pub(super) weights: Weights,
    /// The reason why optimised forms cannot be stored or loaded. The affected sessions load the
    /// model's own file, without shared weights.
    pub(super) unshared: Option<String>,
    /// True if the model's convolutions use channels last. Becomes false if the model does not load
    /// with channels last.
    pub(super) channels_last: bool,
    /// True if other models run in the same process.
    pub(super) is_shared: bool,
    pub(super) gpu: Arc<CudaGpu>,
}

/// The permission to compute operators on the host's CPU if the providers do not support them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fallback {
    Allowed,
    Forbidden,
}

/// The lengths of a model's dynamic axes, by the names of the axes.
pub(super) type Lengths = BTreeMap<String, i64>;

impl Loader {
    /// Returns the arena of a session that should have `scratch`.
    pub(super) fn scratch(&self, scratch: Scratch) -> Scratch {
        if self.is_shared { Scratch::Own } else { scratch }
    }

    /// Returns a session for all shapes in which the named axes have these lengths. The session
    /// loads the model's optimised form. If that form does not exist yet, creates it first. If the
    /// form cannot be created or used, the session still works, but needs more time and memory.
    pub(super) fn session(
        &mut self,
        fallback: Fallback,
        lengths: &Lengths,
        scratch: Scratch,
    ) -> Result<(OnnxSession, Signature), BootRefusal> {
        let loaded = self.session_as_it_is(fallback, lengths, scratch);
        if loaded.is_err() && std::mem::replace(&mut self.channels_last, false) {
            return self.session_as_it_is(fallback, lengths, scratch);
        }
        loaded
    }

    fn session_as_it_is(
        &mut self,
        fallback: Fallback,
        lengths: &Lengths,
        scratch: Scratch,
    ) -> Result<(OnnxSession, Signature), BootRefusal> {
        let Some(optimised) = &self.optimised else {
            return commit(self.builder(fallback, lengths, scratch)?, &self.model);
        };
        let name = self.name(fallback, lengths);
        let form = match optimised.form(&name) {
            Some(form) => Ok(form),
            None => match optimised.keep(&name, |file| self.optimise(fallback, lengths, file)) {
                Ok(kept) => kept.map_err(|error| chain(&error)),
                Err(refusal) if needs_processor(&refusal) => return Err(refusal),
                // The cause may be a full disk, so this is not fatal. If the model itself is at
                // fault, the load below fails too.
                Err(refusal) => Err(refusal.to_string()),
            },
        };
        let failure = match form {
            Ok(form) => match self.session_of(&form, self.builder(fallback, lengths, scratch)?) {
                Ok(loaded) => return Ok(loaded),
                Err(why) => {
                    form.discard();
                    why
                }
            },
            Err(why) => why,
        };
        self.unshared = Some(format!(
            "cannot store or load the model's optimised form, so starts take more time and memory: \
             {failure}"
        ));
        // If this layout failed the proof, the folder might not be able to record that.
        self.channels_last = false;
        commit(self.builder(fallback, lengths, scratch)?, &self.model)
    }

    fn optimise(&self, fallback: Fallback, lengths: &Lengths, file: &Path) -> Result<(), BootRefusal> {
        let key = |name: &str| format!("session.optimized_model_external_initializers_{name}");
        let saving = |builder: SessionBuilder| -> ort::Result<SessionBuilder> {
            Ok(builder
                .with_optimized_model_path(file)?
                .with_config_entry(key("file_name"), WEIGHTS)?
                .with_config_entry(key("min_size_in_bytes"), LARGE_TENSOR_BYTES.to_string())?)
        };
        let builder = saving(self.builder(fallback, lengths, Scratch::Own)?).map_err(unusable)?;
        // The session is dropped at once, which destroys its handles.
        let _exclusion = Exclusion::of_setup();
        commit(builder, &self.model)?;
        match self.channels_last {
            true => channels_last::transpose(file, &file.with_file_name(WEIGHTS)).map_err(|error| {
                BootRefusal::Setup(format!("cannot transpose the model's weights: {error}"))
            }),
            false => Ok(()),
        }
    }

    fn session_of(
        &mut self,
        form: &OptimisedForm,
        builder: SessionBuilder,
    ) -> Result<(OnnxSession, Signature), String> {
        let message = |fault: ort::Error<SessionBuilder>| fault.message().to_owned();
        let mut builder =
            builder.with_optimization_level(GraphOptimizationLevel::Disable).map_err(message)?;
        for (name, value) in self.weights.of(form, &self.gpu).map_err(|error| chain(&error))? {
            builder = builder.with_initializer(name, value).map_err(message)?;
        }
        commit(builder, &form.model()).map_err(|refusal| refusal.to_string())
    }

    /// Returns the file that describes the operators as ONNX Runtime executes them.
    pub(super) fn graph(&self) -> PathBuf {
        let form = self
            .optimised
            .as_ref()
            .and_then(|optimised| optimised.form(&self.name(Fallback::Forbidden, &Lengths::new())));
        form.map_or_else(|| self.model.clone(), |form| form.model())
    }

    /// Returns the name of an optimised form.
    fn name(&self, fallback: Fallback, lengths: &Lengths) -> String {
        format!("{fallback:?} {lengths:?} {}", if self.channels_last { "channels last" } else { "" })
    }

    fn builder(
        &self,
        fallback: Fallback,
        lengths: &Lengths,
        scratch: Scratch,
    ) -> Result<SessionBuilder, BootRefusal> {
        let built = || -> ort::Result<SessionBuilder> {
            let providers = providers::on_gpu(&self.providers, &self.gpu, self.channels_last)?;
            let mut builder =
                options(&self.environment, self.threads)?.with_execution_providers(providers)?;
            for (name, length) in lengths {
                builder = builder.with_dimension_override(name, *length)?;
            }
            // The model's small tensors then have memory of their own, which keeps its content during a
            // sleep.
            builder = builder.with_config_entry("session.use_device_allocator_for_initializers", "1")?;
            if scratch == Scratch::Shared {
                builder = builder.with_env_allocators()?;
            }
            if scratch == Scratch::Shared || self.is_shared {
                // A memory pattern would allocate one large block, in addition to the blocks of the
                // first execution.
                builder = builder.with_memory_pattern(false)?;
            }
            if fallback == Fallback::Forbidden {
                // The session may fail here although the model is correct. ONNX Runtime must not
                // log that as an error.
                builder = builder.with_disable_cpu_fallback()?.with_log_level(LogLevel::Fatal)?;
            }
            Ok(builder)
        };
        built().map_err(unusable)
    }
}

/// Creates a session, whose libraries create handles on the GPU.
fn commit(builder: SessionBuilder, model: &Path) -> Result<(OnnxSession, Signature), BootRefusal> {
    let _exclusion = Exclusion::of_setup();
    arena::while_loading(|| OnnxSession::commit(builder, model))
}

/// Returns true if ONNX Runtime refused the session because some operators need the CPU, which this
/// session must not use.
fn needs_processor(refusal: &BootRefusal) -> bool {
    refusal.to_string().contains("fallback to CPU EP has been explicitly disabled")
}

/// Returns the lengths of a model's dynamic axes in a batch of these shapes. Returns `None` if a
/// dynamic axis has no name, or if two axes with the same name have different lengths.
pub(super) fn lengths(session: &Session, shapes: &InputShapes) -> Option<Lengths> {
    let mut lengths = Lengths::new();
    for (outlet, shape) in session.inputs().iter().zip(shapes.with_batch_axis()) {
        for (name, length) in open_axes(outlet)?.into_iter().zip(shape) {
            let Some(name) = name else { continue };
            if lengths.insert(name, length).is_some_and(|other| other != length) {
                return None;
            }
        }
    }
    Some(lengths)
}

/// Returns one entry for each axis of an input: the axis's name if the axis is dynamic, otherwise
/// `None`. Returns `None` for the whole input if a dynamic axis has no name.
fn open_axes(outlet: &Outlet) -> Option<Vec<Option<String>>> {
    let ValueType::Tensor { shape, dimension_symbols, .. } = outlet.dtype() else { return None };
    let axes = shape.iter().zip(dimension_symbols.iter());
    axes.map(|(&length, name)| match (length < 0, name.is_empty()) {
        (false, _) => Some(None),
        (true, false) => Some(Some(name.clone())),
        (true, true) => None,
    })
    .collect()
}
