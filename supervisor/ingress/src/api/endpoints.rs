//! The endpoints of HTTP other than inferences.

use std::sync::Arc;

use hyper::header::{ALLOW, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use shadowslice_datapath::pipeline::Pieces;
use shadowslice_datapath::router::Route;

use super::answers::{document, empty, error, refusal};
use super::frontend::Frontend;
use super::inference::Target;
use super::routes::{Endpoint, ModelEndpoint};
use super::{describe, memory_routes, model, repository, statistics, trace, unsupported};
use crate::admission::{Clipped, RequestError, peer};
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
            match Target::find(front, name, &version, None, trace::journal(&head.extensions)) {
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
            let by = peer(&head.extensions);
            memory_routes::answer(&front.regions, by, name, endpoint, &body.into_bytes())?
        }
        Endpoint::Memory { is_cuda: true, name, endpoint } => memory_routes::answer_cuda(&name, endpoint)?,
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
