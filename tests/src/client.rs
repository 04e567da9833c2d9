//! A gRPC client of the Open Inference Protocol over a Unix socket.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures_util::{Stream, TryStreamExt, stream};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::UnixStream;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;
use tower::{Service, ServiceExt};

use crate::cases::ClientTensor;
use crate::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use crate::proto::health::HealthCheckRequest;
use crate::proto::health::health_check_response::ServingStatus;
use crate::proto::health::health_client::HealthClient;
use crate::proto::infer_parameter::ParameterChoice as Choice;
use crate::proto::model_infer_request::InferInputTensor;
use crate::proto::model_metadata_response::TensorMetadata;
use crate::proto::model_repository_parameter::ParameterChoice;
use crate::proto::repository_index_response::ModelIndex;
use crate::proto::{
    InferParameter, ModelInferRequest, ModelInferResponse, ModelMetadataRequest, ModelReadyRequest,
    ModelRepositoryParameter, RepositoryIndexRequest, RepositoryModelLoadRequest,
    RepositoryModelUnloadRequest, ServerReadyRequest,
};

/// The maximum size of a response that the client accepts, in bytes.
const MAX_RESPONSE_BYTES: usize = 256 << 20;

const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";

/// The length of the prefix of each gRPC message in bytes. The prefix consists of a compression
/// flag and the length.
const FRAMING: usize = 5;

/// The maximum duration of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A model in the answer of `RepositoryIndex`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepositoryEntry {
    pub name: String,
    /// The state, such as READY.
    pub state: String,
    /// The reason for the state, which may be empty.
    pub reason: String,
}

/// An input of a model, according to the server's metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInputSpec {
    pub name: String,
    /// The datatype in the protocol's notation, such as FP32.
    pub datatype: String,
    /// The shape, including the batch axis. The length -1 stands for an axis of any length.
    pub shape: Vec<i64>,
}

/// A client with one connection, which it opens with the first request and again after a failure.
/// Clones share the connection. Any number of requests may be in flight on it.
#[derive(Debug, Clone)]
pub struct InferGrpcClient {
    grpc: GrpcInferenceServiceClient<Channel>,
    channel: Channel,
}

