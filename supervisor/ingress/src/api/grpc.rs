//! gRPC calls, from their heads to their services.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use shadowslice_datapath::access::AccessProtocol;
use shadowslice_datapath::trace::SpanProtocol;
use tonic::Status;
use tonic::codegen::Service as _;

use super::frontend::Frontend;
use super::infer_stream::STREAM;
use super::{reflection, trace, unsupported};
use crate::admission::{
    Budget, CALL_PERMIT, Caller, Client, MemoryPermit, Origin, Resource, Stop, log_grpc_status,
};
use crate::proto::grpc_inference_service_server::GrpcInferenceServiceServer;
use crate::proto::health::health_server::HealthServer;
use crate::transport::{
    Connection, CountedBody, GrpcAnswer, MessageBody, MessageStarts, SHORT_BODY_BYTES, ServedCall, accepts,
    check_head, compress_answer, decompress_call, message_encoding, serve_grpc,
};

const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";

const HEALTH: &str = "/grpc.health.v1.Health/";
const LIVE: &str = "/inference.GRPCInferenceService/ServerLive";
const READY: &str = "/inference.GRPCInferenceService/ServerReady";

/// The maximum size of a message besides its tensors, in bytes: names, shapes and the prefix.
const MAX_OVERHEAD_BYTES: usize = 64 * 1024;

/// The services on the gRPC port.
pub(super) struct Services {
    pub(super) front: Arc<Frontend>,
    pub(super) stop: Stop,
}

pub(super) async fn serve(front: Arc<Frontend>, connection: Connection, stop: Stop) {
    let Connection { stream, client, caller } = connection;
    let is_local = caller.origin == Origin::Unix;
    let services = Arc::new(Services { front: Arc::clone(&front), stop: stop.clone() });
    let caller = Arc::new(caller);
    let begin = |request: Request<Incoming>| {
        let (request, entry) = front.begin_request(AccessProtocol::Grpc, request, &caller.peer);
        let (services, client, caller) = (Arc::clone(&services), Arc::clone(&client), Arc::clone(&caller));
        async move {
            let (answer, permit) = services.admit(&client, &caller, request).await;
            client.counters().count_grpc(code(&answer));
            if let Some(entry) = &entry {
                if answer.status() != StatusCode::OK {
                    entry.set_code(answer.status().as_u16());
                }
                log_grpc_status(entry, answer.headers());
            }
            ServedCall { answer, permit, entry }
        }
    };
    serve_grpc(stream, is_local, &client, stop, begin).await;
}

impl Services {
    /// Takes memory for a call before the call is read, and serves the call.
    async fn admit(
        self: &Arc<Self>,
        client: &Arc<Client>,
        caller: &Caller,
        request: Request<CountedBody>,
    ) -> (GrpcAnswer, Option<Arc<MemoryPermit>>) {
        let head_bytes = match check_head(&request) {
            Ok(bytes) => bytes,
            Err(refusal) => return (*refusal, None),
        };
        let path = request.uri().path();
        let is_health = path.starts_with(HEALTH) || [LIVE, READY].contains(&path);
        let (resource, budget) = match is_health {
            true => (Resource::Public, Budget::Health),
            false => (Resource::Protected, Budget::Memory),
        };
        let placed = if is_health { Ok(()) } else { client.wait_for_place().await };
        match placed.and_then(|()| MemoryPermit::new(client, budget, head_bytes)) {
            Ok(permit) => {
                // The future is boxed, so that refused calls take little memory.
                let call = Box::pin(self.call(caller, resource, request, &permit));
                (CALL_PERMIT.scope(permit.clone(), call).await, Some(permit))
            }
            Err(refused) => (Status::from(refused).into_http(), None),
        }
    }

    async fn call(
        self: &Arc<Self>,
        caller: &Caller,
        resource: Resource,
        request: Request<CountedBody>,
        permit: &Arc<MemoryPermit>,
    ) -> GrpcAnswer {
        let (mut head, body) = request.into_parts();
        if let Err(refusal) = caller.identify_in(&mut head, resource) {
            return Status::from(refusal).into_http();
        }
        let uri = head.uri.clone();
        let span = (uri.path() == INFER)
            .then(|| self.front.begin_span(&head.headers, &mut head.extensions, || SpanProtocol::Grpc))
            .flatten();
        let response = self.answer(Request::from_parts(head, body), permit).await;
        let response = response.unwrap_or_else(Status::into_http);
        if let Some(span) = span {
            trace::end_grpc(span, &response);
        }
        if is_unknown(&response) {
            return Status::from(unsupported::call(uri.path())).into_http();
        }
        response
    }

    async fn answer(
        self: &Arc<Self>,
        mut request: Request<CountedBody>,
        permit: &Arc<MemoryPermit>,
    ) -> Result<GrpcAnswer, Status> {
        let path = request.uri().path();
        let (is_stream, is_health) = (path == STREAM, path.starts_with(HEALTH));
        let is_reflection = reflection::is_called(path);
        // Only inferences have long messages.
        let is_inference = path == INFER || is_stream;
        let most = self.front.request_bytes.saturating_add(MAX_OVERHEAD_BYTES);
        let limit = if is_inference { most } else { most.min(SHORT_BODY_BYTES) };
        let encoding = message_encoding(request.headers())?;
        if encoding.is_some() && (is_stream || is_reflection) {
            let why = "compressed messages are not supported in streams; send them uncompressed";
            return Err(Status::unimplemented(why));
        }
        if is_reflection {
            return Ok(reflection::call(Arc::clone(self), request).await);
        }
        let mut health = HealthServer::from_arc(Arc::clone(self)).max_decoding_message_size(limit);
        let mut inference =
            GrpcInferenceServiceServer::from_arc(Arc::clone(self)).max_decoding_message_size(limit);
        if is_stream {
            let starts = MessageStarts::default();
            request.extensions_mut().insert(starts.clone());
            let Ok(response) =
                inference.call(request.map(|body| MessageBody::stream(body, limit, starts))).await;
            return Ok(response);
        }
        let Some(encoding) = encoding else {
            let request = request.map(|body| MessageBody::single(body, limit));
            let Ok(response) = match is_health {
                true => health.call(request).await,
                false => inference.call(request).await,
            };
            return Ok(response);
        };
        let is_accepted = accepts(request.headers(), encoding);
        let request = decompress_call(request, encoding, limit, permit).await?;
        if is_health {
            // The answer may be a stream that has no end, so it is not compressed.
            let Ok(response) = health.call(request).await;
            return Ok(response);
        }
        let Ok(response) = inference.call(request).await;
        if is_accepted { compress_answer(response, encoding, permit).await } else { Ok(response) }
    }
}

/// Returns the code in the head of a response. Returns 0 for a response that ends with its code.
fn code(response: &GrpcAnswer) -> usize {
    let status = response.headers().get(Status::GRPC_STATUS);
    status.and_then(|code| code.to_str().ok()?.parse().ok()).unwrap_or(0)
}

/// Returns whether no service has the call. tonic refuses such calls without a message.
fn is_unknown(response: &GrpcAnswer) -> bool {
    let headers = response.headers();
    let is_unimplemented = headers.get(Status::GRPC_STATUS).is_some_and(|status| *status == "12");
    is_unimplemented && !headers.contains_key(Status::GRPC_MESSAGE)
}
