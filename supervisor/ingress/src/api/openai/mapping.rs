//! The check of a mapping against a model's tensors, which are known when the model has been loaded.

use std::sync::LazyLock;
use std::time::Duration;

use serde_json::value::RawValue;
use shadowslice_config::OpenAiConfig;
use shadowslice_datapath::log_throttle::LogThrottle;
use shadowslice_datapath::pipeline::{Metadata, RequestFailure, RequestOptions};
use shadowslice_shared::tensor::{Datatype, TensorSpec, byte_strings};

use super::Preparation;
use super::error::OpenAiError;
use crate::admission::{Clipped, RequestError};
use crate::api::inference::Target;
use crate::api::model;
use crate::tensors::{
    InferRequest, NamedTensor, OutputForm, OutputTensor, RequestedOutput, floats, integers,
};

/// The shortest time between two warnings, because each request for a model with a wrong mapping fails.
const FAULT_INTERVAL: Duration = Duration::from_secs(10);

static FAULTS: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(FAULT_INTERVAL));

/// A model that serves an endpoint.
pub(super) struct MappedModel<M> {
    pub(super) target: Target,
    pub(super) mapping: M,
}

/// Finds the model of a request. `of` returns the mapping for the endpoint.
pub(super) fn find<M>(
    preparation: &Preparation,
    name: String,
    endpoint: &str,
    of: impl FnOnce(&OpenAiConfig) -> Option<M>,
) -> Result<MappedModel<M>, OpenAiError> {
    let Preparation { router, headers, journal, .. } = preparation;
    let route = model::select(router, &name, "", headers).map_err(OpenAiError::model)?;
    let mapping = route.pipeline().openai().and_then(|mapping| of(&mapping));
    let mapping = mapping.ok_or_else(|| {
        let name = Clipped(&name);
        OpenAiError::model(RequestError::NotFound(format!("model '{name}' does not serve {endpoint}")))
    })?;
    let target = Target::new(route, name, None, journal.as_ref())?;
    Ok(MappedModel { target, mapping })
}

/// The datatypes that a mapped tensor can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TensorKind {
    Text,
    TextOrTokens,
    Integer,
    Float,
    Any,
}

impl TensorKind {
    fn accepts(self, datatype: Datatype) -> bool {
        match self {
            Self::Text => datatype == Datatype::Bytes,
            Self::TextOrTokens => Self::Text.accepts(datatype) || Self::Integer.accepts(datatype),
            Self::Integer => integers(datatype, &[]).is_some(),
            Self::Float => floats(datatype, &[]).is_some(),
            Self::Any => true,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Text => "BYTES",
            Self::TextOrTokens => "BYTES or an integer",
            Self::Integer => "an integer",
            Self::Float => "a float",
            Self::Any => "any datatype",
        }
    }
}

/// A name in the mapping, with its key in the configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct MappedName<'a> {
    pub(super) key: &'a str,
    pub(super) name: &'a str,
    pub(super) kind: TensorKind,
}

