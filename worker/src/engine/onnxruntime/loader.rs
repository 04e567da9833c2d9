//! Loading a model's sessions on a GPU, as often as it takes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use ort::environment::Environment;
use ort::logging::LogLevel;
use ort::session::Session;
use ort::session::builder::SessionBuilder;
use ort::value::{Outlet, ValueType};
use shadowslice_shared::boot::{BootRefusal, Provider};

use super::bound::BatchForm;
use super::{OnnxRuntime, Signature, options, providers};
use crate::device::cuda::CudaGpu;

/// What it takes to load a session once more.
pub(super) struct Loader {
    pub(super) environment: Environment,
    pub(super) model: PathBuf,
    /// Threads within an operator that runs on the host's processor.
    pub(super) threads: u32,
    pub(super) providers: Vec<Provider>,
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
    /// A session for all shapes; axes with these names have these lengths.
    pub(super) fn session(
        &self,
        fallback: Fallback,
        lengths: &Lengths,
    ) -> Result<(OnnxRuntime, Signature), BootRefusal> {
        let refused = |fault: ort::Error<SessionBuilder>| BootRefusal::Library(fault.message().to_owned());
        let providers = providers::on_gpu(&self.providers, &self.gpu).map_err(BootRefusal::Setup)?;
        let builder = options(&self.environment, self.threads).map_err(BootRefusal::Model)?;
        let mut builder = builder.with_execution_providers(providers).map_err(refused)?;
        for (name, length) in lengths {
            builder = builder.with_dimension_override(name, *length).map_err(refused)?;
        }
        if fallback == Fallback::Forbidden {
            // A failure is expected here, and must not be logged as an error.
            builder = builder.with_disable_cpu_fallback().map_err(refused)?;
            builder = builder.with_log_level(LogLevel::Fatal).map_err(refused)?;
        }
        OnnxRuntime::commit(builder, &self.model)
    }
}

/// The lengths that this form of batch gives to the axes that a model leaves open; `None` where
/// such an axis has no name, or a name would stand for two lengths.
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
