//! Errors in the form of OpenAI's API.

use hyper::StatusCode;
use hyper::http::request::Parts;
use serde_json::{Value, json};
use shadowslice_datapath::pipeline::RequestFailure;

use crate::admission::{Clipped, RequestError};
use crate::api::answers::{document, record};
use crate::transport::HttpAnswer;

const MODEL_NOT_FOUND: &str = "model_not_found";

/// An error of a request to an endpoint of OpenAI's API.
#[derive(Debug)]
pub(super) struct OpenAiError {
    pub(super) why: RequestError,
    /// The field of the request that is wrong, if one is.
    param: Option<String>,
    /// The code, or `None` for the one that follows from the status.
    code: Option<&'static str>,
}

impl OpenAiError {
    /// Returns the error of a wrong field.
    pub(super) fn field(name: &str, why: &str) -> Self {
        let why = RequestFailure::Invalid(format!("'{}' {why}", Clipped(name))).into();
        Self { why, param: Some(Clipped(name).to_string()), code: None }
    }

    /// Returns the error of a field whose value was refused for this reason.
    pub(super) fn of_field(name: &str, why: RequestError) -> Self {
        Self { why, param: Some(name.to_owned()), code: None }
    }

    /// Returns the error of a request for a model that is unknown, or that does not serve the
    /// endpoint.
    pub(super) fn model(why: RequestError) -> Self {
        let is_unknown = matches!(why, RequestError::NotFound(_));
        let (param, code) =
            if is_unknown { (Some("model".to_owned()), Some(MODEL_NOT_FOUND)) } else { (None, None) };
        Self { why, param, code }
    }

    /// Returns the answer, and records the failure in the journal.
    pub(super) fn answer(&self, head: &Parts) -> HttpAnswer {
        record(&self.why, head);
        let mut answer = document(&self.body());
        *answer.status_mut() = self.why.status();
        self.why.add_headers(answer.headers_mut());
        answer
    }

    pub(super) fn body(&self) -> Value {
        body(self.why.status(), &self.why.message(), self.param.as_deref(), self.code)
    }
}

impl From<RequestError> for OpenAiError {
    fn from(why: RequestError) -> Self {
        Self { why, param: None, code: None }
    }
}

impl From<RequestFailure> for OpenAiError {
    fn from(why: RequestFailure) -> Self {
        RequestError::from(why).into()
    }
}

/// Returns the body of an error. The official clients show the message, and choose their exception
/// by the status.
pub(in crate::api) fn body(
    status: StatusCode,
    message: &str,
    param: Option<&str>,
    code: Option<&'static str>,
) -> Value {
    let (kind, usual) = match status {
        StatusCode::UNAUTHORIZED => ("invalid_request_error", Some("invalid_api_key")),
        StatusCode::TOO_MANY_REQUESTS => ("requests", Some("rate_limit_exceeded")),
        status if status.is_client_error() => ("invalid_request_error", None),
        _ => ("server_error", None),
    };
    json!({"error": {"message": message, "type": kind, "param": param, "code": code.or(usual)}})
}
