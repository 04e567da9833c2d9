//! gRPC connections and the protocol's service.

use std::convert::Infallible;
use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request as HttpRequest, Response as HttpResponse, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::time::sleep;
use tonic::codegen::Service as _;
use tonic::metadata::MetadataValue;
use tonic::{Request, Response, Status, Streaming};

use crate::Frontend;
use crate::admission::access;
use crate::admission::access::Counted;
use crate::admission::budgets::{Client, Pool};
use crate::admission::caller;
use crate::admission::caller::{Asked, Caller};
use crate::admission::deliveries::Beginnings;
use crate::admission::memory_permit::{RESERVED, Reserved};
use crate::admission::request_error::RequestError;
use crate::admission::stop::Stop;
use crate::api::conversation::{Context, Conversation, STREAM};
use crate::api::describe;
use crate::api::health::Health;
use crate::api::inference::{Inference, inference, response};
use crate::api::load_metrics;
use crate::api::model;
use crate::api::reflection;
use crate::api::repository;
use crate::api::statistics;
use crate::api::traced;
use crate::api::unsupported;
use crate::proto::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use crate::proto::health::health_server::HealthServer;
use crate::proto::system_shared_memory_status_response::RegionStatus;
use crate::proto::{
    CudaSharedMemoryRegisterRequest, CudaSharedMemoryRegisterResponse, CudaSharedMemoryStatusRequest,
    CudaSharedMemoryStatusResponse, CudaSharedMemoryUnregisterRequest, CudaSharedMemoryUnregisterResponse,
    LogSettingsRequest, LogSettingsResponse, ModelConfigRequest, ModelConfigResponse, ModelInferRequest,
    ModelInferResponse, ModelMetadataRequest, ModelMetadataResponse, ModelReadyRequest, ModelReadyResponse,
    ModelStatisticsRequest, ModelStatisticsResponse, RepositoryIndexRequest, RepositoryIndexResponse,
    RepositoryModelLoadRequest, RepositoryModelLoadResponse, RepositoryModelUnloadRequest,
    RepositoryModelUnloadResponse, ServerLiveRequest, ServerLiveResponse, ServerMetadataRequest,
    ServerMetadataResponse, ServerReadyRequest, ServerReadyResponse, SystemSharedMemoryRegisterRequest,
    SystemSharedMemoryRegisterResponse, SystemSharedMemoryStatusRequest, SystemSharedMemoryStatusResponse,
    SystemSharedMemoryUnregisterRequest, SystemSharedMemoryUnregisterResponse, TraceSettingRequest,
    TraceSettingResponse,
};
use crate::transport::accept::Stream;
use crate::transport::body::{OneMessage, SHORT};
use crate::transport::call_head;
use crate::transport::calls::Calls;
use crate::transport::envelope;
use crate::transport::late_streams::LateStreams;
use crate::transport::listen::Spoken;
use crate::transport::messages::Messages;
use crate::transport::on_wake::OnWake;
use crate::transport::read_filter::Inward;
use crate::transport::slow_reader::{self, Untaken};
use shadowslice_datapath::access::AccessProtocol;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::{Metadata, RequestArrival};
use shadowslice_datapath::router::Route;

pub(crate) const SPOKEN: Spoken = Spoken { name: "gRPC", alpn: b"h2" };

const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";

const HEALTH: &str = "/grpc.health.v1.Health/";
const LIVE: &str = "/inference.GRPCInferenceService/ServerLive";
const READY: &str = "/inference.GRPCInferenceService/ServerReady";

/// The most requests at a time on a connection; clients hold further requests back.
const STREAMS: u32 = 1024;

/// In bytes; a connection holds one incomplete frame. Compared with the protocol's 16 KiB, tensors
/// of 600 kB take a quarter less of the supervisor's CPU time, and arrive in a third less time.
pub(crate) const FRAME_BYTES: u32 = 256 << 10;

const FIRST_CALL: Duration = Duration::from_secs(75);

/// A silent connection is pinged this often,
const PING: Duration = Duration::from_secs(60);
/// and closed when no answer comes for so long.
const PONG: Duration = Duration::from_secs(20);

/// The most bytes of a message besides its tensors: names, shapes, the envelope.
const ENVELOPE_BYTES: usize = 64 * 1024;

