//! The endpoints of HTTP other than inferences.

use std::collections::HashMap;

use hyper::header::{ALLOW, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use shadowslice_datapath::pipeline::{Pieces, RequestFailure};

use super::answers::{document, empty, error, error_at, refusal};
use super::frontend::Frontend;
use super::generate::GenerateForm;
use super::inference::Target;
use super::openai::{self, OpenAiEndpoint};
use super::routes::{ApiPath, Endpoint};
use super::{describe, model, repository, statistics, trace, unsupported};
use crate::admission::{Clipped, RequestError, peer};
use crate::proto::system_shared_memory_status_response::RegionStatus;
use crate::tensors::parse_object;
use crate::transport::HttpAnswer;

/// The options of a request about the repository.
#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
struct Options {
    /// True if only models that are ready are wanted.
    ready: bool,
    parameters: HashMap<String, Value>,
}

/// Parses options. An empty body has none.
fn options(body: &[u8]) -> Result<Options, RequestFailure> {
    if body.is_empty() { Ok(Options::default()) } else { parse_object(body, "an object") }
}

const REGISTER: &str = "an object with `key` and `byte_size`";

#[derive(Deserialize)]
#[serde(expecting = "an object with `key` and `byte_size`")]
struct Register {
    key: String,
    #[serde(default)]
    offset: u64,
    byte_size: u64,
}

/// The work for a request, according to its head.
pub(super) enum Dispatch {
    /// The head is sufficient for the answer, as for health and for refusals.
    Answered(HttpAnswer),
    /// An inference. Clients that name a wrong model are refused before they send tensors.
    Infer(Target),
    Generate(Target, GenerateForm),
    /// A request to OpenAI's API, with the name of the model in the path.
    OpenAi(OpenAiEndpoint, String),
    Other(ApiPath),
}

pub(super) fn dispatch(front: &Frontend, head: &Parts) -> Dispatch {
    let Some(path) = ApiPath::parse(head.uri.path()) else {
        let path = Clipped(head.uri.path());
        let message = format!("path {path} not found");
        return Dispatch::Answered(error_at(head.uri.path(), StatusCode::NOT_FOUND, &message));
    };
    if !path.endpoint.accepts(&head.method) {
        let allow = if path.endpoint.method() == Method::GET { "GET, HEAD" } else { "POST" };
        let message = format!("this path accepts {allow}, not {}", Clipped(head.method.as_str()));
        let mut response = error_at(head.uri.path(), StatusCode::METHOD_NOT_ALLOWED, &message);
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
        return Dispatch::Answered(response);
    }
    match path.endpoint {
        Endpoint::Live => Dispatch::Answered(empty(StatusCode::OK)),
        Endpoint::Ready if front.router.ready() => Dispatch::Answered(empty(StatusCode::OK)),
        Endpoint::Ready => Dispatch::Answered(empty(StatusCode::BAD_REQUEST)),
        Endpoint::Infer => find_target(front, path, head, Dispatch::Infer),
        Endpoint::Generate => {
            find_target(front, path, head, |target| Dispatch::Generate(target, GenerateForm::Object))
        }
        Endpoint::GenerateStream => {
            find_target(front, path, head, |target| Dispatch::Generate(target, GenerateForm::Events))
        }
        Endpoint::OpenAi(endpoint) => Dispatch::OpenAi(endpoint, path.name),
        _ => Dispatch::Other(path),
    }
}

fn find_target(
    front: &Frontend,
    path: ApiPath,
    head: &Parts,
    dispatch: impl FnOnce(Target) -> Dispatch,
) -> Dispatch {
    let route = model::select(&front.router, &path.name, &path.version, &head.headers);
    let journal = trace::journal(&head.extensions);
    match route.and_then(|route| Target::new(route, path.name, None, journal)) {
        Ok(target) => dispatch(target),
        Err(why) => Dispatch::Answered(refusal(&why, head)),
    }
}

pub(super) async fn answer(
    front: &Frontend,
    ApiPath { endpoint, name, version }: ApiPath,
    head: &Parts,
    body: Pieces,
) -> Result<HttpAnswer, RequestError> {
    let by = peer(&head.extensions);
    let route = || model::find(&front.router, &name, &version);
    let body = body.into_bytes();
    Ok(match endpoint {
        Endpoint::Live | Endpoint::Ready => empty(StatusCode::OK),
        Endpoint::Server => document(&describe::server(front.regions.allowed())),
        Endpoint::Metadata | Endpoint::Infer | Endpoint::Generate | Endpoint::GenerateStream => {
            let metadata = model::metadata(&route()?, &name)?;
            document(&describe::model(&metadata, &front.router.versions(&name)))
        }
        Endpoint::ModelReady => match model::ready(&front.router, &name, &route()?) {
            Ok(()) => empty(StatusCode::OK),
            Err(why) => error(StatusCode::BAD_REQUEST, &format!("model '{name}' is not ready: {why}")),
        },
        Endpoint::Config => {
            let route = route()?;
            document(&describe::config(&*model::metadata(&route, &name)?, route.pipeline().content()))
        }
        Endpoint::Statistics => document(&statistics::of(&front.router, &name, &version)?),
        Endpoint::Index => {
            let Options { ready, .. } = options(&body)?;
            document(&repository::index(&front.repository, ready).models)
        }
        Endpoint::Load => {
            let texts = options(&body)?.parameters.into_iter();
            let texts = texts.map(|(name, value)| (name, value.as_str().map(str::to_owned)));
            repository::load(&front.repository, by, name, texts).await?;
            empty(StatusCode::OK)
        }
        Endpoint::Unload => {
            let Options { .. } = options(&body)?;
            repository::unload(&front.repository, by, name).await?;
            empty(StatusCode::OK)
        }
        Endpoint::RegionStatus => document(&front.regions.status(by, &name)?),
        Endpoint::RegisterRegion => {
            let Register { key, offset, byte_size } = parse_object(&body, REGISTER)?;
            front.regions.register(by, RegionStatus { name, key, offset, byte_size })?;
            empty(StatusCode::OK)
        }
        Endpoint::UnregisterRegion => {
            front.regions.unregister(by, &name)?;
            empty(StatusCode::OK)
        }
        Endpoint::CudaStatus => {
            unsupported::cuda_status(&name)?;
            document(&json!([]))
        }
        Endpoint::RegisterCuda => return Err(unsupported::register_cuda(&name)),
        Endpoint::UnregisterCuda => empty(StatusCode::OK),
        Endpoint::Tracing => return Err(unsupported::extension(unsupported::TRACING)),
        Endpoint::Logging => return Err(unsupported::extension(unsupported::LOGGING)),
        Endpoint::OpenAi(_) => openai::list(&front.router),
    })
}
