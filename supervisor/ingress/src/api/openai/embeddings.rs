//! `/v1/embeddings`: the vectors of texts, or of lists of tokens.

use std::sync::Arc;
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use hyper::http::request::Parts;
use serde::Serialize;
use serde_json::Value;
use shadowslice_config::{EmbeddingsMapping, OpenAiConfig};
use shadowslice_datapath::pipeline::{Metadata, Pieces, RequestArrival, RequestFailure};

use super::completion_text::usage_json;
use super::embedding_request::EmbeddingCall;
use super::error::OpenAiError;
use super::mapping::{self, MappedModel, MappedName, TensorKind, fault, output, sum};
use super::{Preparation, prepare, required};
use crate::admission::{MemoryPermit, RequestError, peer, run_blocking};
use crate::api::frontend::Frontend;
use crate::api::http_infer;
use crate::api::inference::{LONG_JSON_BYTES, Target};
use crate::tensors::{FieldObject, NamedTensor, OutputTensor, floats};
use crate::transport::HttpAnswer;

const ENDPOINT: &str = "/v1/embeddings";

/// The maximum number of characters of JSON for a number of a vector.
const NUMBER_CHARACTERS: usize = 20;

/// The size in bytes of the JSON around a vector.
const ENTRY_BYTES: usize = 64;

pub(super) async fn answer(
    front: &Frontend,
    head: &Parts,
    body: Pieces,
    permit: &Arc<MemoryPermit>,
) -> Result<HttpAnswer, OpenAiError> {
    let (model, call) = prepare(front, head, body, permit, read).await?;
    let MappedModel { target, mapping } = model;
    let EmbeddingCall { requests, encoding, dimensions } = call;
    let mut arrival = http_infer::arrival(front, target.route.pipeline(), head)?;
    let mut found = Embeddings::default();
    let mut waiting: usize = requests.iter().map(|tensor| tensor.data.len()).sum();
    for (place, tensor) in requests.into_iter().enumerate() {
        waiting = waiting.saturating_sub(tensor.data.len());
        if place > 0 {
            // Each request of the call counts by itself. The client waits for the last one.
            permit.take_deliveries().mark_written();
            arrival = next_arrival(arrival);
        }
        let outputs = infer(front, (&target, &mapping), head, (tensor, arrival.clone()), permit).await?;
        found.add(&target.metadata, &mapping, outputs.rows, &outputs.tensors)?;
        permit.replace(found.bytes() + waiting)?;
    }
    let size = found.vectors.first().map_or(0, Vec::len);
    if let Some(wanted) = dimensions.filter(|wanted| *wanted != size as u64) {
        return Err(OpenAiError::field(
            "dimensions",
            &format!("must be {size} for this model, not {wanted}"),
        ));
    }
    permit.replace(2 * found.bytes() + found.json_bytes())?;
    let is_long = found.bytes() >= LONG_JSON_BYTES;
    let write = move || Ok::<_, RequestError>(found.json(&target.name, encoding));
    let json = if is_long { run_blocking("writing the answer", write).await? } else { write()? };
    permit.shrink_to(json.len());
    Ok(http_infer::respond_json(json, &head.headers, permit).await?)
}

fn read(preparation: &Preparation) -> Result<(MappedModel<EmbeddingsMapping>, EmbeddingCall), OpenAiError> {
    let Preparation { body, permit, .. } = preparation;
    let mut fields = FieldObject::parse(body, permit)?;
    let name: String = required(&mut fields, "model", "a string")?;
    let of = |mapping: &OpenAiConfig| mapping.embeddings.clone();
    let model = mapping::find(preparation, name, ENDPOINT, of)?;
    let MappedModel { target, mapping } = &model;
    check(&target.metadata, mapping)?;
    let call = EmbeddingCall::read(fields, &target.metadata, &mapping.input, permit)
        .inspect_err(|_| target.route.pipeline().count_malformed())?;
    Ok((model, call))
}

fn check(model: &Metadata, mapping: &EmbeddingsMapping) -> Result<(), RequestFailure> {
    let at = |key, name, kind| MappedName { key, name, kind };
    let input = at("openai.embeddings.input", mapping.input.as_str(), TensorKind::TextOrTokens);
    let vector = at("openai.embeddings.embedding", mapping.embedding.as_str(), TensorKind::Float);
    let tokens = mapping.prompt_tokens.iter();
    let tokens = tokens.map(|name| at("openai.embeddings.prompt_tokens", name, TensorKind::Integer));
    mapping::check(model, &[input], &std::iter::once(vector).chain(tokens).collect::<Vec<_>>())
}

/// Returns the arrival of the next request of a call, which begins when the one before it has ended.
fn next_arrival(before: RequestArrival) -> RequestArrival {
    let timeout = before.timeout.map(|timeout| timeout.saturating_sub(before.began.elapsed()));
    RequestArrival { began: Instant::now(), timeout, ..before }
}

/// The outputs for some rows of a call.
struct RowOutputs {
    rows: usize,
    tensors: Vec<OutputTensor>,
}

