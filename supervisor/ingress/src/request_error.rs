//! Why a request is not answered, in both protocols' terms.

use std::num::NonZero;
use std::sync::LazyLock;

use hyper::header::{HeaderValue, WWW_AUTHENTICATE};
use hyper::{HeaderMap, StatusCode};
use tokio::sync::Semaphore;
use tonic::Status;

use shadowslice_datapath::pipeline::Failure;

/// The longest message, in bytes: gRPC's travels in a header, and clients limit those.
const MAX_MESSAGE_BYTES: usize = 2048;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RequestError {
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
    Failed(#[from] Failure),
}

impl RequestError {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::Unauthenticated(_) => StatusCode::UNAUTHORIZED,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::AlreadyExists(_) => StatusCode::BAD_REQUEST,
            Self::Unsupported(_) => StatusCode::NOT_IMPLEMENTED,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Failed(Failure::Invalid(_)) => StatusCode::BAD_REQUEST,
            Self::Failed(Failure::Unavailable(_) | Failure::Exhausted(_)) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed(Failure::TimedOut(_)) => StatusCode::GATEWAY_TIMEOUT,
            Self::Failed(Failure::Internal(_)) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Adds what HTTP says of it besides its status and its message.
    pub(super) fn describe(&self, headers: &mut HeaderMap) {
        if matches!(self, Self::Unauthenticated(_)) {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
    }

    pub(super) fn message(&self) -> String {
        let mut message = self.to_string();
        message.truncate(message.floor_char_boundary(MAX_MESSAGE_BYTES));
        message
    }
}

pub(super) fn invalid<T, E: From<Failure>>(message: String) -> Result<T, E> {
    Err(Failure::Invalid(message).into())
}

/// As much as the threads that serve connections: what takes long leaves half of the cores to them.
static HELPERS: LazyLock<Semaphore> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    Semaphore::new((cores / 2).max(1))
});

/// Does what takes long away from the threads that serve connections.
pub(super) async fn away<T, E>(
    what: &str,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E>
where
    T: Send + 'static,
    E: From<Failure> + Send + 'static,
{
    let turn = HELPERS.acquire().await;
    let done = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        work()
    });
    let done = done.await;
    done.unwrap_or_else(|why| Err(Failure::Internal(format!("{what} failed: {why}")).into()))
}

impl From<RequestError> for Status {
    fn from(refusal: RequestError) -> Self {
        let message = refusal.message();
        match refusal {
            RequestError::NotFound(_) => Self::not_found(message),
            RequestError::Unauthenticated(_) => Self::unauthenticated(message),
            RequestError::Forbidden(_) => Self::permission_denied(message),
            RequestError::AlreadyExists(_) => Self::already_exists(message),
            RequestError::Unsupported(_) => Self::unimplemented(message),
            RequestError::TooLarge(_) => Self::out_of_range(message),
            RequestError::Failed(Failure::Invalid(_)) => Self::invalid_argument(message),
            RequestError::Failed(Failure::Unavailable(_)) => Self::unavailable(message),
            RequestError::Failed(Failure::Exhausted(_)) => Self::resource_exhausted(message),
            RequestError::Failed(Failure::TimedOut(_)) => Self::deadline_exceeded(message),
            RequestError::Failed(Failure::Internal(_)) => Self::internal(message),
        }
    }
}
