//! `/v1/completions`: the text that continues a prompt, whole or as events.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::StreamExt;
use hyper::http::request::Parts;
use serde_json::{Value, json};
use shadowslice_config::CompletionsMapping;
use shadowslice_datapath::pipeline::{Metadata, Pieces, RequestFailure};

use super::completion_request::CompletionCall;
use super::completion_text::{CompletionPiece, CompletionText};
use super::error::{OpenAiError, body as error_body};
use super::mapping::{self, MappedModel, MappedName, TensorKind};
use super::{Preparation, prepare, required};
use crate::admission::{MemoryPermit, RequestError, peer};
use crate::api::event_stream::{self, EventWriter, json_event};
use crate::api::frontend::Frontend;
use crate::api::http_infer;
use crate::api::inference::{ModelAnswer, ModelAnswers, tensor_bytes};
use crate::tensors::{FieldObject, OutputTensor};
use crate::transport::HttpAnswer;

const ENDPOINT: &str = "/v1/completions";

const DONE: &[u8] = b"data: [DONE]\n\n";

/// The maximum size in bytes of the JSON around a piece of text, with the names of the model and of
/// the completion, and the usage.
const CHUNK_BYTES: usize = 2048;

/// The maximum number of characters of JSON for a byte of text.
const BYTE_CHARACTERS: usize = 6;

pub(super) async fn answer(
    front: &Frontend,
    head: &Parts,
    body: Pieces,
    permit: &Arc<MemoryPermit>,
) -> Result<HttpAnswer, OpenAiError> {
    let (MappedModel { target, mapping }, call) = prepare(front, head, body, permit, read).await?;
    let arrival = http_infer::arrival(front, target.route.pipeline(), head)?;
    let request = mapping::request(call.inputs, output_names(&mapping));
    let parse = async { Ok(request) };
    let checked = target.receive(front, peer(&head.extensions), &arrival, permit, parse).await?;
    let (journal, streams) = (arrival.journal.clone(), target.metadata.streams.is_some());
    let (start, text) = (CompletionHead::new(&target.name), CompletionText::new(mapping));
    let answers = target.open(checked, arrival).await?;
    if call.streams {
        let events = CompletionEvents { head: start, text, includes_usage: call.includes_usage };
        return Ok(event_stream::respond(answers, events, journal, permit.clone()).await?);
    }
    let json = join(answers, start, text, streams, permit).await?;
    Ok(http_infer::respond_json(json.to_string().into_bytes(), &head.headers, permit).await?)
}

fn read(preparation: &Preparation) -> Result<(MappedModel<CompletionsMapping>, CompletionCall), OpenAiError> {
    let Preparation { body, permit, .. } = preparation;
    let mut fields = FieldObject::parse(body, permit)?;
    let name: String = required(&mut fields, "model", "a string")?;
    let of = |mapping: &shadowslice_config::OpenAiConfig| mapping.completions.clone();
    let model = mapping::find(preparation, name, ENDPOINT, of)?;
    let MappedModel { target, mapping } = &model;
    check(&target.metadata, mapping)?;
    let call = CompletionCall::read(fields, mapping, &target.metadata, permit)
        .inspect_err(|_| target.route.pipeline().count_malformed())?;
    Ok((model, call))
}

fn output_names(mapping: &CompletionsMapping) -> impl Iterator<Item = &str> {
    let usage = mapping.usage.iter().flat_map(|usage| [&usage.prompt_tokens, &usage.completion_tokens]);
    std::iter::once(&mapping.text).chain(&mapping.finish_reason).chain(usage).map(String::as_str)
}

