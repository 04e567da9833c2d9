//! gRPC's reflection service, v1 and v1alpha, for `grpcurl`, Postman and gateways. It returns the
//! services and the descriptors of their files.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::{Stream, StreamExt};
use hyper::Request as HttpRequest;
use tonic::codegen::Service as _;
use tonic::{Code, Request, Response, Status, Streaming};

use super::infer_stream::stopping;
use crate::admission::{CALL_PERMIT, Clipped, MemoryPermit, Stop};
use crate::proto::reflection::server_reflection_request::MessageRequest;
use crate::proto::reflection::server_reflection_response::MessageResponse;
use crate::proto::reflection::server_reflection_server::{ServerReflection, ServerReflectionServer};
use crate::proto::reflection::{
    ErrorResponse, ExtensionNumberResponse, FileDescriptorResponse, ListServiceResponse,
    ServerReflectionRequest, ServerReflectionResponse, ServiceResponse,
};
use crate::proto::reflection_v1alpha::server_reflection_server as v1alpha;
use crate::transport::{CountedBody, GrpcAnswer, MessageBody, MessageStarts, SHORT_BODY_BYTES};

mod tables {
    include!(concat!(env!("OUT_DIR"), "/descriptors.rs"));
}

use tables::{FILES, SERVICES, SYMBOLS};

const V1: &str = "/grpc.reflection.v1.ServerReflection/";
const V1_ALPHA: &str = "/grpc.reflection.v1alpha.ServerReflection/";

pub(super) fn is_called(path: &str) -> bool {
    path.starts_with(V1) || path.starts_with(V1_ALPHA)
}

/// Answers a call for which [`is_called`].
pub(super) async fn call(request: HttpRequest<CountedBody>, stop: Stop) -> GrpcAnswer {
    let is_v1 = request.uri().path().starts_with(V1);
    let request = request.map(|body| MessageBody::stream(body, SHORT_BODY_BYTES, MessageStarts::default()));
    let Ok(reply) = match is_v1 {
        true => ServerReflectionServer::new(Reflection(stop)).call(request).await,
        false => v1alpha::ServerReflectionServer::new(Reflection(stop)).call(request).await,
    };
    reply
}

struct Reflection(Stop);

#[tonic::async_trait]
impl ServerReflection for Reflection {
    type ServerReflectionInfoStream = ReflectionAnswers;

    async fn server_reflection_info(
        &self,
        request: Request<Streaming<ServerReflectionRequest>>,
    ) -> Result<Response<ReflectionAnswers>, Status> {
        Ok(Response::new(ReflectionAnswers::new(request.into_inner(), self.0.clone())))
    }
}

#[tonic::async_trait]
impl v1alpha::ServerReflection for Reflection {
    type ServerReflectionInfoStream = ReflectionAnswers;

    async fn server_reflection_info(
        &self,
        request: Request<Streaming<ServerReflectionRequest>>,
    ) -> Result<Response<ReflectionAnswers>, Status> {
        Ok(Response::new(ReflectionAnswers::new(request.into_inner(), self.0.clone())))
    }
}

/// The answers of a call, in the order of its requests. The call ends when serving ends, or when
/// its connection must make room.
pub(super) struct ReflectionAnswers {
    requests: Streaming<ServerReflectionRequest>,
    call: Arc<MemoryPermit>,
    stop: BoxFuture<'static, ()>,
    /// True if the last answer may not be written yet.
    has_answered: bool,
}

impl ReflectionAnswers {
    fn new(requests: Streaming<ServerReflectionRequest>, stop: Stop) -> Self {
        let call = CALL_PERMIT.get();
        let client = Arc::clone(call.client());
        let stop = Box::pin(async move { client.must_end(stop).await });
        Self { requests, call, stop, has_answered: false }
    }
}

impl Stream for ReflectionAnswers {
    type Item = Result<ServerReflectionResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.stop.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(stopping())));
        }
        let call = Arc::clone(&self.call);
        let next = CALL_PERMIT.sync_scope(call, || self.requests.poll_next_unpin(cx));
        if next.is_pending() && !std::mem::take(&mut self.has_answered) {
            // The connection counts as idle until the next request.
            self.call.release();
        }
        let Some(request) = ready!(next) else { return Poll::Ready(None) };
        self.has_answered = true;
        Poll::Ready(Some(request.map(respond)))
    }
}

