//! Reads the engine of a model, and the model's file or tensors.

use std::path::{Path, PathBuf};

use shadowslice_shared::boot::EchoTensor;
use shadowslice_shared::tensor::{Datatype, TensorSpec, elements};

use super::keys::{ENGINES, PROVIDERS};
use super::onnx::{OnnxFile, OnnxInput};
use super::reader::{Fields, Value};
use super::types::{EngineConfig, GpuConfig, LimitsConfig, ProviderKind};
use super::units::show_size;
use super::versions::VersionSource;
use super::{Context, absolute, onnx, usable};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum EngineName {
    OnnxRuntime,
    Python,
    Emulated,
}

const PYTHON: &str = "python3";

const NO_VERSIONS: &str = "the emulated engine has no versions";

/// The name of the Python file in a model's folder.
pub(super) const PYTHON_FILE: &str = "model.py";

/// The name of the ONNX file in the folder of a version.
pub(super) const ONNX_FILE: &str = "model.onnx";

impl EngineName {
    /// Returns the engine of files with this extension.
    pub(super) fn of_extension(path: &Path) -> Option<Self> {
        match path.extension()?.to_ascii_lowercase().to_str()? {
            "onnx" => Some(Self::OnnxRuntime),
            "py" => Some(Self::Python),
            _ => None,
        }
    }

    /// Returns the engine of a version with this path.
    fn of_version(path: &Path) -> Self {
        let in_folder = || path.join(PYTHON_FILE).is_file().then_some(Self::Python);
        Self::of_extension(path).or_else(in_folder).unwrap_or(Self::OnnxRuntime)
    }
}

/// Reads a model's engine. Also returns the inputs that the model's file or `tensors` declares, if
/// they are known. Records a fault for each key that belongs to another engine, unless the model has
/// versions with different engines.
pub(super) fn engine(
    model: &Fields<'_>,
    source: &VersionSource,
    gpu: Option<&GpuConfig>,
    limits: &LimitsConfig,
    context: &Context<'_>,
) -> (EngineConfig, Vec<OnnxInput>) {
    let Some(engine) = kind(model, source) else {
        return (EngineConfig::Emulated { tensors: Vec::new() }, Vec::new());
    };
    if engine == EngineName::Emulated {
        model.forbid(
            &["path", "threads", "providers", "python", "step_timeout"],
            "the emulated engine does not have this",
        );
        model.forbid(&["versions", "rollout"], NO_VERSIONS);
        if source.path.is_some() {
            model.fault("engine", NO_VERSIONS);
        }
        let tensors = tensors(model, limits);
        let inputs = tensors.iter().map(OnnxInput::of_tensor).collect();
        return (EngineConfig::Emulated { tensors }, inputs);
    }
    model.forbid(&["tensors"], "only `engine: emulated` has this, because the model defines its tensors");
    // The versions of a model may have different engines, and a key may belong to another version.
    let has_one_engine = source.folder.is_none() || model.has("engine");
    let forbid = |keys: &[&'static str], why| {
        if has_one_engine {
            model.forbid(keys, why);
        }
    };
    let threads = model.read("threads", |value| value.whole());
    let path = model.required("path", "give the model's file, for example `path: digits.onnx`");
    let given = path.and_then(|value| Some((source.engine_path(context.path(&value)?, engine), value)));
    let path = given.as_ref().map(|(path, _)| absolute(path)).unwrap_or_default();
    // The reason why a version does not exist has been recorded.
    let given = given.filter(|_| source.missing.is_none());
    if engine == EngineName::Python {
        forbid(&["providers"], "only `engine: onnxruntime` has this");
        if let Some((path, value)) = given {
            let file = if path.is_dir() { path.join(PYTHON_FILE) } else { path };
            usable(&file).unwrap_or_else(|error| unusable(&value, &file, &error, context));
        }
        let (interpreter, step_timeout) =
            (interpreter(model, context), model.read("step_timeout", |value| value.duration()));
        return (EngineConfig::Python { path, interpreter, threads, step_timeout }, Vec::new());
    }
    forbid(&["python", "step_timeout"], "only `engine: python` has this");
    let inputs = given.map(|(path, value)| inputs_of_file(&value, &path, context)).unwrap_or_default();
    (EngineConfig::OnnxRuntime { path, threads, providers: providers(model, gpu) }, inputs)
}