impl InferGrpcClient {
    /// Creates a client for the server that listens on this socket.
    pub fn new(socket: &Path) -> Self {
        let socket = socket.to_path_buf();
        let connector = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
        });
        let endpoint = Endpoint::from_static("http://localhost").connect_timeout(CONNECT_TIMEOUT);
        Self::on(endpoint.connect_with_connector_lazy(connector))
    }

    /// Creates a client for the server at this TCP address.
    pub fn at(address: SocketAddr) -> Self {
        let uri = Uri::builder().scheme("http").authority(address.to_string()).path_and_query("/").build();
        let endpoint = Endpoint::from(uri.expect("a socket's address is an authority"));
        Self::on(endpoint.connect_timeout(CONNECT_TIMEOUT).connect_lazy())
    }

    fn on(channel: Channel) -> Self {
        let grpc =
            GrpcInferenceServiceClient::new(channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES);
        Self { grpc, channel }
    }

    /// Returns the answer of `ServerReady`.
    pub async fn server_ready(&mut self) -> Result<bool, Status> {
        Ok(self.grpc.server_ready(ServerReadyRequest {}).await?.into_inner().ready)
    }

    /// Watches gRPC's health service. Yields the current state and then each change. True means
    /// SERVING.
    pub async fn health(&self) -> Result<impl Stream<Item = Result<bool, Status>> + use<>, Status> {
        let mut health = HealthClient::new(self.channel.clone());
        let responses = health.watch(HealthCheckRequest::default()).await?.into_inner();
        Ok(responses.map_ok(|answer| answer.status() == ServingStatus::Serving))
    }

    /// Returns the answer of `ModelReady`.
    pub async fn model_ready(&mut self, model: &str) -> Result<bool, Status> {
        let request = ModelReadyRequest { name: model.into(), version: String::new() };
        Ok(self.grpc.model_ready(request).await?.into_inner().ready)
    }

    /// Lists all models, or only the ready models.
    pub async fn repository_index(&mut self, ready: bool) -> Result<Vec<RepositoryEntry>, Status> {
        let request = RepositoryIndexRequest { repository_name: String::new(), ready };
        let listed = self.grpc.repository_index(request).await?.into_inner().models;
        let entry = |model: ModelIndex| RepositoryEntry {
            name: model.name,
            state: model.state,
            reason: model.reason,
        };
        Ok(listed.into_iter().map(entry).collect())
    }

    /// Loads a model. `config` is JSON whose keys override keys of the configuration.
    pub async fn load(&mut self, model: &str, config: Option<&str>) -> Result<(), Status> {
        let text = |json: &str| ModelRepositoryParameter {
            parameter_choice: Some(ParameterChoice::StringParam(json.to_owned())),
        };
        let request = RepositoryModelLoadRequest {
            model_name: model.into(),
            parameters: config.map(|json| ("config".to_owned(), text(json))).into_iter().collect(),
            ..RepositoryModelLoadRequest::default()
        };
        self.grpc.repository_model_load(request).await.map(drop)
    }

    pub async fn unload(&mut self, model: &str) -> Result<(), Status> {
        let request = RepositoryModelUnloadRequest {
            model_name: model.into(),
            ..RepositoryModelUnloadRequest::default()
        };
        self.grpc.repository_model_unload(request).await.map(drop)
    }

    /// Returns the model's inputs according to its metadata.
    pub async fn inputs(&mut self, model: &str) -> Result<Vec<ModelInputSpec>, Status> {
        let request = ModelMetadataRequest { name: model.into(), version: String::new() };
        let metadata = self.grpc.model_metadata(request).await?.into_inner();
        let spec = |input: TensorMetadata| ModelInputSpec {
            name: input.name,
            datatype: input.datatype,
            shape: input.shape,
        };
        Ok(metadata.inputs.into_iter().map(spec).collect())
    }

    /// Sends one request, and returns the output tensors.
    pub async fn infer(&mut self, model: &str, inputs: &[ClientTensor]) -> Result<Vec<ClientTensor>, Status> {
        self.infer_with(model, inputs, &[]).await
    }

    /// Sends one request with gRPC metadata in the form of (name, value) pairs.
    pub async fn infer_with(
        &mut self,
        model: &str,
        inputs: &[ClientTensor],
        metadata: &[(&'static str, &str)],
    ) -> Result<Vec<ClientTensor>, Status> {
        let mut call = Request::new(request(model, inputs));
        for (name, value) in metadata {
            let value = value
                .parse()
                .map_err(|_| Status::invalid_argument("the value is not valid as gRPC metadata"))?;
            call.metadata_mut().append(*name, value);
        }
        tensors(self.grpc.model_infer(call).await?.into_inner())
    }

    /// Sends requests one by one over a single `ModelStreamInfer` call. The id of each request is
    /// its position. Returns the error text of each answer, which is empty if the request
    /// succeeded.
    pub async fn infer_in_stream(
        &mut self,
        requests: &[(&str, &[ClientTensor])],
    ) -> Result<Vec<String>, Status> {
        let requests = requests.iter().enumerate();
        let requests: Vec<_> = requests
            .map(|(at, (model, inputs))| ModelInferRequest { id: at.to_string(), ..request(model, inputs) })
            .collect();
        let answers = self.grpc.model_stream_infer(stream::iter(requests)).await?.into_inner();
        answers.map_ok(|answer| answer.error_message).try_collect().await
    }

    /// Sends one request with a priority. Lower numbers mean a higher priority.
    pub async fn infer_with_priority(
        &mut self,
        model: &str,
        inputs: &[ClientTensor],
        priority: i64,
    ) -> Result<Vec<ClientTensor>, Status> {
        let mut call = request(model, inputs);
        let priority = InferParameter { parameter_choice: Some(Choice::Int64Param(priority)) };
        call.parameters.insert("priority".to_owned(), priority);
        tensors(self.grpc.model_infer(call).await?.into_inner())
    }

    /// Sends the headers of a request immediately, and the message when the future `delay`
    /// completes.
    pub async fn infer_with_late_body(
        &self,
        model: &str,
        inputs: &[ClientTensor],
        delay: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Vec<ClientTensor>, Status> {
        let mut grpc = tonic::client::Grpc::new(self.channel.clone());
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let message = request(model, inputs);
        let call = Request::new(stream::once(async {
            delay.await;
            message
        }));
        let path = PathAndQuery::from_static(INFER);
        let codec = ProstCodec::<ModelInferRequest, ModelInferResponse>::default();
        tensors(grpc.client_streaming(call, path, codec).await?.into_inner())
    }

    /// Sends an encoded request without copying it, and returns the output tensors.
    pub async fn infer_encoded(&self, encoded: &EncodedRequest) -> Result<Vec<ClientTensor>, Status> {
        let failed = |error: tonic::transport::Error| Status::unavailable(error.to_string());
        let request = http::Request::post(INFER)
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Body::new(Full::new(encoded.0.clone())))
            .expect("the headers are constants");
        let mut channel = self.channel.clone();
        let answer = channel.ready().await.map_err(failed)?.call(request).await.map_err(failed)?;
        let (head, body) = answer.into_parts();
        check_status(&head.headers)?;
        let body = body.collect().await?;
        body.trailers().map_or(Ok(()), check_status)?;
        let mut message = body.to_bytes();
        message.advance(FRAMING.min(message.len()));
        let answer = ModelInferResponse::decode(message);
        tensors(answer.map_err(|error| Status::data_loss(error.to_string()))?)
    }

    /// Sends these bytes as the message of `ModelInfer`, even if they are invalid.
    pub async fn infer_bytes(&self, message: Bytes) -> Result<(), Status> {
        let mut grpc = tonic::client::Grpc::new(self.channel.clone());
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let path = PathAndQuery::from_static(INFER);
        grpc.unary(Request::new(message), path, AnyBytes).await.map(drop)
    }
}

/// Returns an error if the headers or trailers of a response contain a gRPC status other than OK.
fn check_status(headers: &http::HeaderMap) -> Result<(), Status> {
    match Status::from_header_map(headers) {
        Some(status) if status.code() != Code::Ok => Err(status),
        _ => Ok(()),
    }
}

/// An inference request in wire format. Clones share the bytes.
#[derive(Debug, Clone)]
pub struct EncodedRequest(Bytes);

impl EncodedRequest {
    pub fn new(model: &str, inputs: &[ClientTensor]) -> Self {
        let message = request(model, inputs);
        let length = message.encoded_len();
        let mut framed = BytesMut::with_capacity(FRAMING + length);
        framed.put_u8(0);
        framed.put_u32(u32::try_from(length).expect("the request is smaller than 4 GiB"));
        message.encode(&mut framed).expect("the buffer has room for the message");
        Self(framed.freeze())
    }
}

/// A codec that sends bytes unchanged and ignores the response.
struct AnyBytes;

impl Codec for AnyBytes {
    type Encode = Bytes;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for AnyBytes {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(message.len());
        buffer.put(message);
        Ok(())
    }
}

impl Decoder for AnyBytes {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        buffer.advance(buffer.remaining());
        Ok(Some(()))
    }
}