async fn infer(
    front: &Frontend,
    (target, mapping): (&Target, &EmbeddingsMapping),
    head: &Parts,
    (tensor, arrival): (NamedTensor, RequestArrival),
    permit: &MemoryPermit,
) -> Result<RowOutputs, RequestError> {
    let has_batch = target.metadata.max_batch > 0;
    let rows =
        tensor.shape.first().filter(|_| has_batch).map_or(1, |&rows| usize::try_from(rows).unwrap_or(1));
    let outputs = std::iter::once(&mapping.embedding).chain(&mapping.prompt_tokens).map(String::as_str);
    let request = mapping::request(vec![tensor], outputs);
    let parse = async { Ok(request) };
    let checked = target.receive(front, peer(&head.extensions), &arrival, permit, parse).await?;
    let answer = target.infer(checked, arrival, permit).await?;
    Ok(RowOutputs { rows, tensors: answer.outputs })
}

/// The form of a vector in the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum VectorEncoding {
    Float,
    /// The bytes of single-precision floats, in little-endian order.
    Base64,
}

/// The vectors so far.
#[derive(Default)]
struct Embeddings {
    vectors: Vec<Vec<f32>>,
    /// The number of tokens, if the model reports it.
    tokens: Option<i128>,
}

impl Embeddings {
    fn add(
        &mut self,
        model: &Metadata,
        mapping: &EmbeddingsMapping,
        rows: usize,
        outputs: &[OutputTensor],
    ) -> Result<(), RequestFailure> {
        let vectors = output(outputs, &mapping.embedding).filter(|output| is_matrix(&output.shape, rows));
        let vectors = vectors.and_then(|output| floats(output.datatype, &output.data));
        let Some(vectors) = vectors.filter(|vectors| !vectors.is_empty()) else {
            let shape = output(outputs, &mapping.embedding).map(|output| &output.shape[..]);
            let why = format!("expected {rows} vectors, got shape {:?}", shape.unwrap_or_default());
            return Err(fault(model, "openai.embeddings.embedding", &why));
        };
        self.vectors.extend(vectors.chunks(vectors.len() / rows).map(<[f32]>::to_vec));
        if let Some(tokens) = &mapping.prompt_tokens {
            *self.tokens.get_or_insert_default() += sum(outputs, tokens);
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.vectors.iter().map(|vector| size_of_val(&vector[..]) + size_of::<Vec<f32>>()).sum()
    }

    /// Returns the maximum size of the JSON in bytes.
    fn json_bytes(&self) -> usize {
        let entry = |vector: &Vec<f32>| ENTRY_BYTES + vector.len() * NUMBER_CHARACTERS;
        self.vectors.iter().map(entry).sum()
    }

    fn json(&self, model: &str, encoding: VectorEncoding) -> Vec<u8> {
        let entry = |(index, vector): (usize, &Vec<f32>)| EmbeddingEntry {
            object: "embedding",
            index,
            embedding: match encoding {
                VectorEncoding::Float => EmbeddingValue::Numbers(vector.clone()),
                VectorEncoding::Base64 => {
                    let bytes: Vec<u8> = vector.iter().flat_map(|number| number.to_le_bytes()).collect();
                    EmbeddingValue::Text(BASE64.encode(bytes))
                }
            },
        };
        let data = self.vectors.iter().enumerate().map(entry).collect();
        let usage = self.tokens.map(|tokens| usage_json(tokens, None));
        let list = EmbeddingList { object: "list", data, model, usage };
        serde_json::to_vec(&list).expect("only keys that are not strings can fail")
    }
}

/// The answer to a request for embeddings.
#[derive(Serialize)]
struct EmbeddingList<'a> {
    object: &'static str,
    data: Vec<EmbeddingEntry>,
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
}

#[derive(Serialize)]
struct EmbeddingEntry {
    object: &'static str,
    index: usize,
    embedding: EmbeddingValue,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EmbeddingValue {
    Numbers(Vec<f32>),
    Text(String),
}

/// Returns whether a shape has a vector for each row. Axes of size 1 do not count.
fn is_matrix(shape: &[i64], rows: usize) -> bool {
    let rows = i64::try_from(rows).unwrap_or(i64::MAX);
    let inner = if rows > 1 { shape.strip_prefix(&[rows]) } else { Some(shape) };
    inner.is_some_and(|inner| inner.iter().filter(|axis| **axis != 1).count() <= 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_must_have_one_vector() {
        for (shape, rows) in
            [(&[3][..], 1), (&[1, 3], 1), (&[2, 3], 2), (&[2, 1, 3], 2), (&[2], 2), (&[1, 1], 1)]
        {
            assert!(is_matrix(shape, rows), "{shape:?}");
        }
        for (shape, rows) in [(&[2, 3][..], 1), (&[3, 2], 2), (&[2, 3, 4], 2), (&[6], 2), (&[], 2)] {
            assert!(!is_matrix(shape, rows), "{shape:?}");
        }
    }

    #[test]
    fn vectors_are_numbers_or_base64() {
        let embeddings = Embeddings { vectors: vec![vec![1.0, -0.1]], tokens: Some(3) };
        let json = |encoding| String::from_utf8(embeddings.json("m", encoding)).unwrap();
        let numbers = json(VectorEncoding::Float);
        let usage = r#""model":"m","usage":{"prompt_tokens":3,"total_tokens":3}}"#;
        assert!(numbers.contains("[1.0,-0.1]") && numbers.ends_with(usage), "{numbers}");
        assert!(json(VectorEncoding::Base64).contains("\"AACAP83MzL0=\""));
    }
}
