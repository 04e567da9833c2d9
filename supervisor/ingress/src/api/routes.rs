//! HTTP's requests, from their paths to their answers.

use std::sync::Arc;

use hyper::header::{ACCEPT_ENCODING, ALLOW, CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Response, StatusCode};
use percent_encoding::percent_decode_str;

use crate::Frontend;
use crate::admission::caller;
use crate::admission::memory_permit::Reserved;
use crate::admission::request_error::{RequestError, away, invalid};
use crate::api::describe;
use crate::api::http::{Answer, document, empty, error};
use crate::api::load_metrics;
use crate::api::memory_routes;
use crate::api::model;
use crate::api::model::Answered;
use crate::api::repository;
use crate::api::statistics;
use crate::api::traced;
use crate::api::unsupported;
use crate::tensors::answer;
use crate::tensors::check::{self, Clipped};
use crate::tensors::json::{self, Form, HttpRequest};
use crate::transport::compression::{self, Encoding};
use shadowslice_datapath::pipeline::{Metadata, Pieces, RequestFailure};
use shadowslice_datapath::router;

const HEADER_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

/// JSON longer than this, in bytes, is parsed away from the threads that serve connections, as
/// tensors longer than this are written as JSON: values are slow to write.
const LONG_JSON_BYTES: usize = 256 * 1024;

/// No path that means something has more segments behind `/v2`.
const MAX_SEGMENTS: usize = 5;

const WORTH_COMPRESSING_BYTES: usize = 256;

