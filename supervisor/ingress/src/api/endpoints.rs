//! The endpoints of HTTP other than inferences.

use std::sync::Arc;

use hyper::header::{ALLOW, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::{Pieces, RequestFailure};
use shadowslice_datapath::router::Route;

use super::answers::{document, empty, error, refusal};
use super::frontend::Frontend;
use super::inference::Target;
use super::routes::{Endpoint, MemoryEndpoint, ModelEndpoint};
use super::{describe, model, repository, statistics, trace, unsupported};
use crate::admission::{Clipped, RequestError, peer};
use crate::proto::system_shared_memory_status_response::RegionStatus;
use crate::tensors::{Regions, parse_object};
use crate::transport::HttpAnswer;

/// The work for a request, according to its head.
pub(super) enum Dispatch {
    /// The head is sufficient for the answer, as for health and for refusals.
    Answered(HttpAnswer),
    /// An inference. Clients that name a wrong model are refused before they send tensors.
    Infer(Target),
    Other(Endpoint),
}

pub(super) fn dispatch(front: &Frontend, head: &Parts) -> Dispatch {
    let Some(endpoint) = Endpoint::parse(head.uri.path()) else {
        let path = Clipped(head.uri.path());
        return Dispatch::Answered(error(StatusCode::NOT_FOUND, &format!("path {path} not found")));
    };
    if !endpoint.accepts(&head.method) {
        let allow = if endpoint.method() == Method::GET { "GET, HEAD" } else { "POST" };
        let message = format!("this path accepts {allow}, not {}", Clipped(head.method.as_str()));
        let mut response = error(StatusCode::METHOD_NOT_ALLOWED, &message);
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
        return Dispatch::Answered(response);
    }
    match endpoint {
        Endpoint::Live => Dispatch::Answered(empty(StatusCode::OK)),
        Endpoint::Ready if front.router.ready() => Dispatch::Answered(empty(StatusCode::OK)),
        Endpoint::Ready => Dispatch::Answered(empty(StatusCode::BAD_REQUEST)),
        Endpoint::Model { name, version, endpoint: ModelEndpoint::Infer } => {
            let route = model::find(&front.router, &name, &version);
            let journal = trace::journal(&head.extensions);
            match route.and_then(|route| Target::new(route, name, None, journal)) {
                Ok(target) => Dispatch::Infer(target),
                Err(why) => Dispatch::Answered(refusal(&why, head)),
            }
        }
        endpoint => Dispatch::Other(endpoint),
    }
}

pub(super) async fn answer(
    front: &Frontend,
    endpoint: Endpoint,
    head: &Parts,
    body: Pieces,
) -> Result<HttpAnswer, RequestError> {
    Ok(match endpoint {
        Endpoint::Live | Endpoint::Ready => empty(StatusCode::OK),
        Endpoint::Server => document(&describe::server(front.regions.allowed())),
        Endpoint::Memory { is_cuda: false, name, endpoint } => {
            answer_memory(&front.regions, peer(&head.extensions), name, endpoint, &body.into_bytes())?
        }
        Endpoint::Memory { is_cuda: true, name, endpoint } => answer_cuda(&name, endpoint)?,
        Endpoint::Unsupported(extension) => return Err(unsupported::extension(extension)),
        Endpoint::Statistics => document(&statistics::of(front.router.models())),
        Endpoint::Repository(endpoint) => {
            let by = Arc::clone(peer(&head.extensions));
            repository::answer(&front.repository, by, endpoint, &body.into_bytes()).await?
        }
        Endpoint::Model { name, version, endpoint } => {
            let route = model::find(&front.router, &name, &version)?;
            answer_model(front, &name, route, endpoint)?
        }
    })
}

fn answer_model(
    front: &Frontend,
    name: &str,
    route: Route,
    endpoint: ModelEndpoint,
) -> Result<HttpAnswer, RequestError> {
    Ok(match endpoint {
        ModelEndpoint::Ready => match model::ready(&front.router, name, &route) {
            Ok(()) => empty(StatusCode::OK),
            Err(why) => error(StatusCode::BAD_REQUEST, &format!("model '{name}' is not ready: {why}")),
        },
        ModelEndpoint::Statistics => document(&statistics::of(vec![(name.to_owned(), route)])),
        ModelEndpoint::Config => {
            document(&describe::config(&*model::metadata(&route, name)?, route.pipeline().content()))
        }
        ModelEndpoint::Metadata | ModelEndpoint::Infer => {
            document(&describe::model(&*model::metadata(&route, name)?))
        }
    })
}

#[derive(Deserialize)]
#[serde(expecting = "an object with `key` and `byte_size`")]
struct Register {
    key: String,
    #[serde(default)]
    offset: u64,
    byte_size: u64,
}

fn answer_memory(
    regions: &Regions,
    by: &Peer,
    name: String,
    endpoint: MemoryEndpoint,
    body: &[u8],
) -> Result<HttpAnswer, RequestError> {
    match endpoint {
        MemoryEndpoint::Status => return Ok(document(&regions.status(by, &name)?)),
        MemoryEndpoint::Register => {
            let form = "an object with `key` and `byte_size`";
            let Register { key, offset, byte_size } = parse_object(body, form)
                .map_err(|why| RequestFailure::Invalid(format!("failed to parse the request JSON: {why}")))?;
            regions.register(by, RegionStatus { name, key, offset, byte_size })?;
        }
        MemoryEndpoint::Unregister => regions.unregister(by, &name)?,
    }
    Ok(empty(StatusCode::OK))
}

fn answer_cuda(name: &str, endpoint: MemoryEndpoint) -> Result<HttpAnswer, RequestError> {
    match endpoint {
        MemoryEndpoint::Status => {
            unsupported::cuda_status(name)?;
            Ok(document(&json!([])))
        }
        MemoryEndpoint::Register => Err(unsupported::register_cuda(name)),
        MemoryEndpoint::Unregister => Ok(empty(StatusCode::OK)),
    }
}
