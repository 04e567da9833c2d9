//! Why a request is not answered, in both protocols' terms.

use std::num::NonZero;
use std::sync::LazyLock;

use hyper::header::{HeaderValue, WWW_AUTHENTICATE};
use hyper::{HeaderMap, StatusCode};
use tokio::sync::Semaphore;
use tonic::{Code, Status};

use shadowslice_datapath::pipeline::RequestFailure;

/// The longest message, in bytes: gRPC's travels in a header, and clients limit those.
const MAX_MESSAGE_BYTES: usize = 2048;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("{0}")]
    NotFound(String),
    /// Without a token that is known.
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
    /// The pipeline's failure, or a failure found before it.
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
            Self::Failed(RequestFailure::Invalid(_)) => Code::InvalidArgument,
            Self::Failed(RequestFailure::Unavailable(_)) => Code::Unavailable,
            Self::Failed(RequestFailure::Exhausted(_)) => Code::ResourceExhausted,
            Self::Failed(RequestFailure::TimedOut(_)) => Code::DeadlineExceeded,
            Self::Failed(RequestFailure::Internal(_)) => Code::Internal,
        }
    }

    /// Adds what HTTP says of it besides its status and its message.
    pub(crate) fn describe(&self, headers: &mut HeaderMap) {
        if matches!(self, Self::Unauthenticated(_)) {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
    }

    /// Returns the text for the client. A model's exception may have any characters, also those that
    /// change the colours or the title of a terminal.
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

/// As much as the threads that serve connections: what takes long leaves half of the cores to them.
static HELPERS: LazyLock<Semaphore> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    Semaphore::new((cores / 2).max(1))
});

/// Does what takes long away from the threads that serve connections.
pub(crate) async fn away<T, E>(
    what: &str,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E>
where
    T: Send + 'static,
    E: From<RequestFailure> + Send + 'static,
{
    let turn = HELPERS.acquire().await;
    let done = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        work()
    });
    let done = done.await;
    done.unwrap_or_else(|why| Err(RequestFailure::Internal(format!("{what} failed: {why}")).into()))
}

impl From<RequestError> for Status {
    fn from(refusal: RequestError) -> Self {
        Self::new(refusal.code(), refusal.message())
    }
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
