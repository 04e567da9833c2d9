//! Collects the facts about ONNX Runtime and the libraries that it needs.

use std::path::PathBuf;

use crate::doctor::facts::{EngineFacts, Problem};
use shadowslice_config::Config;
use shadowslice_control::host;

pub(super) fn facts(config: Option<&Config>, worker: &Result<PathBuf, Problem>) -> EngineFacts {
    let named = config.and_then(|config| config.onnxruntime.library.as_deref());
    let library = host::find_onnxruntime(named).map_err(|error| Problem::of(&error));
    let path = library.as_deref().ok();
    let ask = |worker| host::libraries(worker, path).map_err(|error| Problem::of(&error));
    EngineFacts { loaded: worker.as_deref().ok().map(ask), library }
}
