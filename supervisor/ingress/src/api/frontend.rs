//! The parts of the supervisor that requests use.

use std::sync::Arc;
use std::time::Instant;

use hyper::Request;
use hyper::body::Incoming;
use prost::Message as _;
use shadowslice_datapath::access::{AccessEntry, AccessLog, AccessProtocol, RequestHead};
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::RequestArrival;
use shadowslice_datapath::repository::Repository;
use shadowslice_datapath::router::Router;
use shadowslice_datapath::tenants::TenantMembership;
use shadowslice_datapath::trace::Tracer;
use tokio::sync::Semaphore;

use crate::proto::ModelInferRequest;
use crate::tensors::SharedMemory;
use crate::transport::CountedBody;

/// The header by which proxies name requests.
const REQUEST_ID: &str = "x-request-id";

#[derive(Debug)]
pub(crate) struct Frontend {
    pub(crate) router: Arc<Router>,
    pub(crate) repository: Arc<Repository>,
    pub(crate) tracer: Option<Arc<Tracer>>,
    /// The access log, or `None` if answers are not logged.
    pub(crate) access: Option<Arc<AccessLog>>,
    /// The places for watchers of the health service.
    pub(crate) watchers: Arc<Semaphore>,
    pub(crate) regions: Arc<SharedMemory>,
    pub(crate) membership: TenantMembership,
    /// The maximum size of an inference request, in bytes.
    pub(crate) request_bytes: usize,
}

impl Frontend {
    /// Records the arrival of a request, and begins its entry in the access log. The request's
    /// extensions contain both. The entry counts the bytes of the request's body. A gRPC call begins
    /// with its headers, before it has its turn.
    pub(super) fn begin_request(
        &self,
        protocol: AccessProtocol,
        mut request: Request<Incoming>,
        peer: &Arc<Peer>,
    ) -> (Request<CountedBody>, Option<AccessEntry>) {
        let entry = self.access.as_ref().map(|log| {
            let request_id = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
            let (method, path) = (request.method().as_str(), request.uri().path());
            log.begin(RequestHead { protocol, method, path, request_id }, peer, Instant::now())
        });
        let journal = entry.as_ref().map(|entry| entry.journal().clone());
        request.extensions_mut().insert(RequestArrival::now(journal));
        if let Some(entry) = &entry {
            request.extensions_mut().insert(entry.clone());
        }
        (request.map(|body| CountedBody::new(body, entry.clone())), entry)
    }

    /// Begins the entry of a request that shares a call with others, if answers are logged.
    pub(super) fn log_streamed(
        &self,
        request: &ModelInferRequest,
        path: &str,
        peer: &Arc<Peer>,
        started_at: Instant,
    ) -> Option<AccessEntry> {
        let log = self.access.as_ref()?;
        let head = RequestHead { protocol: AccessProtocol::Grpc, method: "POST", path, request_id: None };
        let entry = log.begin(head, peer, started_at);
        entry.add_received(request.encoded_len());
        Some(entry)
    }
}
