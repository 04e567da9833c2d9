//! gRPC calls, from their heads to their services.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use shadowslice_datapath::access::AccessProtocol;
use tonic::Status;
use tonic::codegen::Service as _;

use super::frontend::Frontend;
use super::grpc_service::InferenceService;
use super::health::HealthService;
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

pub(super) async fn serve(front: Arc<Frontend>, connection: Connection, stop: Stop) {
    let Connection { stream, client, caller } = connection;
    let (servers, caller) = (Servers::new(&front, &stop), Arc::new(caller));
    let begin = |request: Request<Incoming>| {
        let (mut request, entry) = front.log_request(AccessProtocol::Grpc, request, &caller.peer);
        trace::mark_arrival(&mut request);
        let (front, client) = (Arc::clone(&front), Arc::clone(&client));
        let (servers, caller) = (servers.clone(), Arc::clone(&caller));
        async move {
            let (answer, permit) = admit(&front, &client, servers, &caller, request).await;
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
    let is_local = caller.origin == Origin::Unix;
    serve_grpc(stream, is_local, &client, stop, begin).await;
}

/// Takes memory for a call before the call is read, and serves the call.
async fn admit(
    front: &Frontend,
    client: &Arc<Client>,
    servers: Servers,
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
            let call = Box::pin(call(front, servers, caller, resource, request, &permit));
            (CALL_PERMIT.scope(permit.clone(), call).await, Some(permit))
        }
        Err(refused) => (Status::from(refused).into_http(), None),
    }
}

async fn call(
    front: &Frontend,
    servers: Servers,
    caller: &Caller,
    resource: Resource,
    request: Request<CountedBody>,
    permit: &Arc<MemoryPermit>,
) -> GrpcAnswer {
    let (mut head, body) = request.into_parts();
    if let Err(refusal) = caller.identify_in(&mut head, resource) {
        return Status::from(refusal).into_http();
    }
    let mut request = Request::from_parts(head, body);
    if request.uri().path() != INFER {
        let uri = request.uri().clone();
        let response = servers.call(request, permit).await.unwrap_or_else(Status::into_http);
        return if is_unknown(&response) {
            Status::from(unsupported::call(uri.path())).into_http()
        } else {
            response
        };
    }
    let span = front.begin_grpc(&mut request);
    let response = servers.call(request, permit).await.unwrap_or_else(Status::into_http);
    if let Some(span) = span {
        trace::end_grpc(span, &response);
    }
    response
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

/// The services of a connection.
#[derive(Clone)]
struct Servers {
    inference: GrpcInferenceServiceServer<InferenceService>,
    health: HealthServer<HealthService>,
    /// The maximum size of a message, in bytes.
    limit: usize,
    stop: Stop,
}

impl Servers {
    fn new(front: &Arc<Frontend>, stop: &Stop) -> Self {
        Self {
            inference: GrpcInferenceServiceServer::new(InferenceService::new(front.clone(), stop.clone())),
            health: HealthServer::new(HealthService::new(front.clone(), stop.clone())),
            limit: front.request_bytes.saturating_add(MAX_OVERHEAD_BYTES),
            stop: stop.clone(),
        }
    }

    async fn call(
        self,
        mut request: Request<CountedBody>,
        permit: &Arc<MemoryPermit>,
    ) -> Result<GrpcAnswer, Status> {
        let path = request.uri().path();
        let (is_stream, is_health) = (path == STREAM, path.starts_with(HEALTH));
        let is_reflection = reflection::is_called(path);
        // Only inferences have long messages.
        let is_inference = path == INFER || is_stream;
        let limit = if is_inference { self.limit } else { self.limit.min(SHORT_BODY_BYTES) };
        let encoding = message_encoding(request.headers())?;
        let mut inference = self.inference.max_decoding_message_size(limit);
        if is_stream || is_reflection {
            if encoding.is_some() {
                return Err(Status::unimplemented(
                    "compressed messages are not supported in streams; send them uncompressed",
                ));
            }
            if is_reflection {
                return Ok(reflection::call(request, self.stop).await);
            }
            let starts = MessageStarts::default();
            request.extensions_mut().insert(starts.clone());
            let Ok(response) =
                inference.call(request.map(|body| MessageBody::stream(body, limit, starts))).await;
            return Ok(response);
        }
        let mut health = self.health.max_decoding_message_size(limit);
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
