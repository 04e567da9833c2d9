//! OpenAI's endpoints for models whose configuration maps them to tensors.

mod completion_request;
mod completion_text;
mod completions;
mod embedding_request;
mod embeddings;
mod error;
mod mapping;
mod models;

use std::sync::Arc;

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::http::request::Parts;
use serde::Deserialize;
use shadowslice_datapath::pipeline::Pieces;
use shadowslice_datapath::router::Router;
use shadowslice_datapath::trace::Journal;

use super::frontend::Frontend;
use super::inference::LONG_JSON_BYTES;
use super::{http_infer, trace};
use crate::admission::{MemoryPermit, run_blocking};
use crate::tensors::FieldObject;
use crate::transport::HttpAnswer;
use error::OpenAiError;
pub(super) use error::body as error_body;
pub(super) use models::list;

/// The start of the paths of OpenAI's API.
pub(super) const PREFIX: &str = "/v1/";

/// An endpoint of OpenAI's API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OpenAiEndpoint {
    Embeddings,
    Completions,
    Models,
    /// The description of one model.
    Model,
}

impl OpenAiEndpoint {
    pub(super) fn is_inference(self) -> bool {
        matches!(self, Self::Embeddings | Self::Completions)
    }
}

/// Answers a request. `name` is the model in the path, if the path has one.
pub(super) async fn answer(
    front: &Frontend,
    (endpoint, name): (OpenAiEndpoint, &str),
    head: &Parts,
    body: Pieces,
    permit: &Arc<MemoryPermit>,
) -> HttpAnswer {
    let answered = match endpoint {
        OpenAiEndpoint::Embeddings => embeddings::answer(front, head, body, permit).await,
        OpenAiEndpoint::Completions => completions::answer(front, head, body, permit).await,
        OpenAiEndpoint::Models => Ok(models::list(&front.router)),
        OpenAiEndpoint::Model => models::one(&front.router, name),
    };
    answered.unwrap_or_else(|why| {
        permit.take_deliveries().mark_failed(&why.why);
        permit.shrink_to(0);
        why.answer(head)
    })
}

/// The parts that are needed to read a request.
struct Preparation {
    router: Arc<Router>,
    headers: HeaderMap,
    body: Bytes,
    journal: Option<Journal>,
    permit: Arc<MemoryPermit>,
}

/// Reads a request on this thread, or on another thread if the request is long.
async fn prepare<T: Send + 'static>(
    front: &Frontend,
    head: &Parts,
    body: Pieces,
    permit: &Arc<MemoryPermit>,
    read: fn(&Preparation) -> Result<T, OpenAiError>,
) -> Result<T, OpenAiError> {
    let (body, decompression) = http_infer::decompress(front, &head.headers, body, permit).await?;
    let journal = trace::journal(&head.extensions).cloned();
    let (router, permit) = (Arc::clone(&front.router), Arc::clone(permit));
    let preparation =
        Preparation { router, headers: head.headers.clone(), body: permit.join(body)?, journal, permit };
    if preparation.body.len() < LONG_JSON_BYTES {
        return read(&preparation);
    }
    run_blocking("parsing the request", move || {
        let _decompression = decompression;
        read(&preparation)
    })
    .await
}

/// Removes and parses a field that each request must have.
fn required<'a, T: Deserialize<'a>>(
    fields: &mut FieldObject<'a>,
    name: &str,
    expected: &str,
) -> Result<T, OpenAiError> {
    let value = fields.take_as(name, expected).map_err(|why| OpenAiError::of_field(name, why.into()))?;
    value.ok_or_else(|| OpenAiError::field(name, "is missing"))
}
