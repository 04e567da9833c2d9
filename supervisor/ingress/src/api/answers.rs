//! The bodies of HTTP answers.

use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Response, StatusCode};
use serde::Serialize;
use serde_json::json;
use shadowslice_datapath::pipeline::Pieces;

use super::{openai, trace};
use crate::admission::RequestError;
use crate::transport::HttpAnswer;

pub(super) fn empty(status: StatusCode) -> HttpAnswer {
    let mut response = Response::new(Pieces::default().into());
    *response.status_mut() = status;
    response
}

pub(super) fn document(json: &impl Serialize) -> HttpAnswer {
    let json = serde_json::to_vec(json).expect("only keys that are not strings can fail");
    let mut response = Response::new(json.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

pub(super) fn error(status: StatusCode, message: &str) -> HttpAnswer {
    let mut response = document(&json!({"error": message}));
    *response.status_mut() = status;
    response
}

/// Returns an error in the form of the API to which the path belongs.
pub(super) fn error_at(path: &str, status: StatusCode, message: &str) -> HttpAnswer {
    if !path.starts_with(openai::PREFIX) {
        return error(status, message);
    }
    let mut response = document(&openai::error_body(status, message, None, None));
    *response.status_mut() = status;
    response
}

/// Returns the answer to a request that has failed, and records the failure in the journal.
pub(super) fn refusal(why: &RequestError, head: &Parts) -> HttpAnswer {
    record(why, head);
    let mut answer = error_at(head.uri.path(), why.status(), &why.message());
    why.add_headers(answer.headers_mut());
    answer
}

/// Records the failure of a request in its journal.
pub(super) fn record(why: &RequestError, head: &Parts) {
    if let Some(journal) = trace::journal(&head.extensions) {
        journal.record_failure(why.message());
    }
}