/// Returns the engine in the configuration. If the configuration gives no engine, derives it from
/// the extension of the model's file.
fn kind(model: &Fields<'_>, source: &VersionSource) -> Option<EngineName> {
    if let Some(value) = model.get("engine") {
        return value.one_of(&ENGINES);
    }
    if let Some(path) = &source.path {
        return Some(EngineName::of_version(path));
    }
    let path = model.required(
        "path",
        "give the model's file, for example `path: digits.onnx`, or use `engine: emulated`",
    )?;
    let Some(engine) = EngineName::of_extension(Path::new(path.text()?)) else {
        path.fault(
            "the extension is neither .onnx nor .py; use `engine: onnxruntime` for an ONNX model, or \
             `engine: python` for a folder with a model.py",
        );
        return None;
    };
    let name = ENGINES.iter().find(|(_, named)| *named == engine).map(|(name, _)| *name);
    model.show("engine", name.unwrap_or_default().to_owned());
    Some(engine)
}

fn unusable(value: &Value<'_>, file: &Path, error: &std::io::Error, context: &Context<'_>) {
    let message = format!("cannot use {}: {error}; put the model there or correct the path", file.display());
    context.file_fault(value, message);
}

/// Returns the absolute path of the Python interpreter.
fn interpreter(model: &Fields<'_>, context: &Context<'_>) -> PathBuf {
    let given = model.section("python").optional("executable", |value| {
        let named = value.text()?;
        let found =
            if named.contains('/') { context.path(value).map(|path| absolute(&path)) } else { find(named) };
        if !found.as_deref().is_some_and(Path::is_file) {
            context
                .host_fault(value, format!("`{named}` not found; give the absolute path of the interpreter"));
        }
        found
    });
    given.or_else(|| find(PYTHON)).unwrap_or_else(|| PYTHON.into())
}

/// Searches the folders of `PATH` for a program, and returns the program's path.
fn find(name: &str) -> Option<PathBuf> {
    let places = std::env::var_os("PATH")?;
    std::env::split_paths(&places).map(|place| place.join(name)).find(|program| program.is_file())
}

/// Reads the execution providers. A model on an emulated GPU has no execution provider, because the
/// model runs on the CPU.
fn providers(model: &Fields<'_>, gpu: Option<&GpuConfig>) -> Vec<ProviderKind> {
    if let Some(GpuConfig::Emulated { .. }) = gpu {
        model.forbid(&["providers"], "the CPU runs the models of an emulated GPU");
        return Vec::new();
    }
    model.read("providers", |value| Some(value.distinct(|item| item.one_of(&PROVIDERS))))
}

/// The largest number of files in a model's folder that [`model_files`] lists.
const MAX_FILES: usize = 1024;

/// Returns the files of a model. An ONNX model consists of the model file and the files of external
/// tensors. A Python model consists of the model file and all files in the model's folder.
pub fn model_files(engine: &EngineConfig) -> Vec<PathBuf> {
    match engine {
        EngineConfig::OnnxRuntime { path, .. } => {
            let folder = path.parent().unwrap_or(Path::new("."));
            let external = onnx::read(path).unwrap_or_default().external_files;
            std::iter::once(path.clone()).chain(external.iter().map(|file| folder.join(file))).collect()
        }
        EngineConfig::Python { path, .. } => {
            let entries = std::fs::read_dir(path).into_iter().flatten().flatten().take(MAX_FILES);
            let is_file = |entry: &std::fs::DirEntry| entry.path().is_file();
            let mut files: Vec<PathBuf> =
                entries.filter(is_file).map(|entry| entry.path()).chain([path.clone()]).collect();
            files.sort();
            files
        }
        EngineConfig::Emulated { .. } => Vec::new(),
    }
}

