//! The fields of a request for a completion.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use shadowslice_config::{CompletionsMapping, FieldMapping};
use shadowslice_datapath::pipeline::Metadata;

use super::error::OpenAiError;
use super::mapping::{fault, is_string};
use super::required;
use crate::admission::MemoryPermit;
use crate::tensors::{BoundedList, FieldObject, NamedTensor, field_tensor};

/// The fields of OpenAI's API that a model supports only if its mapping names them, with the values
/// that change nothing.
const NEUTRAL: [(&str, &str); 13] = [
    ("best_of", "1"),
    ("echo", "false"),
    ("frequency_penalty", "0"),
    ("logit_bias", "{}"),
    ("logprobs", "false"),
    ("max_tokens", "null"),
    ("n", "1"),
    ("presence_penalty", "0"),
    ("seed", "null"),
    ("stop", "[]"),
    ("suffix", "\"\""),
    ("temperature", "1"),
    ("top_p", "1"),
];

/// The fields that describe a request to its sender. They have no effect.
const IGNORED: [&str; 2] = ["user", "metadata"];

/// The length of the text of a value that may be neutral, in bytes. No neutral value is longer.
const NEUTRAL_BYTES: usize = 16;

/// A request for a completion.
pub(super) struct CompletionCall {
    pub(super) inputs: Vec<NamedTensor>,
    /// True if the client wants events.
    pub(super) streams: bool,
    /// True if the last event has the usage.
    pub(super) includes_usage: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: bool,
}

impl CompletionCall {
    pub(super) fn read(
        mut fields: FieldObject<'_>,
        mapping: &CompletionsMapping,
        model: &Metadata,
        permit: &MemoryPermit,
    ) -> Result<Self, OpenAiError> {
        let streams = optional(&mut fields, "stream", "a boolean")?.unwrap_or(false);
        let includes_usage = includes_usage(&mut fields, streams, mapping)?;
        let prompt = prompt(required(&mut fields, "prompt", "a string")?)?;
        let tensor = |input: &str, value: &RawValue| field_tensor(model, input, value, permit);
        let wrong_prompt = |why| OpenAiError::of_field("prompt", why);
        let mut inputs = vec![tensor(&mapping.prompt, prompt).map_err(wrong_prompt)?];
        for (name, FieldMapping { input, default }) in &mapping.fields {
            if let Some(value) = fields.take(name) {
                inputs.push(tensor(input, value).map_err(|why| OpenAiError::of_field(name, why))?);
            } else if let Some(default) = default {
                let key = || format!("openai.completions.fields.{name}.default");
                let value = to_raw_value(default).map_err(|why| fault(model, &key(), &why.to_string()))?;
                let tensor = tensor(input, &value);
                inputs.push(tensor.map_err(|why| fault(model, &key(), &why.message()))?);
            }
        }
        refuse_unsupported(&fields)?;
        Ok(Self { inputs, streams, includes_usage })
    }
}

fn optional<'a, T: Deserialize<'a>>(
    fields: &mut FieldObject<'a>,
    name: &str,
    expected: &str,
) -> Result<Option<T>, OpenAiError> {
    fields.take_as(name, expected).map_err(|why| OpenAiError::of_field(name, why.into()))
}

fn includes_usage(
    fields: &mut FieldObject<'_>,
    streams: bool,
    mapping: &CompletionsMapping,
) -> Result<bool, OpenAiError> {
    const NAME: &str = "stream_options";
    let Some(StreamOptions { include_usage }) = optional(fields, NAME, "an object with `include_usage`")?
    else {
        return Ok(false);
    };
    if !streams {
        return Err(OpenAiError::field(NAME, "needs `stream: true`"));
    }
    if include_usage && mapping.usage.is_none() {
        return Err(OpenAiError::field(NAME, "asks for usage, which this model does not report"));
    }
    Ok(include_usage)
}

/// Returns the only prompt of a request.
fn prompt(value: &RawValue) -> Result<&RawValue, OpenAiError> {
    if is_string(value) {
        return Ok(value);
    }
    let one = serde_json::from_str::<BoundedList<&RawValue, 1>>(value.get());
    match one.as_ref().map(|list| &list.0[..]) {
        Ok([text]) if is_string(text) => Ok(text),
        _ => Err(OpenAiError::field("prompt", "must be a string, or an array with one string")),
    }
}