pub(crate) async fn serve(
    io: Stream,
    front: Arc<Frontend>,
    (client, caller): (&Arc<Client>, Caller),
    stop: Stop,
) {
    let limit = front.request_bytes.saturating_add(ENVELOPE_BYTES);
    let servers = Servers {
        inference: GrpcInferenceServiceServer::new(Service(front.clone(), stop.clone())),
        health: HealthServer::new(Health::new(front.clone(), stop.clone())),
        limit,
        stop: stop.clone(),
    };
    let (called, untaken) = (AtomicBool::new(false), Arc::new(Untaken::default()));
    let (mut calls, caller) = (Calls::default(), Arc::new(caller));
    // hyper calls this when it has read a call's headers, before the call has its turn.
    let service = service_fn(|request: HttpRequest<Incoming>| {
        called.store(true, Ordering::Relaxed);
        let (mut request, access) = front.logged(AccessProtocol::Grpc, request, &caller.peer);
        traced::arrives(&mut request);
        let (front, client, servers) = (front.clone(), client.clone(), servers.clone());
        let (untaken, caller) = (untaken.clone(), caller.clone());
        async move {
            let (answer, reserved) = reserve(front, &client, servers, &caller, request).await;
            client.tally().count_grpc(code(&answer));
            if let Some(access) = &access {
                if answer.status() != StatusCode::OK {
                    access.set_code(answer.status().as_u16());
                }
                traced::note_grpc(access, answer.headers());
            }
            Ok::<_, Infallible>(answer.map(|body| slow_reader::Answer::new(body, untaken, reserved, access)))
        }
    });
    let ending = Arc::new(AtomicBool::new(false));
    let io = Inward::new(io, LateStreams::new(calls.coming(), ending.clone()));
    let connection = http2::Builder::new(calls.coming())
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .max_frame_size(FRAME_BYTES)
        .max_header_list_size(call_head::HEADER_LIST_BYTES)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PONG)
        .serve_connection(TokioIo::new(io), service);
    let mut connection = OnWake::new(connection);
    let leaving = stop.clone();
    let (over, overdue) = (std::pin::pin!(over(&called, client, stop)), std::pin::pin!(untaken.overdue()));
    let (mut over, mut overdue) = (OnWake::new(over), OnWake::new(overdue));
    let ended = std::future::poll_fn(|cx| {
        if Pin::new(&mut overdue).poll(cx).is_ready() {
            tracing::debug!("cut a gRPC connection whose client does not read its responses");
            return Poll::Ready(Ok(()));
        }
        if !ending.load(Ordering::Relaxed) && Pin::new(&mut over).poll(cx).is_ready() {
            ending.store(true, Ordering::Relaxed);
            // With another supervisor there, a client that is about to call is told to go there.
            if !called.load(Ordering::Relaxed) && !leaving.leaves() {
                return Poll::Ready(Ok(()));
            }
            connection.as_pin_mut().graceful_shutdown();
        }
        // The connection writes the answers of these calls at once, instead of in a pass of its own.
        calls.carry_on(cx);
        if !calls.all_begun() {
            // The connection goes on once they have.
            cx.waker().wake_by_ref();
        } else if let Poll::Ready(ended) = Pin::new(&mut connection).poll(cx) {
            return Poll::Ready(ended);
        }
        calls.begin(cx);
        Poll::Pending
    });
    if let Err(error) = ended.await {
        tracing::debug!(%error, "gRPC connection failed");
    }
    calls.give_up().await;
}

/// A connection without a call is cut: its client may never have sent the HTTP/2 preface, and would
/// not end the connection either.
async fn over(called: &AtomicBool, client: &Client, stop: Stop) {
    let uncalled = async {
        sleep(FIRST_CALL).await;
        if called.load(Ordering::Relaxed) {
            pending::<()>().await;
        }
    };
    tokio::select! {
        () = stop.begun() => {}
        () = client.left() => {}
        () = uncalled => {}
    }
}

#[derive(Clone)]
struct Servers {
    inference: GrpcInferenceServiceServer<Service>,
    health: HealthServer<Health>,
    limit: usize,
    stop: Stop,
}

pub(crate) type Reply = HttpResponse<tonic::body::Body>;

