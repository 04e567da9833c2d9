//! Triton's generate extension: inferences with the inputs and outputs as fields of a JSON object.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt;
use hyper::HeaderMap;
use hyper::http::request::Parts;
use serde_json::json;
use shadowslice_datapath::pipeline::{Metadata, Pieces};

use super::event_stream::{self, EventWriter, event, json_event};
use super::frontend::Frontend;
use super::inference::{LONG_JSON_BYTES, ModelAnswer, ModelAnswers, Target, tensor_bytes};
use super::{http_infer, load_metrics};
use crate::admission::{MemoryPermit, RequestError, invalid, peer, run_blocking};
use crate::tensors::{InferRequest, OutputTensor, field_bytes, parse_generate, write_fields};
use crate::transport::HttpAnswer;

/// The form of the answer to a generate request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GenerateForm {
    /// One JSON object. The model must give exactly one answer.
    Object,
    /// An event for each answer.
    Events,
}

pub(super) async fn answer(
    front: &Frontend,
    (target, form): (Target, GenerateForm),
    head: &Parts,
    body: Pieces,
    permit: &Arc<MemoryPermit>,
) -> Result<HttpAnswer, RequestError> {
    let arrival = http_infer::arrival(front, target.route.pipeline(), head)?;
    let parse = parse(front, &head.headers, body, &target.metadata, permit);
    let checked = target.receive(front, peer(&head.extensions), &arrival, permit, parse).await?;
    let writer = FieldWriter { metadata: Arc::clone(&target.metadata), id: checked.id.clone() };
    let load = load_metrics::header(&head.headers, || target.route.pipeline().load());
    let journal = arrival.journal.clone();
    let answers = target.open(checked, arrival).await?;
    let mut answer = match form {
        GenerateForm::Object => object(answers, writer, &head.headers, permit).await?,
        GenerateForm::Events => event_stream::respond(answers, writer, journal, permit.clone()).await?,
    };
    load_metrics::add(&mut answer, load);
    Ok(answer)
}

async fn parse(
    front: &Frontend,
    headers: &HeaderMap,
    body: Pieces,
    metadata: &Arc<Metadata>,
    permit: &Arc<MemoryPermit>,
) -> Result<InferRequest, RequestError> {
    let (body, decompression) = http_infer::decompress(front, headers, body, permit).await?;
    if body.len() < LONG_JSON_BYTES {
        return parse_generate(body, metadata, permit);
    }
    let (metadata, permit) = (metadata.clone(), permit.clone());
    run_blocking("parsing the request", move || {
        let _decompression = decompression;
        parse_generate(body, &metadata, &permit)
    })
    .await
}

/// Returns the only answer of a model.
async fn object(
    mut answers: ModelAnswers,
    writer: FieldWriter,
    headers: &HeaderMap,
    permit: &Arc<MemoryPermit>,
) -> Result<HttpAnswer, RequestError> {
    let Some(first) = answers.next().await.transpose()? else { return many() };
    let ModelAnswer { outputs, deliveries } = first;
    permit.add_deliveries(deliveries);
    if answers.next().await.transpose()?.is_some() {
        return many();
    }
    let bytes = tensor_bytes(&outputs) + field_bytes(&writer.id, &outputs);
    permit.replace(bytes)?;
    let write = move || {
        let mut json = Vec::new();
        write_fields(&writer.metadata, &writer.id, &outputs, &mut json).map(|()| json)
    };
    let json = match bytes < LONG_JSON_BYTES {
        true => write()?,
        false => run_blocking("writing the answer", write).await?,
    };
    permit.shrink_to(json.len());
    http_infer::respond_json(json, headers, permit).await
}

fn many<T>() -> Result<T, RequestError> {
    invalid("generate needs a model with exactly one answer to a request; use generate_stream".to_owned())
}

/// Writes each answer as an object with the outputs.
struct FieldWriter {
    metadata: Arc<Metadata>,
    /// The client's name for the request.
    id: String,
}

impl EventWriter for FieldWriter {
    fn max_bytes(&self, outputs: &[OutputTensor]) -> usize {
        field_bytes(&self.id, outputs)
    }

    fn answer(&mut self, outputs: &[OutputTensor]) -> Result<Bytes, RequestError> {
        Ok(event(|json| write_fields(&self.metadata, &self.id, outputs, json))?)
    }

    fn end(&mut self) -> Bytes {
        Bytes::new()
    }

    fn failure(why: &RequestError) -> Bytes {
        json_event(&json!({"error": why.message()}))
    }
}