/// Refuses the fields that are left, unless they change nothing.
fn refuse_unsupported(fields: &FieldObject<'_>) -> Result<(), OpenAiError> {
    for (name, value) in fields.iter().filter(|(name, _)| !IGNORED.contains(name)) {
        let neutral = NEUTRAL.iter().find(|(known, _)| *known == name);
        let Some((_, neutral)) = neutral else {
            return Err(OpenAiError::field(name, "is not a field of this request"));
        };
        if !is_neutral(value, neutral) {
            return Err(OpenAiError::field(name, "is not supported by this model; omit it"));
        }
    }
    Ok(())
}

fn is_neutral(value: &RawValue, neutral: &str) -> bool {
    if value.get().len() > NEUTRAL_BYTES {
        return false;
    }
    let [value, neutral] = [value.get(), neutral].map(|text| serde_json::from_str::<Value>(text).ok());
    let (Some(value), Some(neutral)) = (value, neutral) else { return false };
    value.is_null() || value == neutral || (value.is_number() && value.as_f64() == neutral.as_f64())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use shadowslice_shared::tensor::{Datatype, TensorSpec};

    use super::*;
    use crate::admission::unlimited;

    fn read(body: &Value) -> Result<CompletionCall, String> {
        let spec = |name: &str, datatype| TensorSpec { name: name.into(), datatype, shape: vec![1] };
        let model = Metadata {
            name: "m".into(),
            version: "1".into(),
            platform: "emulated",
            max_batch: 0,
            streams: None,
            inputs: vec![spec("p", Datatype::Bytes), spec("limit", Datatype::Int32)],
            optional: Vec::new(),
            outputs: Vec::new(),
        };
        let limit = FieldMapping { input: "limit".to_owned(), default: Some(json!(16)) };
        let mapping = CompletionsMapping {
            prompt: "p".to_owned(),
            text: "t".to_owned(),
            fields: BTreeMap::from([("max_tokens".to_owned(), limit)]),
            finish_reason: None,
            usage: None,
        };
        let (body, permit) = (body.to_string(), unlimited());
        let fields = FieldObject::parse(body.as_bytes(), &permit).unwrap();
        CompletionCall::read(fields, &mapping, &model, &permit).map_err(|why| why.body().to_string())
    }

    #[test]
    fn fields_and_their_defaults_become_inputs() {
        for (body, limit) in [
            (json!({"prompt": "a"}), 16_i32),
            (json!({"prompt": ["a"], "max_tokens": 7}), 7),
            (json!({"prompt": "a", "max_tokens": null, "n": 1, "best_of": 1, "temperature": 1.0}), 16),
            (
                json!({"prompt": "a", "logprobs": null, "echo": false, "stop": null, "user": "x", "suffix": null}),
                16,
            ),
        ] {
            let call = read(&body).unwrap();
            let data: Vec<_> = call.inputs.into_iter().map(|input| input.data.into_bytes()).collect();
            assert_eq!(data, [&b"\x01\0\0\0a"[..], &limit.to_le_bytes()], "{body}");
            assert!(!call.streams && !call.includes_usage);
        }
        assert!(read(&json!({"prompt": "a", "stream": true, "stream_options": {}})).unwrap().streams);
    }

    #[test]
    fn wrong_and_unsupported_fields_are_refused_by_name() {
        for (body, param) in [
            (json!({}), "prompt"),
            (json!({"prompt": ["a", "b"]}), "prompt"),
            (json!({"prompt": [1, 2]}), "prompt"),
            (json!({"prompt": "a", "n": 2}), "n"),
            (json!({"prompt": "a", "temperature": 0.5}), "temperature"),
            (json!({"prompt": "a", "stop": ["x"]}), "stop"),
            (json!({"prompt": "a", "max_tokens": "many"}), "max_tokens"),
            (json!({"prompt": "a", "stream": 1}), "stream"),
            (json!({"prompt": "a", "stream_options": {"include_usage": true}}), "stream_options"),
            (
                json!({"prompt": "a", "stream": true, "stream_options": {"include_usage": true}}),
                "stream_options",
            ),
            (json!({"prompt": "a", "max_token": 7}), "max_token"),
        ] {
            let why = read(&body).map(|_| ()).unwrap_err();
            assert!(why.contains(&format!("\"param\":\"{param}\"")), "{body}: {why}");
        }
    }
}