/// Every call has memory of its own before anything of it is read.
async fn reserve(
    front: Arc<Frontend>,
    client: &Arc<Client>,
    servers: Servers,
    caller: &Caller,
    request: HttpRequest<Counted>,
) -> (Reply, Option<Arc<Reserved>>) {
    let metadata = match call_head::check(&request) {
        Ok(bytes) => bytes,
        Err(refusal) => return (*refusal, None),
    };
    let path = request.uri().path();
    let of_health = path.starts_with(HEALTH) || [LIVE, READY].contains(&path);
    let (asked, pool) = if of_health { (Asked::Open, Pool::Health) } else { (Asked::Guarded, Pool::Memory) };
    let regular = if of_health { Ok(()) } else { client.regular().await };
    match regular.and_then(|()| Reserved::with_head(client, pool, metadata)) {
        Ok(reserved) => {
            // In memory of its own, so that refused calls have little.
            let call = Box::pin(call(front, servers, (caller, asked), request, &reserved));
            (RESERVED.scope(reserved.clone(), call).await, Some(reserved))
        }
        Err(refused) => (Status::from(refused).into_http(), None),
    }
}

async fn call(
    front: Arc<Frontend>,
    servers: Servers,
    (caller, asked): (&Caller, Asked),
    mut request: HttpRequest<Counted>,
    reserved: &Arc<Reserved>,
) -> Reply {
    let peer = match caller.identify(request.uri(), request.headers(), asked) {
        Ok(peer) => peer,
        Err(refusal) => return Status::from(refusal).into_http(),
    };
    if let Some(access) = access::of(request.extensions()) {
        access.set_peer(&peer);
    }
    request.extensions_mut().insert(peer);
    if request.uri().path() != INFER {
        let uri = request.uri().clone();
        let response = servers.call(request, reserved).await.unwrap_or_else(Status::into_http);
        return if unknown(&response) {
            Status::from(unsupported::call(uri.path())).into_http()
        } else {
            response
        };
    }
    let span = front.begin_grpc(&mut request);
    let response = servers.call(request, reserved).await.unwrap_or_else(Status::into_http);
    if let Some(span) = span {
        traced::end_grpc(span, &response);
    }
    response
}

/// Returns the code of a response, as far as its head says it: 0 for one that ends with its code.
fn code(response: &Reply) -> usize {
    let said = response.headers().get(Status::GRPC_STATUS);
    said.and_then(|code| code.to_str().ok()?.parse().ok()).unwrap_or(0)
}

/// Whether no service knew the call; tonic refuses such calls without a word.
fn unknown(response: &Reply) -> bool {
    let said = response.headers();
    let unimplemented = said.get(Status::GRPC_STATUS).is_some_and(|status| *status == "12");
    unimplemented && !said.contains_key(Status::GRPC_MESSAGE)
}

impl Servers {
    async fn call(
        self,
        mut request: HttpRequest<Counted>,
        reserved: &Arc<Reserved>,
    ) -> Result<Reply, Status> {
        let is_health = request.uri().path().starts_with(HEALTH);
        // All calls but inferences have short messages.
        let inferences = [INFER, STREAM].contains(&request.uri().path());
        let limit = if inferences { self.limit } else { self.limit.min(SHORT) };
        let mut inference = self.inference.max_decoding_message_size(limit);
        let of_reflection = reflection::is_called(request.uri().path());
        if request.uri().path() == STREAM || of_reflection {
            if envelope::encoding(request.headers())?.is_some() {
                return Err(Status::unimplemented(
                    "compressed messages are not supported in streams; send them uncompressed",
                ));
            }
            if of_reflection {
                return Ok(reflection::call(request, self.stop).await);
            }
            let beginnings = Beginnings::default();
            request.extensions_mut().insert(beginnings.clone());
            let Ok(response) =
                inference.call(request.map(|body| Messages::new(body, limit, beginnings))).await;
            return Ok(response);
        }
        let mut health = self.health.max_decoding_message_size(limit);
        let Some(encoding) = envelope::encoding(request.headers())? else {
            let request = request.map(|body| OneMessage::new(body, limit, reserved.clone()));
            let Ok(response) = match is_health {
                true => health.call(request).await,
                false => inference.call(request).await,
            };
            return Ok(response);
        };
        let accepted = envelope::accepts(request.headers(), encoding);
        let request = envelope::decompressed(request, encoding, limit, reserved).await?;
        if is_health {
            // It may be a stream, so that it has no end to wait for.
            let Ok(response) = health.call(request).await;
            return Ok(response);
        }
        let Ok(response) = inference.call(request).await;
        if accepted { envelope::compressed(response, encoding, reserved).await } else { Ok(response) }
    }
}

