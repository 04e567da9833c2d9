//! HTTP's requests, from their paths to their answers.

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{ALLOW, CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Response, StatusCode};
use percent_encoding::percent_decode_str;

use super::http::{document, empty, error};
use super::json::{self, Form, HttpRequest};
use super::model::Answered;
use super::refusal::Refusal;
use super::tensors::{self, Clipped};
use super::{Frontend, answer, describe, model};
use crate::pipeline::{Failure, Metadata};

const HEADER_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

/// JSON longer than this, in bytes, is parsed away from the threads that serve connections, as tensors
/// longer than this are written as JSON.
const LONG_JSON_BYTES: usize = 256 * 1024;

/// What a path names.
#[derive(Debug, PartialEq, Eq)]
enum Route {
    Live,
    Ready,
    Server,
    Model { name: String, version: String, what: What },
}

/// What of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Metadata,
    Ready,
    Config,
    Infer,
}

impl Route {
    /// Names are percent-decoded after the path is split, so that they may hold slashes.
    fn parse(path: &str) -> Option<Self> {
        let segments: Vec<&str> = path.strip_prefix("/v2")?.split('/').skip(1).collect();
        let (model, version, what) = match segments[..] {
            [] if path == "/v2" => return Some(Self::Server),
            [""] => return Some(Self::Server),
            ["health", "live"] => return Some(Self::Live),
            ["health", "ready"] => return Some(Self::Ready),
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
            "infer" => What::Infer,
            _ => return None,
        };
        Some(Self::Model { name: decoded(model)?, version: decoded(version)?, what })
    }

    fn method(&self) -> Method {
        match self {
            Self::Model { what: What::Infer, .. } => Method::POST,
            _ => Method::GET,
        }
    }
}

/// `None` for what is not UTF-8 and hence no model's name.
fn decoded(segment: &str) -> Option<String> {
    percent_decode_str(segment).decode_utf8().ok().map(String::from)
}

/// Answers one request.
pub(super) async fn answer(front: &Frontend, head: &Parts, body: Bytes) -> Response<Full<Bytes>> {
    let Some(route) = Route::parse(head.uri.path()) else {
        let path = Clipped(head.uri.path());
        return error(StatusCode::NOT_FOUND, &format!("there is nothing at {path}"));
    };
    if head.method != route.method() {
        let message = format!("this path takes {}, not {}", route.method(), Clipped(head.method.as_str()));
        let mut response = error(StatusCode::METHOD_NOT_ALLOWED, &message);
        let allow = if route.method() == Method::GET { "GET" } else { "POST" };
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
        return response;
    }
    match route {
        Route::Live => empty(StatusCode::OK),
        Route::Ready if front.router.ready() => empty(StatusCode::OK),
        Route::Ready => empty(StatusCode::BAD_REQUEST),
        Route::Server => document(StatusCode::OK, &describe::server()),
        Route::Model { name, version, what } => of_model(front, &name, &version, what, head, body)
            .await
            .unwrap_or_else(|refusal| error(refusal.status(), &refusal.message())),
    }
}

async fn of_model(
    front: &Frontend,
    name: &str,
    version: &str,
    what: What,
    head: &Parts,
    body: Bytes,
) -> Result<Response<Full<Bytes>>, Refusal> {
    let pipeline = model::find(&front.router, name, version)?;
    if what == What::Ready {
        return Ok(match pipeline.ready() {
            Ok(()) => empty(StatusCode::OK),
            Err(why) => error(StatusCode::BAD_REQUEST, &format!("model '{name}' is not ready: {why}")),
        });
    }
    let metadata = model::metadata(pipeline, name)?;
    match what {
        What::Config => Ok(document(StatusCode::OK, &describe::config_json(&metadata))),
        What::Metadata | What::Ready => Ok(document(StatusCode::OK, &describe::model_json(&metadata))),
        What::Infer => {
            let _admitted = front.admit()?;
            let HttpRequest { request, form } = parse(&head.headers, body, &metadata).await?;
            answer::check_form(&metadata, &tensors::requested(&metadata, &request.outputs)?, &form)?;
            let id = request.id.clone();
            let outputs = model::infer(pipeline, &metadata, request).await?;
            Ok(inferred(write(name, id, outputs, form).await?))
        }
    }
}

/// Values written as JSON are slow to write: long answers are written away from the connections, too.
async fn write(name: &str, id: String, outputs: Vec<Answered>, form: Form) -> Result<answer::Body, Failure> {
    let json_bytes =
        |(place, output): (usize, &Answered)| if form.binary(place) { 0 } else { output.data.len() };
    if outputs.iter().enumerate().map(json_bytes).sum::<usize>() < LONG_JSON_BYTES {
        return answer::write(name, &id, &outputs, &form);
    }
    let name = name.to_owned();
    tokio::task::spawn_blocking(move || answer::write(&name, &id, &outputs, &form))
        .await
        .unwrap_or_else(|why| Err(Failure::Internal(format!("writing the answer failed: {why}"))))
}

async fn parse(
    headers: &HeaderMap,
    body: Bytes,
    metadata: &std::sync::Arc<Metadata>,
) -> Result<HttpRequest, Failure> {
    if let Some(encoding) = headers.get(CONTENT_ENCODING).filter(|encoding| *encoding != "identity") {
        let encoding = String::from_utf8_lossy(encoding.as_bytes());
        return Err(Failure::Invalid(format!(
            "Content-Encoding {} is not supported; send the body as it is",
            Clipped(&encoding)
        )));
    }
    let header_length = header_length(headers)?;
    if header_length.unwrap_or(body.len()) < LONG_JSON_BYTES {
        return json::parse(body, header_length, metadata);
    }
    let metadata = metadata.clone();
    tokio::task::spawn_blocking(move || json::parse(body, header_length, &metadata))
        .await
        .unwrap_or_else(|why| Err(Failure::Internal(format!("parsing the request failed: {why}"))))
}

fn header_length(headers: &HeaderMap) -> Result<Option<usize>, Failure> {
    let mut values = headers.get_all(HEADER_LENGTH).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return match headers.contains_key(HEADER_LENGTH) {
            true => Err(Failure::Invalid("Inference-Header-Content-Length is given twice".to_owned())),
            false => Ok(None),
        };
    };
    let text = String::from_utf8_lossy(value.as_bytes());
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits).map(Some).ok_or_else(|| {
        let text = Clipped(&text);
        Failure::Invalid(format!("Inference-Header-Content-Length must be a number of bytes, got '{text}'"))
    })
}

fn inferred(body: answer::Body) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.bytes));
    let kind = match body.header_length {
        Some(length) => {
            response.headers_mut().insert(HEADER_LENGTH, HeaderValue::from(length));
            "application/octet-stream"
        }
        None => "application/json",
    };
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
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
        assert_eq!(Route::parse("/v2/models/m/versions/1/infer"), model("m", "1", What::Infer));
        assert_eq!(Route::parse("/v2/models/a%2Fb%20%C3%A9/ready"), model("a/b é", "", What::Ready));
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