fn tensors(answer: ModelInferResponse) -> Result<Vec<ClientTensor>, Status> {
    if answer.outputs.len() != answer.raw_output_contents.len() {
        return Err(Status::data_loss("the response does not carry the raw contents of each output"));
    }
    let outputs = answer.outputs.into_iter().zip(answer.raw_output_contents);
    Ok(outputs
        .map(|(output, data)| ClientTensor {
            name: output.name,
            datatype: output.datatype,
            shape: output.shape,
            data,
        })
        .collect())
}

/// Encodes an inference request as the body of a call. The body consists of the compression flag,
/// the message length and the message.
pub fn framed(model: &str, inputs: &[ClientTensor]) -> Vec<u8> {
    let message = request(model, inputs).encode_to_vec();
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    [&[0], &length.to_be_bytes()[..], &message].concat()
}

fn request(model: &str, inputs: &[ClientTensor]) -> ModelInferRequest {
    let described = |tensor: &ClientTensor| InferInputTensor {
        name: tensor.name.clone(),
        datatype: tensor.datatype.clone(),
        shape: tensor.shape.clone(),
        ..InferInputTensor::default()
    };
    ModelInferRequest {
        model_name: model.into(),
        inputs: inputs.iter().map(described).collect(),
        raw_input_contents: inputs.iter().map(|tensor| tensor.data.clone()).collect(),
        ..ModelInferRequest::default()
    }
}