fn respond(request: ServerReflectionRequest) -> ServerReflectionResponse {
    let answer = match &request.message_request {
        Some(request) => answer(request),
        None => fault(Code::InvalidArgument, "the request is empty".to_owned()),
    };
    ServerReflectionResponse {
        valid_host: request.host.clone(),
        original_request: Some(request),
        message_response: Some(answer),
    }
}

fn answer(request: &MessageRequest) -> MessageResponse {
    match request {
        MessageRequest::ListServices(_) => {
            let service = |name: &&str| ServiceResponse { name: (*name).to_owned() };
            let service = SERVICES.iter().map(service).collect();
            MessageResponse::ListServicesResponse(ListServiceResponse { service })
        }
        MessageRequest::FileByFilename(name) => match FILES.iter().find(|(file, _)| file == name) {
            Some((_, descriptor)) => file(descriptor),
            None => absent("file", name),
        },
        MessageRequest::FileContainingSymbol(symbol) => match file_of(symbol) {
            Some(place) => file(FILES[place].1),
            None => absent("symbol", symbol),
        },
        MessageRequest::FileContainingExtension(extension) => {
            absent("extension of", &extension.containing_type)
        }
        MessageRequest::AllExtensionNumbersOfType(name) => match file_of(name) {
            Some(_) => MessageResponse::AllExtensionNumbersResponse(ExtensionNumberResponse {
                base_type_name: name.clone(),
                extension_number: Vec::new(),
            }),
            None => absent("type", name),
        },
    }
}

fn file_of(symbol: &str) -> Option<usize> {
    let found = SYMBOLS.binary_search_by_key(&symbol, |(name, _)| name).ok()?;
    Some(SYMBOLS[found].1)
}

/// Returns the descriptor of a file. It has no imports, because the build refuses files with
/// imports.
fn file(descriptor: &'static [u8]) -> MessageResponse {
    let file_descriptor_proto = vec![Bytes::from_static(descriptor)];
    MessageResponse::FileDescriptorResponse(FileDescriptorResponse { file_descriptor_proto })
}

fn absent(what: &str, name: &str) -> MessageResponse {
    fault(Code::NotFound, format!("{what} '{}' not found", Clipped(name)))
}

fn fault(code: Code, error_message: String) -> MessageResponse {
    MessageResponse::ErrorResponse(ErrorResponse { error_code: code.into(), error_message })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptors(request: &MessageRequest) -> Result<Bytes, i32> {
        match answer(request) {
            MessageResponse::FileDescriptorResponse(mut found) => Ok(found.file_descriptor_proto.remove(0)),
            MessageResponse::ErrorResponse(ErrorResponse { error_code, .. }) => Err(error_code),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_service_is_listed_and_described() {
        assert_eq!(
            SERVICES,
            [
                "inference.GRPCInferenceService",
                "grpc.health.v1.Health",
                "grpc.reflection.v1.ServerReflection",
                "grpc.reflection.v1alpha.ServerReflection",
            ]
        );
        for service in SERVICES {
            let found = descriptors(&MessageRequest::FileContainingSymbol((*service).to_owned()));
            assert!(found.is_ok_and(|file| !file.is_empty()), "{service}");
        }
        for (name, descriptor) in FILES {
            let found = descriptors(&MessageRequest::FileByFilename((*name).to_owned()));
            assert_eq!(found, Ok(Bytes::from_static(descriptor)), "{name}");
        }
    }

    #[test]
    fn methods_and_nested_types_are_symbols_and_nothing_else_is() {
        for symbol in [
            "inference.GRPCInferenceService.ModelInfer",
            "inference.ModelInferRequest",
            "inference.ModelInferRequest.InferInputTensor",
            "inference.ModelInferRequest.InferInputTensor.ParametersEntry",
            "grpc.health.v1.HealthCheckResponse.ServingStatus",
        ] {
            assert!(
                descriptors(&MessageRequest::FileContainingSymbol(symbol.to_owned())).is_ok(),
                "{symbol}"
            );
        }
        for symbol in
            ["", "inference", "inference.ModelInfer", "ModelInferRequest", ".inference.ModelInferRequest"]
        {
            let found = descriptors(&MessageRequest::FileContainingSymbol(symbol.to_owned()));
            assert_eq!(found, Err(Code::NotFound.into()), "{symbol}");
        }
        assert!(descriptors(&MessageRequest::FileByFilename("other.proto".to_owned())).is_err());
    }
}
