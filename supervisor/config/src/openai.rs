//! Reads the key `openai` of models.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value as Json;

use super::reader::{Fields, Value};
use super::types::{CompletionsMapping, EmbeddingsMapping, FieldMapping, OpenAiConfig, UsageMapping};

const NO_ENDPOINT: &str =
    "no endpoint; add `embeddings: {input: INPUT, embedding: OUTPUT}` or `completions`, or remove the key";

/// Reads the mapping of a model, if it has one. The model's tensors are not known yet, so their names
/// are only checked when a request uses them.
pub(super) fn openai(fields: &Fields<'_>) -> Option<Arc<OpenAiConfig>> {
    let value = fields.get("openai")?;
    let keys = value.fields();
    let (embeddings, completions) = (keys.get("embeddings"), keys.get("completions"));
    if embeddings.is_none() && completions.is_none() && value.is_map() {
        value.fault(NO_ENDPOINT);
    }
    Some(Arc::new(OpenAiConfig {
        embeddings: embeddings.and_then(|value| embeddings_mapping(&value)),
        completions: completions.and_then(|value| completions_mapping(&value)),
    }))
}

fn embeddings_mapping(value: &Value<'_>) -> Option<EmbeddingsMapping> {
    let keys = value.fields();
    let input = tensor(&keys, "input", "the name of the input for the texts or tokens");
    let embedding = tensor(&keys, "embedding", "the name of the output with the vectors");
    let prompt_tokens = optional_tensor(&keys, "prompt_tokens");
    Some(EmbeddingsMapping { input: input?, embedding: embedding?, prompt_tokens })
}

fn completions_mapping(value: &Value<'_>) -> Option<CompletionsMapping> {
    let keys = value.fields();
    let prompt = tensor(&keys, "prompt", "the name of the input for the prompt");
    let text = tensor(&keys, "text", "the name of the output with the next piece of text");
    let fields = further_fields(&keys, prompt.as_deref());
    let finish_reason = optional_tensor(&keys, "finish_reason");
    let usage = usage(&keys);
    Some(CompletionsMapping { prompt: prompt?, text: text?, fields, finish_reason, usage })
}

fn tensor(keys: &Fields<'_>, key: &'static str, what: &str) -> Option<String> {
    let value = keys.required(key, &format!("give {what}"))?;
    value.text().map(str::to_owned)
}

fn optional_tensor(keys: &Fields<'_>, key: &'static str) -> Option<String> {
    keys.optional(key, |value| value.text().map(str::to_owned))
}

/// Reads the outputs with the numbers of tokens. Clients expect both numbers, or no usage.
fn usage(keys: &Fields<'_>) -> Option<UsageMapping> {
    let (prompt, completion) = ("prompt_tokens", "completion_tokens");
    match (optional_tensor(keys, prompt), optional_tensor(keys, completion)) {
        (Some(prompt_tokens), Some(completion_tokens)) => {
            Some(UsageMapping { prompt_tokens, completion_tokens })
        }
        (None, None) => None,
        (given, _) => {
            let (given, missing) = if given.is_some() { (prompt, completion) } else { (completion, prompt) };
            keys.fault(
                given,
                format!("usage has both numbers of tokens; add `{missing}`, or remove the key"),
            );
            None
        }
    }
}

/// Reads the inputs for further fields. No two fields can have the same input.
fn further_fields(keys: &Fields<'_>, prompt: Option<&str>) -> BTreeMap<String, FieldMapping> {
    let mut fields: BTreeMap<String, FieldMapping> = BTreeMap::new();
    for (name, value) in keys.get("fields").iter().flat_map(Value::any_fields) {
        if CompletionsMapping::RESERVED.contains(&name) {
            value.fault("this field has a fixed meaning; remove it");
        }
        let keys = value.fields();
        let Some(input) = tensor(&keys, "input", "the name of the input for the field") else { continue };
        let is_mapped = prompt == Some(&*input) || fields.values().any(|other| other.input == input);
        if is_mapped {
            keys.fault("input", "another field is mapped to this input; use one field for each input");
        }
        let default = keys.optional("default", |value| json(value));
        fields.insert(name.to_owned(), FieldMapping { input, default });
    }
    fields
}

/// Reads a number or a boolean without quotes, or a text.
fn json(value: &Value<'_>) -> Option<Json> {
    let text = value.text()?;
    let parsed = value.is_plain().then(|| serde_json::from_str(text).ok()).flatten();
    let scalar = parsed.filter(|json: &Json| json.is_number() || json.is_boolean());
    Some(scalar.unwrap_or_else(|| Json::from(text)))
}