struct Service(Arc<Frontend>, Stop);

impl Service {
    fn metadata(&self, name: &str, version: &str) -> Result<Arc<Metadata>, RequestError> {
        model::metadata(&model::find(&self.0.router, name, version)?, name)
    }

    async fn infer(
        &self,
        request: ModelInferRequest,
        peer: &Peer,
        coming: RequestArrival,
    ) -> Result<(ModelInferResponse, Route), RequestError> {
        let reserved = RESERVED.get();
        let Inference { name, route, metadata, request, _place } =
            inference(&self.0, request, coming.journal.as_ref(), &reserved).await?;
        let id = request.id.clone();
        let outputs = model::infer(&self.0, &route, &metadata, request, (peer, coming), &reserved).await?;
        // It is there twice while it is written.
        reserved.replace(2 * model::bytes(&outputs))?;
        Ok((response(name, id, outputs), route))
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl GrpcInferenceService for Service {
    async fn server_live(&self, _: Request<ServerLiveRequest>) -> Answer<ServerLiveResponse> {
        Ok(Response::new(ServerLiveResponse { live: true }))
    }

    async fn server_ready(&self, _: Request<ServerReadyRequest>) -> Answer<ServerReadyResponse> {
        Ok(Response::new(ServerReadyResponse { ready: self.0.router.ready() }))
    }

    async fn model_ready(&self, request: Request<ModelReadyRequest>) -> Answer<ModelReadyResponse> {
        let ModelReadyRequest { name, version } = request.into_inner();
        // Like Triton's: an absent model is not ready. Clients ask this until a model has gone.
        let router = &self.0.router;
        let ready = model::find(router, &name, &version)
            .is_ok_and(|model| model::ready(router, &name, &model).is_ok());
        Ok(Response::new(ModelReadyResponse { ready }))
    }

    async fn server_metadata(&self, _: Request<ServerMetadataRequest>) -> Answer<ServerMetadataResponse> {
        Ok(Response::new(describe::server(self.0.regions.allowed())))
    }

    async fn model_metadata(&self, request: Request<ModelMetadataRequest>) -> Answer<ModelMetadataResponse> {
        let ModelMetadataRequest { name, version } = request.into_inner();
        Ok(Response::new(describe::model(&*self.metadata(&name, &version)?)))
    }

    async fn model_infer(&self, request: Request<ModelInferRequest>) -> Answer<ModelInferResponse> {
        let coming = traced::coming(request.extensions());
        let peer = Arc::clone(caller::of(request.extensions()));
        let (asked, _, request) = request.into_parts();
        let answered = self.infer(request, &peer, coming).await;
        let (response, route) = answered.inspect_err(|why| RESERVED.get().deliveries().failed(why))?;
        let mut response = Response::new(response);
        if let Some(load) = load_metrics::told(asked.as_ref(), || route.load()) {
            let load = MetadataValue::try_from(load.as_bytes()).ok();
            load.map(|load| response.metadata_mut().insert(load_metrics::TOLD, load));
        }
        Ok(response)
    }

    type ModelStreamInferStream = Conversation;

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<ModelInferRequest>>,
    ) -> Answer<Conversation> {
        let peer = Arc::clone(caller::of(request.extensions()));
        let beginnings = request.extensions().get().cloned().unwrap_or_default();
        let context = Context { front: Arc::clone(&self.0), peer, call: RESERVED.get(), beginnings };
        Ok(Response::new(Conversation::new(context, request.into_inner(), self.1.clone())?))
    }

    async fn model_config(&self, request: Request<ModelConfigRequest>) -> Answer<ModelConfigResponse> {
        let ModelConfigRequest { name, version } = request.into_inner();
        let route = model::find(&self.0.router, &name, &version)?;
        let config = describe::config(&*model::metadata(&route, &name)?, route.content());
        Ok(Response::new(ModelConfigResponse { config: Some(config) }))
    }

    async fn system_shared_memory_status(
        &self,
        request: Request<SystemSharedMemoryStatusRequest>,
    ) -> Answer<SystemSharedMemoryStatusResponse> {
        let told =
            self.0.regions.status(caller::of(request.extensions()), &request.get_ref().name)?.into_iter();
        let regions = told.map(|region| (region.name.clone(), region)).collect();
        Ok(Response::new(SystemSharedMemoryStatusResponse { regions }))
    }

    async fn system_shared_memory_register(
        &self,
        request: Request<SystemSharedMemoryRegisterRequest>,
    ) -> Answer<SystemSharedMemoryRegisterResponse> {
        let by = Arc::clone(caller::of(request.extensions()));
        let SystemSharedMemoryRegisterRequest { name, key, offset, byte_size } = request.into_inner();
        self.0.regions.register(&by, RegionStatus { name, key, offset, byte_size })?;
        Ok(Response::new(SystemSharedMemoryRegisterResponse {}))
    }

    async fn system_shared_memory_unregister(
        &self,
        request: Request<SystemSharedMemoryUnregisterRequest>,
    ) -> Answer<SystemSharedMemoryUnregisterResponse> {
        let by = caller::of(request.extensions());
        match request.get_ref().name.as_str() {
            "" => self.0.regions.unregister_all(by)?,
            name => self.0.regions.unregister(by, name)?,
        }
        Ok(Response::new(SystemSharedMemoryUnregisterResponse {}))
    }

    async fn cuda_shared_memory_status(
        &self,
        request: Request<CudaSharedMemoryStatusRequest>,
    ) -> Answer<CudaSharedMemoryStatusResponse> {
        unsupported::cuda_status(&request.into_inner().name)?;
        Ok(Response::new(CudaSharedMemoryStatusResponse {}))
    }

    async fn cuda_shared_memory_register(
        &self,
        request: Request<CudaSharedMemoryRegisterRequest>,
    ) -> Answer<CudaSharedMemoryRegisterResponse> {
        Err(unsupported::register_cuda(&request.into_inner().name).into())
    }

    async fn cuda_shared_memory_unregister(
        &self,
        _: Request<CudaSharedMemoryUnregisterRequest>,
    ) -> Answer<CudaSharedMemoryUnregisterResponse> {
        Ok(Response::new(CudaSharedMemoryUnregisterResponse {}))
    }

    async fn trace_setting(&self, _: Request<TraceSettingRequest>) -> Answer<TraceSettingResponse> {
        Err(unsupported::extension(unsupported::TRACING).into())
    }

    async fn log_settings(&self, _: Request<LogSettingsRequest>) -> Answer<LogSettingsResponse> {
        Err(unsupported::extension(unsupported::LOGGING).into())
    }

    async fn model_statistics(
        &self,
        request: Request<ModelStatisticsRequest>,
    ) -> Answer<ModelStatisticsResponse> {
        let ModelStatisticsRequest { name, version } = request.into_inner();
        let models = match name.as_str() {
            "" => self.0.router.models(),
            name => vec![(name.to_owned(), model::find(&self.0.router, name, &version)?)],
        };
        Ok(Response::new(statistics::of(models)))
    }

    async fn repository_index(
        &self,
        request: Request<RepositoryIndexRequest>,
    ) -> Answer<RepositoryIndexResponse> {
        Ok(Response::new(repository::index(&self.0.repository, &request.into_inner())?))
    }

    async fn repository_model_load(
        &self,
        request: Request<RepositoryModelLoadRequest>,
    ) -> Answer<RepositoryModelLoadResponse> {
        let by = Arc::clone(caller::of(request.extensions()));
        repository::load(&self.0.repository, by, request.into_inner()).await?;
        Ok(Response::new(RepositoryModelLoadResponse {}))
    }

    async fn repository_model_unload(
        &self,
        request: Request<RepositoryModelUnloadRequest>,
    ) -> Answer<RepositoryModelUnloadResponse> {
        let by = Arc::clone(caller::of(request.extensions()));
        repository::unload(&self.0.repository, by, request.into_inner()).await?;
        Ok(Response::new(RepositoryModelUnloadResponse {}))
    }
}