/// Checks the inputs and the outputs of a mapping. Each required input of the model must be mapped.
pub(super) fn check(
    model: &Metadata,
    inputs: &[MappedName<'_>],
    outputs: &[MappedName<'_>],
) -> Result<(), RequestFailure> {
    let known: Vec<_> = model.inputs.iter().chain(&model.optional).collect();
    inputs.iter().try_for_each(|mapped| check_one(model, "input", mapped, &known))?;
    let known: Vec<_> = model.outputs.iter().collect();
    outputs.iter().try_for_each(|mapped| check_one(model, "output", mapped, &known))?;
    let is_mapped = |spec: &&TensorSpec| inputs.iter().any(|mapped| mapped.name == spec.name);
    match model.inputs.iter().find(|spec| !is_mapped(spec)) {
        Some(spec) => {
            Err(fault(model, "openai", &format!("the model's input '{}' is not mapped", spec.name)))
        }
        None => Ok(()),
    }
}

fn check_one(
    model: &Metadata,
    kind: &str,
    &MappedName { key, name, kind: wanted }: &MappedName<'_>,
    known: &[&TensorSpec],
) -> Result<(), RequestFailure> {
    match known.iter().find(|spec| spec.name == name) {
        Some(spec) if wanted.accepts(spec.datatype) => Ok(()),
        Some(spec) => {
            let (got, wanted) = (spec.datatype, wanted.name());
            Err(fault(model, key, &format!("{kind} '{name}' has datatype {got}, but must be {wanted}")))
        }
        None => {
            let names: Vec<_> = known.iter().map(|spec| spec.name.as_str()).collect();
            let names = names.join(", ");
            Err(fault(model, key, &format!("the model has no {kind} '{name}'; its {kind}s are: {names}")))
        }
    }
}

/// Returns the failure of a request because of a wrong mapping, which only the operator can correct.
pub(super) fn fault(model: &Metadata, key: &str, why: &str) -> RequestFailure {
    let name = &model.name;
    if FAULTS.is_due() {
        tracing::warn!(model = name, key, why, "wrong mapping of an OpenAI endpoint");
    }
    RequestFailure::Internal(format!("wrong configuration of model '{name}': {key}: {why}"))
}

/// Returns a request for these outputs as binary tensors.
pub(super) fn request<'n>(inputs: Vec<NamedTensor>, outputs: impl Iterator<Item = &'n str>) -> InferRequest {
    let mut requested: Vec<RequestedOutput> = Vec::new();
    for name in outputs {
        if !requested.iter().any(|other| other.name == name) {
            requested.push(RequestedOutput { name: name.to_owned(), form: OutputForm::Binary });
        }
    }
    InferRequest {
        id: String::new(),
        inputs,
        outputs: requested,
        is_binary: true,
        options: RequestOptions::default(),
    }
}

/// Returns the value of a field of a request if it is a string.
pub(super) fn is_string(value: &RawValue) -> bool {
    value.get().starts_with('"')
}

pub(super) fn output<'o>(outputs: &'o [OutputTensor], name: &str) -> Option<&'o OutputTensor> {
    outputs.iter().find(|output| output.name == name)
}

/// Returns the sum of the numbers in an output.
pub(super) fn sum(outputs: &[OutputTensor], name: &str) -> i128 {
    let numbers = output(outputs, name).and_then(|output| integers(output.datatype, &output.data));
    numbers.unwrap_or_default().iter().sum()
}

/// Returns the bytes of all strings in an output.
pub(super) fn text(outputs: &[OutputTensor], name: &str) -> Vec<u8> {
    let strings = output(outputs, name).and_then(|output| byte_strings(&output.data));
    strings.unwrap_or_default().concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Metadata {
        let spec = |name: &str, datatype| TensorSpec { name: name.into(), datatype, shape: vec![1] };
        Metadata {
            name: "m".into(),
            version: "1".into(),
            platform: "emulated",
            max_batch: 0,
            streams: None,
            inputs: vec![spec("prompt", Datatype::Bytes), spec("limit", Datatype::Int32)],
            optional: Vec::new(),
            outputs: vec![spec("text", Datatype::Bytes)],
        }
    }

    #[test]
    fn a_mapping_must_fit_the_model() {
        let mapped = |name, kind| MappedName { key: "k", name, kind };
        let prompt = mapped("prompt", TensorKind::Text);
        let limit = mapped("limit", TensorKind::Any);
        let text = mapped("text", TensorKind::Text);
        assert_eq!(check(&model(), &[prompt, limit], &[text]), Ok(()));
        for (inputs, output, why) in [
            (vec![prompt], text, "openai: the model's input 'limit' is not mapped"),
            (
                vec![mapped("x", TensorKind::Any)],
                text,
                "k: the model has no input 'x'; its inputs are: prompt, limit",
            ),
            (
                vec![mapped("limit", TensorKind::Text)],
                text,
                "input 'limit' has datatype INT32, but must be BYTES",
            ),
            (
                vec![prompt, limit],
                mapped("text", TensorKind::Float),
                "output 'text' has datatype BYTES, but must be a float",
            ),
        ] {
            let got = check(&model(), &inputs, &[output]).unwrap_err();
            assert!(matches!(got, RequestFailure::Internal(_)) && got.to_string().contains(why), "{got}");
        }
    }
}