const SYSTEM_MEMORY: &str = "systemsharedmemory";
const CUDA_MEMORY: &str = "cudasharedmemory";

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Live,
    Ready,
    Server,
    Statistics,
    Repository(repository::Route),
    Model {
        name: String,
        version: String,
        what: What,
    },
    /// Shared memory: a region's name, or no name for all regions.
    Memory {
        cuda: bool,
        name: String,
        what: OfMemory,
    },
    Absent(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OfMemory {
    Status,
    Register,
    Unregister,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Metadata,
    Ready,
    Config,
    Statistics,
    Infer,
}

impl Route {
    /// Names are percent-decoded after the path is split, so that they may hold slashes.
    pub(crate) fn parse(path: &str) -> Option<Self> {
        let mut segments = [""; MAX_SEGMENTS];
        let mut count = 0;
        for segment in path.strip_prefix("/v2")?.split('/').skip(1) {
            *segments.get_mut(count)? = segment;
            count += 1;
        }
        let (model, version, what) = match segments[..count] {
            [] if path == "/v2" => return Some(Self::Server),
            [""] => return Some(Self::Server),
            ["health", "live"] => return Some(Self::Live),
            ["health", "ready"] => return Some(Self::Ready),
            [kind @ (SYSTEM_MEMORY | CUDA_MEMORY), what] => return Self::memory(kind, "", what),
            [kind @ (SYSTEM_MEMORY | CUDA_MEMORY), "region", name, what] => {
                return Self::memory(kind, name, what);
            }
            ["trace", "setting"] | ["models", _, "trace", "setting"] => {
                return Some(Self::Absent(unsupported::TRACING));
            }
            ["logging"] => return Some(Self::Absent(unsupported::LOGGING)),
            ["models", "stats"] => return Some(Self::Statistics),
            ["repository", "index"] => return Some(Self::Repository(repository::Route::Index)),
            ["repository", "models", model, "load"] => {
                return Some(Self::Repository(repository::Route::Load(decoded(model)?)));
            }
            ["repository", "models", model, "unload"] => {
                return Some(Self::Repository(repository::Route::Unload(decoded(model)?)));
            }
            ["models", model] => (model, "", ""),
            ["models", model, "versions", version] => (model, version, ""),
            ["models", model, what] => (model, "", what),
            ["models", model, "versions", version, what] => (model, version, what),
            _ => return None,
        };
        let what = match what {
            "" => What::Metadata,
            "ready" => What::Ready,
            "config" => What::Config,
            "stats" => What::Statistics,
            "infer" => What::Infer,
            _ => return None,
        };
        Some(Self::Model { name: decoded(model)?, version: decoded(version)?, what })
    }

    fn memory(kind: &str, name: &str, what: &str) -> Option<Self> {
        let what = match what {
            "status" => OfMemory::Status,
            "unregister" => OfMemory::Unregister,
            "register" if !name.is_empty() => OfMemory::Register,
            _ => return None,
        };
        Some(Self::Memory { cuda: kind == CUDA_MEMORY, name: decoded(name)?, what })
    }

    fn method(&self) -> Method {
        match self {
            Self::Memory { what: OfMemory::Register | OfMemory::Unregister, .. } => Method::POST,
            Self::Model { what: What::Infer, .. } | Self::Repository(_) => Method::POST,
            _ => Method::GET,
        }
    }

    /// Returns whether the path is served with this method. HEAD is answered as GET, and hyper leaves
    /// the body out. An absent extension is refused for every method.
    fn takes(&self, method: &Method) -> bool {
        let method = if *method == Method::HEAD { &Method::GET } else { method };
        matches!(self, Self::Absent(_)) || *method == self.method()
    }
}

fn decoded(segment: &str) -> Option<String> {
    percent_decode_str(segment).decode_utf8().ok().map(String::from)
}

/// What is asked, as far as a request's head says.
#[derive(Debug)]
pub(crate) enum Goal {
    /// Its head is enough: health, and what is refused.
    Answered(Answer),
    Infer(Target),
    Other(Route),
}

/// The model of an inference. Clients that ask for none are refused before they send tensors.
#[derive(Debug)]
pub(crate) struct Target {
    name: String,
    pipeline: router::Route,
    metadata: Arc<Metadata>,
}

pub(crate) fn goal(front: &Frontend, head: &Parts) -> Goal {
    let Some(route) = Route::parse(head.uri.path()) else {
        let path = Clipped(head.uri.path());
        return Goal::Answered(error(StatusCode::NOT_FOUND, &format!("path {path} not found")));
    };
    if !route.takes(&head.method) {
        let allow = if route.method() == Method::GET { "GET, HEAD" } else { "POST" };
        let message = format!("this path accepts {allow}, not {}", Clipped(head.method.as_str()));
        let mut response = error(StatusCode::METHOD_NOT_ALLOWED, &message);
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
        return Goal::Answered(response);
    }
    match route {
        Route::Live => Goal::Answered(empty(StatusCode::OK)),
        Route::Ready if front.router.ready() => Goal::Answered(empty(StatusCode::OK)),
        Route::Ready => Goal::Answered(empty(StatusCode::BAD_REQUEST)),
        Route::Model { name, version, what: What::Infer } => match target(front, name, &version, head) {
            Ok(target) => Goal::Infer(target),
            Err(why) => Goal::Answered(refusal(&why, head)),
        },
        route => Goal::Other(route),
    }
}

fn target(front: &Frontend, name: String, version: &str, head: &Parts) -> Result<Target, RequestError> {
    let pipeline = model::find(&front.router, &name, version)?;
    let journal = traced::journal(&head.extensions);
    if let Some(journal) = journal {
        journal.set_model(&name);
    }
    let metadata = pipeline.metadata_or_refuse(journal)?;
    Ok(Target { name, pipeline, metadata })
}

pub(crate) fn refusal(why: &RequestError, head: &Parts) -> Answer {
    if let Some(journal) = traced::journal(&head.extensions) {
        journal.record_failure(why.message());
    }
    error(why.status(), &why.message())
}

pub(crate) async fn other(
    front: &Frontend,
    route: Route,
    head: &Parts,
    body: Pieces,
) -> Result<Answer, RequestError> {
    Ok(match route {
        Route::Live | Route::Ready => empty(StatusCode::OK),
        Route::Server => document(&describe::server(front.regions.allowed())),
        Route::Memory { cuda: false, name, what } => memory_routes::answer(
            &front.regions,
            caller::of(&head.extensions),
            name,
            what,
            &body.into_bytes(),
        )?,
        Route::Memory { cuda: true, name, what } => memory_routes::answer_cuda(&name, what)?,
        Route::Absent(extension) => return Err(unsupported::extension(extension)),
        Route::Statistics => document(&statistics::of(front.router.models())),
        Route::Repository(route) => {
            let by = Arc::clone(caller::of(&head.extensions));
            repository::answer(&front.repository, by, route, &body.into_bytes()).await?
        }
        Route::Model { name, version, what } => {
            let pipeline = model::find(&front.router, &name, &version)?;
            of_model(front, &name, pipeline, what)?
        }
    })
}

fn of_model(
    front: &Frontend,
    name: &str,
    pipeline: router::Route,
    what: What,
) -> Result<Answer, RequestError> {
    let metadata = || model::metadata(&pipeline, name);
    Ok(match what {
        What::Ready => match model::ready(&front.router, name, &pipeline) {
            Ok(()) => empty(StatusCode::OK),
            Err(why) => error(StatusCode::BAD_REQUEST, &format!("model '{name}' is not ready: {why}")),
        },
        What::Statistics => document(&statistics::of(vec![(name.to_owned(), pipeline)])),
        What::Config => document(&describe::config(&*metadata()?, pipeline.content())),
        What::Metadata | What::Infer => document(&describe::model(&*metadata()?)),
    })
}

pub(crate) async fn infer(
    front: &Frontend,
    Target { name, pipeline, metadata }: &Target,
    head: &Parts,
    body: Pieces,
    reserved: &Arc<Reserved>,
) -> Result<Answer, RequestError> {
    let _place = reserved
        .client()
        .admit()
        .inspect_err(|_| pipeline.count_host_refusal(traced::journal(&head.extensions)))?;
    let parsed = parse(front, &head.headers, body, metadata, reserved).await;
    let HttpRequest { request, form } = model::count_malformed(pipeline, parsed)?;
    if let Some(journal) = traced::journal(&head.extensions) {
        journal.set_id(&request.id);
    }
    let wanted = check::requested(metadata, &request.outputs)?;
    answer::check_form(metadata, &wanted, &request.outputs, &form)?;
    let (id, coming) = (request.id.clone(), traced::coming(&head.extensions));
    let outputs =
        model::infer(front, pipeline, metadata, request, (caller::of(&head.extensions), coming), reserved)
            .await?;
    reserved.replace(model::bytes(&outputs) + answer::text_bytes(&outputs, &form))?;
    let written = write(name, id, outputs, form).await?;
    reserved.shrink_to(written.bytes.len());
    let mut answer = inferred(written, &head.headers, reserved).await?;
    if let Some(load) = load_metrics::told(&head.headers, || pipeline.load()) {
        answer.headers_mut().insert(HeaderName::from_static(load_metrics::TOLD), load);
    }
    Ok(answer)
}

async fn write(
    name: &str,
    id: String,
    outputs: Vec<Answered>,
    form: Form,
) -> Result<answer::Body, RequestFailure> {
    let json_bytes =
        |(place, output): (usize, &Answered)| if form.binary(place) { 0 } else { output.data.len() };
    if outputs.iter().enumerate().map(json_bytes).sum::<usize>() < LONG_JSON_BYTES {
        return answer::write(name, &id, &outputs, &form);
    }
    let name = name.to_owned();
    away("writing the answer", move || answer::write(&name, &id, &outputs, &form)).await
}

async fn parse(
    front: &Frontend,
    headers: &HeaderMap,
    body: Pieces,
    metadata: &Arc<Metadata>,
    reserved: &Arc<Reserved>,
) -> Result<HttpRequest, RequestError> {
    let (body, turn) = match content_encoding(headers)? {
        Some(encoding) => {
            let compressed = reserved.joined(body)?;
            let (body, turn) = encoding.decompress(compressed, front.request_bytes, reserved.clone()).await?;
            reserved.replace(body.len())?;
            (body, Some(turn))
        }
        None => (body, None),
    };
    let header_length = header_length(headers)?;
    if header_length.unwrap_or(body.len()) < LONG_JSON_BYTES {
        return json::parse(body, header_length, metadata, reserved);
    }
    let (metadata, reserved) = (metadata.clone(), reserved.clone());
    away("parsing the request", move || {
        let _turn = turn;
        json::parse(body, header_length, &metadata, &reserved)
    })
    .await
}

fn content_encoding(headers: &HeaderMap) -> Result<Option<Encoding>, RequestFailure> {
    let mut encodings = headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .filter(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"));
    let Some(first) = encodings.next() else { return Ok(None) };
    let name = String::from_utf8_lossy(first.as_bytes());
    let encoding = Encoding::named(name.trim()).filter(|_| encodings.next().is_none());
    encoding.map(Some).ok_or_else(|| {
        let name = Clipped(&name);
        RequestFailure::Invalid(format!(
            "Content-Encoding {name} is not supported; use either gzip or deflate"
        ))
    })
}

fn header_length(headers: &HeaderMap) -> Result<Option<usize>, RequestFailure> {
    let mut values = headers.get_all(HEADER_LENGTH).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return invalid("Inference-Header-Content-Length is given twice".to_owned());
    }
    let text = String::from_utf8_lossy(value.as_bytes());
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits).map(Some).ok_or_else(|| {
        let text = Clipped(&text);
        RequestFailure::Invalid(format!(
            "Inference-Header-Content-Length must be a number of bytes, got '{text}'"
        ))
    })
}

