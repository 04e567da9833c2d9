//! The bodies of HTTP answers.

use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Response, StatusCode};
use serde::Serialize;
use serde_json::json;
use shadowslice_datapath::pipeline::Pieces;

use super::trace;
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

/// Returns the answer to a request that has failed, and records the failure in the journal.
pub(super) fn refusal(why: &RequestError, head: &Parts) -> HttpAnswer {
    if let Some(journal) = trace::journal(&head.extensions) {
        journal.record_failure(why.message());
    }
    let mut answer = error(why.status(), &why.message());
    why.add_headers(answer.headers_mut());
    answer
}
