//! The services of the listeners for clients.

use std::sync::Arc;

use super::frontend::Frontend;
use super::{grpc, http};
use crate::admission::Stop;
use crate::transport::{Connection, Service};

/// The protocol in one of its two forms.
#[derive(Clone)]
pub(crate) enum ApiService {
    Http(Arc<Frontend>),
    Grpc(Arc<Frontend>),
}

impl Service for ApiService {
    async fn serve(self, connection: Connection, stop: Stop) {
        match self {
            Self::Http(front) => http::serve(front, connection, stop).await,
            Self::Grpc(front) => grpc::serve(front, connection, stop).await,
        }
    }
}
