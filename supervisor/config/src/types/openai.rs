//! The mapping from OpenAI's endpoints to the tensors of a model.

use std::collections::BTreeMap;

use serde_json::Value;

/// The endpoints of OpenAI's API that a model serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenAiConfig {
    /// The tensors for `/v1/embeddings`, or `None` if the model does not serve this endpoint.
    pub embeddings: Option<EmbeddingsMapping>,
    /// The tensors for `/v1/completions`, or `None` if the model does not serve this endpoint.
    pub completions: Option<CompletionsMapping>,
}

/// The tensors for `/v1/embeddings`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddingsMapping {
    /// The input for the texts or tokens.
    pub input: String,
    /// The output with the vectors.
    pub embedding: String,
    /// The output with the number of tokens. Without it, answers report no usage.
    pub prompt_tokens: Option<String>,
}

/// The tensors for `/v1/completions`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompletionsMapping {
    /// The input for the prompt.
    pub prompt: String,
    /// The output with the next piece of text.
    pub text: String,
    /// The inputs for further fields of a request, by the name of the field.
    pub fields: BTreeMap<String, FieldMapping>,
    /// The output with the reason for the end.
    pub finish_reason: Option<String>,
    /// The outputs with the numbers of tokens. Without them, answers report no usage.
    pub usage: Option<UsageMapping>,
}

/// The input for a field of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldMapping {
    /// The name of the input.
    pub input: String,
    /// The number, boolean or text that applies if a request omits the field. `None` means that the
    /// input is then omitted, too.
    pub default: Option<Value>,
}

/// The outputs with the numbers of tokens. Those of the last answer count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageMapping {
    /// The output with the number of tokens in the prompt.
    pub prompt_tokens: String,
    /// The output with the number of tokens in the completion.
    pub completion_tokens: String,
}

impl CompletionsMapping {
    /// The fields of a request that have a fixed meaning, so that no mapping can name them.
    pub const RESERVED: [&str; 8] =
        ["model", "prompt", "stream", "stream_options", "n", "best_of", "echo", "logprobs"];
}