async fn inferred(
    body: answer::Body,
    asked: &HeaderMap,
    reserved: &Reserved,
) -> Result<Answer, RequestError> {
    let accepted = asked.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let encoding = compression::preferred(accepted).filter(|_| body.bytes.len() >= WORTH_COMPRESSING_BYTES);
    let bytes = match encoding {
        Some(encoding) => {
            let compressed = encoding.compress(reserved.joined(body.bytes)?, reserved).await?;
            reserved.shrink_to(compressed.len());
            compressed.into()
        }
        None => body.bytes,
    };
    let mut response = Response::new(bytes);
    if let Some(encoding) = encoding {
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(encoding.name()));
    }
    let kind = match body.header_length {
        Some(length) => {
            response.headers_mut().insert(HEADER_LENGTH, HeaderValue::from(length));
            "application/octet-stream"
        }
        None => "application/json",
    };
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, version: &str, what: What) -> Option<Route> {
        Some(Route::Model { name: name.into(), version: version.into(), what })
    }

    #[test]
    fn paths_name_what_the_protocol_says() {
        assert_eq!(Route::parse("/v2"), Some(Route::Server));
        assert_eq!(Route::parse("/v2/health/live"), Some(Route::Live));
        assert_eq!(Route::parse("/v2/health/ready"), Some(Route::Ready));
        assert_eq!(Route::parse("/v2/models/m"), model("m", "", What::Metadata));
        assert_eq!(Route::parse("/v2/models/m/versions/1"), model("m", "1", What::Metadata));
        assert_eq!(Route::parse("/v2/models/m/config"), model("m", "", What::Config));
        assert_eq!(Route::parse("/v2/models/stats"), Some(Route::Statistics));
        assert_eq!(Route::parse("/v2/models/m/versions/1/stats"), model("m", "1", What::Statistics));
        assert_eq!(Route::parse("/v2/models/m/versions/1/infer"), model("m", "1", What::Infer));
        let load = repository::Route::Load("m".into());
        assert_eq!(Route::parse("/v2/repository/models/m/load"), Some(Route::Repository(load)));
        assert_eq!(Route::parse("/v2/models/a%2Fb%20%C3%A9/ready"), model("a/b é", "", What::Ready));
        let memory = |cuda, name: &str, what| Some(Route::Memory { cuda, name: name.into(), what });
        let path = "/v2/systemsharedmemory/region/a%2Fb/register";
        assert_eq!(Route::parse(path), memory(false, "a/b", OfMemory::Register));
        assert_eq!(Route::parse("/v2/cudasharedmemory/status"), memory(true, "", OfMemory::Status));
    }

    #[test]
    fn other_paths_name_nothing() {
        for path in ["/", "", "/v1", "/v2x", "/v2/models", "/v2/models/m/versions", "/v2/models/m/x", "/v2/a"]
        {
            assert_eq!(Route::parse(path), None, "{path}");
        }
        assert_eq!(Route::parse("/v2/models/%FF/infer"), None);
    }

    #[test]
    fn a_header_length_is_one_number() {
        let header = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(HEADER_LENGTH, HeaderValue::from_static(value));
            }
            header_length(&headers).ok()
        };
        assert_eq!(header(&[]), Some(None));
        assert_eq!(header(&["0"]), Some(Some(0)));
        assert_eq!(header(&["17"]), Some(Some(17)));
        for lie in [&["-1"][..], &["+1"], &["1.5"], &[""], &["99999999999999999999"], &["1", "1"]] {
            assert_eq!(header(lie), None, "{lie:?}");
        }
    }
}
