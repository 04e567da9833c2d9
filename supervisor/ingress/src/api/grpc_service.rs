//! The gRPC service of the Open Inference Protocol.

use std::sync::Arc;

use shadowslice_datapath::pipeline::RequestArrival;
use tonic::metadata::MetadataValue;
use tonic::{Request, Response, Status, Streaming};

use super::client_timeout::client_timeout;
use super::grpc::Services;
use super::infer_stream::{InferStream, StreamContext};
use super::{describe, grpc_infer, load_metrics, model, repository, statistics, trace, unsupported};
use crate::admission::{CALL_PERMIT, RequestError, peer};
use crate::proto::grpc_inference_service_server::GrpcInferenceService;
use crate::proto::model_repository_parameter::ParameterChoice;
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

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl GrpcInferenceService for Services {
    async fn server_live(&self, _: Request<ServerLiveRequest>) -> Answer<ServerLiveResponse> {
        Ok(Response::new(ServerLiveResponse { live: true }))
    }

    async fn server_ready(&self, _: Request<ServerReadyRequest>) -> Answer<ServerReadyResponse> {
        Ok(Response::new(ServerReadyResponse { ready: self.front.router.ready() }))
    }

    async fn model_ready(&self, request: Request<ModelReadyRequest>) -> Answer<ModelReadyResponse> {
        let ModelReadyRequest { name, version } = request.into_inner();
        // As in Triton, an absent model is not ready. Clients poll this until a model is gone.
        let router = &self.front.router;
        let ready = model::find(router, &name, &version)
            .is_ok_and(|model| model::ready(router, &name, &model).is_ok());
        Ok(Response::new(ModelReadyResponse { ready }))
    }

    async fn server_metadata(&self, _: Request<ServerMetadataRequest>) -> Answer<ServerMetadataResponse> {
        Ok(Response::new(describe::server(self.front.regions.allowed())))
    }

    async fn model_metadata(&self, request: Request<ModelMetadataRequest>) -> Answer<ModelMetadataResponse> {
        let ModelMetadataRequest { name, version } = request.into_inner();
        let route = model::find(&self.front.router, &name, &version)?;
        let metadata = model::metadata(&route, &name)?;
        Ok(Response::new(describe::model(&metadata, &self.front.router.versions(&name))))
    }

    async fn model_infer(&self, request: Request<ModelInferRequest>) -> Answer<ModelInferResponse> {
        let (arrival, permit) = (trace::arrival(request.extensions()), CALL_PERMIT.get());
        let peer = Arc::clone(peer(request.extensions()));
        let (metadata, _, request) = request.into_parts();
        let answer = async {
            let (router, headers) = (&self.front.router, metadata.as_ref());
            let route = model::select(router, &request.model_name, &request.model_version, headers)?;
            let timeout =
                client_timeout(metadata.as_ref()).inspect_err(|_| route.pipeline().count_malformed())?;
            let tenant = self.front.membership.tenant(&peer, metadata.as_ref());
            let arrival = RequestArrival { timeout, tenant, ..arrival };
            let answer = grpc_infer::infer(&self.front, route, request, &peer, arrival, &permit).await?;
            // The answer is in memory twice while it is written.
            permit.replace(2 * grpc_infer::response_bytes(&answer.0))?;
            Ok::<_, RequestError>(answer)
        };
        let (response, target) = answer.await.inspect_err(|why| permit.take_deliveries().mark_failed(why))?;
        let mut response = Response::new(response);
        if let Some(load) = load_metrics::header(metadata.as_ref(), || target.route.pipeline().load()) {
            let load = MetadataValue::try_from(load.as_bytes()).ok();
            load.map(|load| response.metadata_mut().insert(load_metrics::HEADER, load));
        }
        Ok(response)
    }

    type ModelStreamInferStream = InferStream;

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<ModelInferRequest>>,
    ) -> Answer<InferStream> {
        let peer = Arc::clone(peer(request.extensions()));
        let starts = request.extensions().get().cloned().unwrap_or_default();
        let timeout = client_timeout(request.metadata().as_ref()).map_err(RequestError::from)?;
        let tenant = self.front.membership.tenant(&peer, request.metadata().as_ref());
        let began = trace::arrival(request.extensions()).began;
        let ends = timeout.and_then(|timeout| began.checked_add(timeout));
        let (front, call) = (Arc::clone(&self.front), CALL_PERMIT.get());
        let headers = Arc::new(request.metadata().as_ref().clone());
        let context = StreamContext { front, peer, tenant, call, starts, ends, headers };
        Ok(Response::new(InferStream::new(context, request.into_inner(), self.stop.clone())?))
    }

    async fn model_config(&self, request: Request<ModelConfigRequest>) -> Answer<ModelConfigResponse> {
        let ModelConfigRequest { name, version } = request.into_inner();
        let route = model::find(&self.front.router, &name, &version)?;
        let config = describe::config(&*model::metadata(&route, &name)?, route.pipeline().content());
        Ok(Response::new(ModelConfigResponse { config: Some(config) }))
    }

    async fn system_shared_memory_status(
        &self,
        request: Request<SystemSharedMemoryStatusRequest>,
    ) -> Answer<SystemSharedMemoryStatusResponse> {
        let found = self.front.regions.status(peer(request.extensions()), &request.get_ref().name)?;
        let regions = found.into_iter().map(|region| (region.name.clone(), region)).collect();
        Ok(Response::new(SystemSharedMemoryStatusResponse { regions }))
    }

    async fn system_shared_memory_register(
        &self,
        request: Request<SystemSharedMemoryRegisterRequest>,
    ) -> Answer<SystemSharedMemoryRegisterResponse> {
        let by = Arc::clone(peer(request.extensions()));
        let SystemSharedMemoryRegisterRequest { name, key, offset, byte_size } = request.into_inner();
        self.front.regions.register(&by, RegionStatus { name, key, offset, byte_size })?;
        Ok(Response::new(SystemSharedMemoryRegisterResponse {}))
    }

    async fn system_shared_memory_unregister(
        &self,
        request: Request<SystemSharedMemoryUnregisterRequest>,
    ) -> Answer<SystemSharedMemoryUnregisterResponse> {
        let by = peer(request.extensions());
        self.front.regions.unregister(by, &request.get_ref().name)?;
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
        Ok(Response::new(statistics::of(&self.front.router, &name, &version)?))
    }

    async fn repository_index(
        &self,
        request: Request<RepositoryIndexRequest>,
    ) -> Answer<RepositoryIndexResponse> {
        let RepositoryIndexRequest { repository_name, ready } = request.into_inner();
        repository::check_repository(&repository_name).map_err(RequestError::from)?;
        Ok(Response::new(repository::index(&self.front.repository, ready)))
    }

    async fn repository_model_load(
        &self,
        request: Request<RepositoryModelLoadRequest>,
    ) -> Answer<RepositoryModelLoadResponse> {
        let by = Arc::clone(peer(request.extensions()));
        let RepositoryModelLoadRequest { repository_name, model_name, parameters } = request.into_inner();
        repository::check_repository(&repository_name).map_err(RequestError::from)?;
        let texts = parameters.into_iter().map(|(name, value)| match value.parameter_choice {
            Some(ParameterChoice::StringParam(text)) => (name, Some(text)),
            _ => (name, None),
        });
        repository::load(&self.front.repository, &by, model_name, texts).await?;
        Ok(Response::new(RepositoryModelLoadResponse {}))
    }

    async fn repository_model_unload(
        &self,
        request: Request<RepositoryModelUnloadRequest>,
    ) -> Answer<RepositoryModelUnloadResponse> {
        let by = Arc::clone(peer(request.extensions()));
        let RepositoryModelUnloadRequest { repository_name, model_name, .. } = request.into_inner();
        repository::check_repository(&repository_name).map_err(RequestError::from)?;
        repository::unload(&self.front.repository, &by, model_name).await?;
        Ok(Response::new(RepositoryModelUnloadResponse {}))
    }
}