/// Returns the inputs of an ONNX model. If a file of the model cannot be used, records a fault of the
/// model's files.
fn inputs_of_file(value: &Value<'_>, path: &Path, context: &Context<'_>) -> Vec<OnnxInput> {
    let model = usable(path).and_then(|()| onnx::read(path)).unwrap_or_else(|error| {
        unusable(value, path, &error, context);
        OnnxFile::default()
    });
    let files = model.external_files.iter().map(|file| path.parent().unwrap_or(Path::new(".")).join(file));
    for file in files {
        if let Err(error) = usable(&file) {
            let file = file.display();
            context.file_fault(
                value,
                format!("cannot use {file}, which has tensors of the model: {error}; put the file there"),
            );
            break;
        }
    }
    model.inputs
}

pub(super) fn stem(path: &str) -> Option<String> {
    Path::new(path).file_stem().map(|stem| stem.to_string_lossy().into_owned())
}

fn tensors(model: &Fields<'_>, limits: &LimitsConfig) -> Vec<EchoTensor> {
    let why = "give the inputs and outputs of the emulated engine, for example \
               [{input: x, output: y, datatype: FP32, shape: [16]}]";
    let Some(list) = model.required("tensors", why) else { return Vec::new() };
    let mut tensors: Vec<EchoTensor> = Vec::new();
    for item in &list.items() {
        let fields = item.fields();
        let Some(tensor) = tensor(&fields, limits) else { continue };
        if tensors.iter().any(|other| other.input.name == tensor.input.name) {
            fields.fault("input", "another tensor has this input; use different names");
        }
        if tensors.iter().any(|other| other.output == tensor.output) {
            fields.fault("output", "another tensor has this output; use different names");
        }
        tensors.push(tensor);
    }
    tensors
}

fn tensor(fields: &Fields<'_>, limits: &LimitsConfig) -> Option<EchoTensor> {
    let get = |key, example| fields.required(key, &format!("give for example `{key}: {example}`"));
    let input = get("input", "x").and_then(|value| value.parsed(tensor_name));
    let output = get("output", "y").and_then(|value| value.parsed(tensor_name));
    let datatype = get("datatype", "FP32").and_then(|value| value.parsed(str::parse::<Datatype>));
    let shape = get("shape", "[16]")
        .and_then(|value| shape(&value).inspect(|shape| check_size(&value, shape, datatype, limits)));
    Some(EchoTensor {
        input: TensorSpec { name: input?, datatype: datatype?, shape: shape? },
        output: output?,
    })
}

fn tensor_name(text: &str) -> Result<String, &'static str> {
    match text.len() {
        1..=256 => Ok(text.to_owned()),
        _ => Err("the name is too long; use at most 256 bytes"),
    }
}

/// Reads a shape without the batch axis. The size -1, which the table allows for some keys, means
/// any size.
pub(super) fn shape(value: &Value<'_>) -> Option<Vec<i64>> {
    let axes: Vec<i64> = value.items().iter().map(axis).collect::<Option<_>>()?;
    if row_elements(&axes).is_none_or(|count| i64::try_from(count).is_err()) {
        value.fault("the shape has too many elements; make it smaller");
        return None;
    }
    value.is_list().then_some(axes)
}

fn axis(item: &Value<'_>) -> Option<i64> {
    let axis = item.whole()?;
    if axis == 0 {
        item.fault("an axis must have at least size 1, or -1 for any size");
        return None;
    }
    Some(axis)
}

/// Returns the smallest number of elements of a tensor with this shape, or `None` if it is too large.
fn row_elements(shape: &[i64]) -> Option<usize> {
    elements(&shape.iter().map(|axis| (*axis).max(1)).collect::<Vec<_>>())
}

/// Checks that a row is not larger than the largest request. No request could contain a larger row,
/// so the row would only waste a worker's memory. If the datatype is unknown, an element counts as
/// one byte.
pub(super) fn check_size(
    value: &Value<'_>,
    shape: &[i64],
    datatype: Option<Datatype>,
    limits: &LimitsConfig,
) {
    let element = datatype.and_then(Datatype::size).unwrap_or(1);
    let bytes = row_elements(shape).and_then(|count| count.checked_mul(element)).unwrap_or(usize::MAX);
    if u64::try_from(bytes).is_ok_and(|bytes| bytes > limits.request_bytes) {
        let most = show_size(limits.request_bytes);
        value.fault(format!(
            "a row of this shape has {bytes} bytes, but a request has at most {most}; make it smaller or raise limits.request_bytes"
        ));
    }
}
