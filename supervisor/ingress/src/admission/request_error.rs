//! The reasons why a request fails, with their HTTP status and gRPC code.

use hyper::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::{HeaderMap, StatusCode};
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

use shadowslice_datapath::pipeline::RequestFailure;
use shadowslice_datapath::tenants::TenantRefusal;

/// The header in which gRPC servers give the time until a retry, in milliseconds.
const GRPC_RETRY: &str = "grpc-retry-pushback-ms";

/// The maximum length of a message, in bytes. gRPC sends it in a header, whose length clients
/// limit.
const MAX_MESSAGE_BYTES: usize = 2048;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("{0}")]
    NotFound(String),
    /// The request has no token, or an unknown one.
    #[error("{0}")]
    Unauthenticated(String),
    #[error("{0}")]
    Forbidden(String),
    #[error("{0}")]
    AlreadyExists(String),
    #[error("{0}")]
    Unsupported(String),
    #[error("{0}")]
    TooLarge(String),
    /// The peer was silent, or sent too slowly.
    #[error("timed out waiting for the rest of the request")]
    Stalled,
    /// The request exceeds a limit of its tenant.
    #[error(transparent)]
    Throttled(#[from] TenantRefusal),
    /// A failure of the pipeline, or one that was found before the pipeline.
    #[error(transparent)]
    Failed(#[from] RequestFailure),
}

impl RequestError {
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::Unauthenticated(_) => StatusCode::UNAUTHORIZED,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::AlreadyExists(_) => StatusCode::BAD_REQUEST,
            Self::Unsupported(_) => StatusCode::NOT_IMPLEMENTED,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Stalled => StatusCode::REQUEST_TIMEOUT,
            Self::Throttled(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Failed(RequestFailure::Invalid(_)) => StatusCode::BAD_REQUEST,
            Self::Failed(RequestFailure::Unavailable(_) | RequestFailure::Exhausted(_)) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::Failed(RequestFailure::TimedOut(_)) => StatusCode::GATEWAY_TIMEOUT,
            Self::Failed(RequestFailure::Internal(_)) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    pub(crate) fn code(&self) -> Code {
        match self {
            Self::NotFound(_) => Code::NotFound,
            Self::Unauthenticated(_) => Code::Unauthenticated,
            Self::Forbidden(_) => Code::PermissionDenied,
            Self::AlreadyExists(_) => Code::AlreadyExists,
            Self::Unsupported(_) => Code::Unimplemented,
            Self::TooLarge(_) => Code::OutOfRange,
            Self::Stalled => Code::DeadlineExceeded,
            Self::Throttled(_) => Code::ResourceExhausted,
            Self::Failed(RequestFailure::Invalid(_)) => Code::InvalidArgument,
            Self::Failed(RequestFailure::Unavailable(_)) => Code::Unavailable,
            Self::Failed(RequestFailure::Exhausted(_)) => Code::ResourceExhausted,
            Self::Failed(RequestFailure::TimedOut(_)) => Code::DeadlineExceeded,
            Self::Failed(RequestFailure::Internal(_)) => Code::Internal,
        }
    }

    /// Adds the headers that belong to the error in HTTP.
    pub(crate) fn add_headers(&self, headers: &mut HeaderMap) {
        match self {
            Self::Unauthenticated(_) => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Self::Throttled(refusal) => {
                // The header has whole seconds, so the client must not round them down.
                let seconds = refusal.retry_after().as_millis().div_ceil(1_000).max(1);
                headers.insert(RETRY_AFTER, whole(seconds));
            }
            _ => {}
        }
    }

    /// Returns the text for the client. Removes control characters, because an exception of a model
    /// may contain some that change the colours or the title of a terminal.
    pub(crate) fn message(&self) -> String {
        let mut message = self.to_string();
        message.retain(|character| matches!(character, '\n' | '\t') || !character.is_control());
        message.truncate(message.floor_char_boundary(MAX_MESSAGE_BYTES));
        message
    }
}

pub(crate) fn invalid<T, E: From<RequestFailure>>(message: String) -> Result<T, E> {
    Err(RequestFailure::Invalid(message).into())
}

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        let mut headers = HeaderMap::new();
        if let RequestError::Throttled(refusal) = &error {
            headers.insert(GRPC_RETRY, whole(refusal.retry_after().as_millis().max(1)));
        }
        Self::with_metadata(error.code(), error.message(), MetadataMap::from_headers(headers))
    }
}

fn whole(number: u128) -> HeaderValue {
    u64::try_from(number).unwrap_or(u64::MAX).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_bounded_and_have_no_control_characters() {
        let message = |why: String| RequestError::Failed(RequestFailure::Internal(why)).message();
        let coloured = message("\x1b[31mred\0\n\tnext\u{9b}\r\n".to_owned());
        assert!(coloured.ends_with("[31mred\n\tnext\n"), "{coloured:?}");
        assert!(message("ä".repeat(MAX_MESSAGE_BYTES)).len() <= MAX_MESSAGE_BYTES);
    }
}
