//! Loading a model's sessions on a GPU, as often as it takes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ort::environment::Environment;
use ort::logging::LogLevel;
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use ort::value::{Outlet, ValueType};
use shadowslice_shared::boot::{BootRefusal, ProviderSpec};

use super::bound::BatchForm;
use super::optimised::{Form, LARGE, Optimised, WEIGHTS};
use super::scratch::Scratch;
use super::weights::Weights;
use super::{OnnxRuntime, Signature, channels_last, options, providers};
use crate::device::cuda::CudaGpu;
use shadowslice_shared::errors::chain;

pub(super) struct Loader {
    pub(super) environment: Environment,
    pub(super) model: PathBuf,
    pub(super) threads: u32,
    pub(super) providers: Vec<ProviderSpec>,
    pub(super) optimised: Option<Optimised>,
    /// The large tensors of those forms, for all sessions.
    pub(super) weights: Weights,
    pub(super) unshared: Option<String>,
    /// Whether the model's convolutions compute so. Given up if it cannot be loaded so.
    pub(super) channels_last: bool,
    pub(super) gpu: Arc<CudaGpu>,
}

/// Whether the host's processor may compute operators that the providers lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fallback {
    Allowed,
    Forbidden,
}

/// Lengths of axes that a model leaves open, by the axes' names.
pub(super) type Lengths = BTreeMap<String, i64>;

impl Loader {
    /// A session for all shapes; axes with these names have these lengths. It is made from the kept
    /// form of the model, which is made first if it is not there. What prevents that costs time and
    /// memory, and nothing else.
    pub(super) fn session(
        &mut self,
        fallback: Fallback,
        lengths: &Lengths,
        scratch: Scratch,
    ) -> Result<(OnnxRuntime, Signature), BootRefusal> {
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
    ) -> Result<(OnnxRuntime, Signature), BootRefusal> {
        let Some(optimised) = &self.optimised else {
            return OnnxRuntime::commit(self.builder(fallback, lengths, scratch)?, &self.model);
        };
        let name = self.name(fallback, lengths);
        let form = match optimised.form(&name) {
            Some(form) => Ok(form),
            None => match optimised.keep(&name, |file| self.optimise(fallback, lengths, file)) {
                Ok(kept) => kept.map_err(|error| chain(&error)),
                Err(refusal) if needs_processor(&refusal) => return Err(refusal),
                // A full disk, for one. What is wrong with the model itself is found below.
                Err(refusal) => Err(refusal.to_string()),
            },
        };
        let unkept = match form {
            Ok(form) => match self.session_of(&form, self.builder(fallback, lengths, scratch)?) {
                Ok(loaded) => return Ok(loaded),
                Err(why) => {
                    form.discard();
                    why
                }
            },
            Err(why) => why,
        };
        self.unshared =
            Some(format!("its optimised form cannot be kept or used, which takes time and memory: {unkept}"));
        OnnxRuntime::commit(self.builder(fallback, lengths, scratch)?, &self.model)
    }

    fn optimise(&self, fallback: Fallback, lengths: &Lengths, file: &Path) -> Result<(), BootRefusal> {
        let refused = |fault: ort::Error<SessionBuilder>| BootRefusal::Library(fault.message().to_owned());
        let builder = self
            .builder(fallback, lengths, Scratch::Own)?
            .with_optimized_model_path(file)
            .map_err(refused)?;
        let key = |name: &str| format!("session.optimized_model_external_initializers_{name}");
        let builder = builder.with_config_entry(key("file_name"), WEIGHTS).map_err(refused)?;
        let builder =
            builder.with_config_entry(key("min_size_in_bytes"), LARGE.to_string()).map_err(refused)?;
        OnnxRuntime::commit(builder, &self.model)?;
        match self.channels_last {
            true => channels_last::turn(file, &file.with_file_name(WEIGHTS))
                .map_err(|error| BootRefusal::Setup(format!("its weights cannot be turned: {error}"))),
            false => Ok(()),
        }
    }

    fn session_of(
        &mut self,
        form: &Form,
        builder: SessionBuilder,
    ) -> Result<(OnnxRuntime, Signature), String> {
        let said = |fault: ort::Error<SessionBuilder>| fault.message().to_owned();
        let mut builder = builder.with_optimization_level(GraphOptimizationLevel::Disable).map_err(said)?;
        for (name, value) in self.weights.of(form, &self.gpu).map_err(|error| chain(&error))? {
            builder = builder.with_initializer(name, value).map_err(said)?;
        }
        OnnxRuntime::commit(builder, &form.model()).map_err(|refusal| refusal.to_string())
    }

    /// The file that says what the model's operators are.
    pub(super) fn graph(&self) -> PathBuf {
        let form = self
            .optimised
            .as_ref()
            .and_then(|optimised| optimised.form(&self.name(Fallback::Forbidden, &Lengths::new())));
        form.map_or_else(|| self.model.clone(), |form| form.model())
    }

    /// What a kept form is called.
    fn name(&self, fallback: Fallback, lengths: &Lengths) -> String {
        format!("{fallback:?} {lengths:?} {}", if self.channels_last { "channels last" } else { "" })
    }

    fn builder(
        &self,
        fallback: Fallback,
        lengths: &Lengths,
        scratch: Scratch,
    ) -> Result<SessionBuilder, BootRefusal> {
        let refused = |fault: ort::Error<SessionBuilder>| BootRefusal::Library(fault.message().to_owned());
        let providers =
            providers::on_gpu(&self.providers, &self.gpu, self.channels_last).map_err(BootRefusal::Setup)?;
        let builder = options(&self.environment, self.threads).map_err(BootRefusal::Model)?;
        let mut builder = builder.with_execution_providers(providers).map_err(refused)?;
        for (name, length) in lengths {
            builder = builder.with_dimension_override(name, *length).map_err(refused)?;
        }
        if scratch == Scratch::Shared {
            builder = builder.with_env_allocators().map_err(refused)?;
            // A pattern would be one large block, beside those of the first execution.
            builder = builder.with_memory_pattern(false).map_err(refused)?;
        }
        if fallback == Fallback::Forbidden {
            // A failure is expected here, and must not be logged as an error.
            builder = builder.with_disable_cpu_fallback().map_err(refused)?;
            builder = builder.with_log_level(LogLevel::Fatal).map_err(refused)?;
        }
        Ok(builder)
    }
}

/// Returns whether a session was refused because the host's processor may not help.
fn needs_processor(refusal: &BootRefusal) -> bool {
    refusal.to_string().contains("fallback to CPU EP has been explicitly disabled")
}

/// Of the axes that a model leaves open; `None` where such an axis has no name, or a name would
/// stand for two lengths.
pub(super) fn lengths(session: &Session, kind: &BatchForm) -> Option<Lengths> {
    let mut lengths = Lengths::new();
    for (outlet, row) in session.inputs().iter().zip(&kind.shapes) {
        let shape = kind.rows.map(i64::from).into_iter().chain(row.iter().copied());
        for (name, length) in open_axes(outlet)?.into_iter().zip(shape) {
            let Some(name) = name else { continue };
            if lengths.insert(name, length).is_some_and(|other| other != length) {
                return None;
            }
        }
    }
    Some(lengths)
}

/// Per axis of an input: its name, if it is open. `None` if an open one has none.
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