fn check(model: &Metadata, mapping: &CompletionsMapping) -> Result<(), RequestFailure> {
    let at = |key, name, kind| MappedName { key, name, kind };
    let prompt = at("openai.completions.prompt", mapping.prompt.as_str(), TensorKind::Text);
    let fields =
        mapping.fields.values().map(|field| at("openai.completions.fields", &field.input, TensorKind::Any));
    let text = at("openai.completions.text", mapping.text.as_str(), TensorKind::Text);
    let reason = mapping.finish_reason.iter();
    let reason = reason.map(|name| at("openai.completions.finish_reason", name, TensorKind::Text));
    let usage = mapping.usage.iter().flat_map(|usage| {
        [
            at("openai.completions.prompt_tokens", &usage.prompt_tokens, TensorKind::Integer),
            at("openai.completions.completion_tokens", &usage.completion_tokens, TensorKind::Integer),
        ]
    });
    let inputs: Vec<_> = std::iter::once(prompt).chain(fields).collect();
    let outputs: Vec<_> = std::iter::once(text).chain(reason).chain(usage).collect();
    mapping::check(model, &inputs, &outputs)
}

/// Returns the completion with the texts of all answers.
async fn join(
    mut answers: ModelAnswers,
    head: CompletionHead,
    mut text: CompletionText,
    streams: bool,
    permit: &MemoryPermit,
) -> Result<Value, RequestError> {
    let mut whole = CompletionPiece { text: String::new(), finish_reason: None };
    while let Some(answer) = answers.next().await.transpose()? {
        let ModelAnswer { outputs, mut deliveries } = answer;
        if streams {
            // The SLO of a model that streams applies to the first answer, whenever it is written.
            deliveries.mark_written();
        }
        permit.add_deliveries(deliveries);
        let bytes = tensor_bytes(&outputs);
        permit.replace(bytes + (whole.text.len() + bytes) * (1 + BYTE_CHARACTERS))?;
        whole.extend(text.push(&outputs));
    }
    if let Some(end) = text.end() {
        whole.extend(end);
    }
    let mut json = head.json(&whole);
    if let Some(usage) = text.usage() {
        json["usage"] = usage.clone();
    }
    Ok(json)
}

/// The start of a completion and of each of its events.
struct CompletionHead {
    id: String,
    /// The time of the request, in seconds since 1970.
    created: u64,
    model: String,
}

impl CompletionHead {
    fn new(model: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let id = format!("cmpl-{:x}-{:x}", now.as_nanos(), COUNT.fetch_add(1, Relaxed));
        Self { id, created: now.as_secs(), model: model.to_owned() }
    }

    fn json(&self, piece: &CompletionPiece) -> Value {
        let CompletionPiece { text, finish_reason } = piece;
        self.with_choices(json!([
            {"text": text, "index": 0, "logprobs": null, "finish_reason": finish_reason}
        ]))
    }

    fn with_choices(&self, choices: Value) -> Value {
        let Self { id, created, model } = self;
        json!({"id": id, "object": "text_completion", "created": created, "model": model, "choices": choices})
    }
}

/// Writes each answer as a chunk of the completion.
struct CompletionEvents {
    head: CompletionHead,
    text: CompletionText,
    includes_usage: bool,
}

impl CompletionEvents {
    fn chunk(&self, piece: &CompletionPiece) -> Bytes {
        let mut json = self.head.json(piece);
        if self.includes_usage {
            json["usage"] = Value::Null;
        }
        json_event(&json)
    }
}

impl EventWriter for CompletionEvents {
    fn max_bytes(&self, outputs: &[OutputTensor]) -> usize {
        // The event is copied once.
        CHUNK_BYTES + 2 * BYTE_CHARACTERS * tensor_bytes(outputs)
    }

    fn answer(&mut self, outputs: &[OutputTensor]) -> Result<Bytes, RequestError> {
        let piece = self.text.push(outputs);
        Ok(self.chunk(&piece))
    }

    fn end(&mut self) -> Bytes {
        let mut end = Vec::new();
        if let Some(piece) = self.text.end() {
            end.extend_from_slice(&self.chunk(&piece));
        }
        if let Some(usage) = self.text.usage().filter(|_| self.includes_usage) {
            let mut json = self.head.with_choices(json!([]));
            json["usage"] = usage.clone();
            end.extend_from_slice(&json_event(&json));
        }
        end.extend_from_slice(DONE);
        end.into()
    }

    fn failure(why: &RequestError) -> Bytes {
        json_event(&error_body(why.status(), &why.message(), None, None))
    }
}
