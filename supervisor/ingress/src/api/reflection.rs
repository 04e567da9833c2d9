//! gRPC's reflection service, v1 and v1alpha, for `grpcurl`, Postman and gateways. It returns the
//! services and the descriptors of their files.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use std::task::Poll;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use hyper::Request as HttpRequest;
use prost::Message as _;
use prost_types::{DescriptorProto, FileDescriptorSet};
use tonic::codegen::Service as _;
use tonic::{Code, Request, Response, Status, Streaming};

use super::grpc::Services;
use super::infer_stream::stopping;
use crate::admission::{CALL_PERMIT, Clipped};
use crate::proto::reflection::server_reflection_request::MessageRequest;
use crate::proto::reflection::server_reflection_response::MessageResponse;
use crate::proto::reflection::server_reflection_server::{ServerReflection, ServerReflectionServer};
use crate::proto::reflection::{
    ErrorResponse, ExtensionNumberResponse, FileDescriptorResponse, ListServiceResponse,
    ServerReflectionRequest, ServerReflectionResponse, ServiceResponse,
};
use crate::transport::{CountedBody, GrpcAnswer, MessageBody, MessageStarts, SHORT_BODY_BYTES};

const V1: &str = "/grpc.reflection.v1.ServerReflection/";
const V1_ALPHA: &str = "/grpc.reflection.v1alpha.ServerReflection/";

static DESCRIPTORS: LazyLock<Descriptors> = LazyLock::new(|| {
    let served: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/served.descriptors"));
    Descriptors::new(FileDescriptorSet::decode(served).expect("the build has encoded the descriptors"))
});

pub(super) fn is_called(path: &str) -> bool {
    path.starts_with(V1) || path.starts_with(V1_ALPHA)
}

/// Answers a call for which [`is_called`]. Both versions have the same messages.
pub(super) async fn call(services: Arc<Services>, mut request: HttpRequest<CountedBody>) -> GrpcAnswer {
    let method = request.uri().path().strip_prefix(V1_ALPHA);
    if let Some(uri) = method.and_then(|method| format!("{V1}{method}").parse().ok()) {
        *request.uri_mut() = uri;
    }
    let request = request.map(|body| MessageBody::stream(body, SHORT_BODY_BYTES, MessageStarts::default()));
    let Ok(reply) = ServerReflectionServer::from_arc(services).call(request).await;
    reply
}

#[tonic::async_trait]
impl ServerReflection for Services {
    type ServerReflectionInfoStream = BoxStream<'static, Result<ServerReflectionResponse, Status>>;

    /// Returns the answers of a call, in the order of its requests. The call ends when serving ends,
    /// or when its connection must make room.
    async fn server_reflection_info(
        &self,
        request: Request<Streaming<ServerReflectionRequest>>,
    ) -> Result<Response<Self::ServerReflectionInfoStream>, Status> {
        let (mut requests, call, stop) = (request.into_inner(), CALL_PERMIT.get(), self.stop.clone());
        let client = Arc::clone(call.client());
        let mut must_end = Box::pin(async move { client.must_end(stop).await });
        let mut has_answered = false;
        let answers = stream::poll_fn(move |cx| {
            if must_end.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Some(Err(stopping())));
            }
            let next = CALL_PERMIT.sync_scope(Arc::clone(&call), || requests.poll_next_unpin(cx));
            // The last answer may not be written yet at the first poll after it.
            if next.is_pending() && !has_answered {
                // The connection counts as idle until the next request.
                call.release();
            }
            has_answered = next.is_ready();
            next.map_ok(respond)
        });
        Ok(Response::new(answers.boxed()))
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
    let Descriptors { files, symbols, services } = &*DESCRIPTORS;
    let described = |file: Option<&Bytes>, kind, name| match file {
        Some(file) => {
            let file_descriptor_proto = vec![file.clone()];
            MessageResponse::FileDescriptorResponse(FileDescriptorResponse { file_descriptor_proto })
        }
        None => absent(kind, name),
    };
    match request {
        MessageRequest::ListServices(_) => {
            let service = services.iter().map(|name| ServiceResponse { name: name.clone() }).collect();
            MessageResponse::ListServicesResponse(ListServiceResponse { service })
        }
        MessageRequest::FileByFilename(name) => described(files.get(name), "file", name),
        MessageRequest::FileContainingSymbol(symbol) => described(symbols.get(symbol), "symbol", symbol),
        MessageRequest::FileContainingExtension(extension) => {
            absent("extension of", &extension.containing_type)
        }
        MessageRequest::AllExtensionNumbersOfType(name) if symbols.contains_key(name) => {
            MessageResponse::AllExtensionNumbersResponse(ExtensionNumberResponse {
                base_type_name: name.clone(),
                extension_number: Vec::new(),
            })
        }
        MessageRequest::AllExtensionNumbersOfType(name) => absent("type", name),
    }
}

fn absent(what: &str, name: &str) -> MessageResponse {
    fault(Code::NotFound, format!("{what} '{}' not found", Clipped(name)))
}

fn fault(code: Code, error_message: String) -> MessageResponse {
    MessageResponse::ErrorResponse(ErrorResponse { error_code: code.into(), error_message })
}

/// The encoded descriptors of the files that define the services. No file has imports, because the
/// build refuses them.
#[derive(Default)]
struct Descriptors {
    /// The files by their names.
    files: HashMap<String, Bytes>,
    /// The files by the names of their services, methods and types.
    symbols: HashMap<String, Bytes>,
    services: Vec<String>,
}

impl Descriptors {
    fn new(served: FileDescriptorSet) -> Self {
        let mut all = Self::default();
        for file in served.file {
            let encoded = Bytes::from(file.encode_to_vec());
            let (mut names, package) = (Vec::new(), file.package());
            for service in &file.service {
                let name = format!("{package}.{}", service.name());
                names.extend(service.method.iter().map(|method| format!("{name}.{}", method.name())));
                names.push(name.clone());
                all.services.push(name);
            }
            names.extend(file.enum_type.iter().map(|one| format!("{package}.{}", one.name())));
            file.message_type.iter().for_each(|message| name_types(package, message, &mut names));
            all.symbols.extend(names.into_iter().map(|name| (name, encoded.clone())));
            all.files.insert(file.name().to_owned(), encoded);
        }
        all
    }
}

/// Adds the names of a message and of the types within it.
fn name_types(within: &str, message: &DescriptorProto, names: &mut Vec<String>) {
    let name = format!("{within}.{}", message.name());
    names.extend(message.enum_type.iter().map(|one| format!("{name}.{}", one.name())));
    message.nested_type.iter().for_each(|nested| name_types(&name, nested, names));
    names.push(name);
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
            DESCRIPTORS.services,
            [
                "inference.GRPCInferenceService",
                "grpc.health.v1.Health",
                "grpc.reflection.v1.ServerReflection",
                "grpc.reflection.v1alpha.ServerReflection",
            ]
        );
        for service in &DESCRIPTORS.services {
            let found = descriptors(&MessageRequest::FileContainingSymbol(service.clone()));
            assert!(found.is_ok_and(|file| !file.is_empty()), "{service}");
        }
        for (name, descriptor) in &DESCRIPTORS.files {
            let found = descriptors(&MessageRequest::FileByFilename(name.clone()));
            assert_eq!(found, Ok(descriptor.clone()), "{name}");
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
