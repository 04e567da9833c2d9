//! A gRPC client: the generated one, straight on an HTTP/2 connection.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper::{Request, Response, Uri};
use hyper_util::rt::{TokioExecutor, TokioIo};
use shadowslice_tests::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use shadowslice_tests::proto::model_infer_request::InferInputTensor;
use shadowslice_tests::proto::model_infer_response::InferOutputTensor;
use shadowslice_tests::proto::{ModelInferRequest, ModelInferResponse};
use tokio::net::UnixStream;
use tonic::body::Body;
use tower::Service;

use crate::exchange::{Fault, TURNS, elements, model, tensors};
use crate::plan::Setting;

/// A client with one connection.
pub(crate) struct GrpcClient {
    client: GrpcInferenceServiceClient<Sender>,
    exchanges: [(ModelInferRequest, ModelInferResponse); TURNS],
}

impl GrpcClient {
    /// A client for `setting`, the one numbered `connection`.
    pub(crate) async fn new(stream: UnixStream, setting: &Setting, connection: u16) -> Result<Self, Fault> {
        let (sender, connected) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.map_err(Fault::Http2)?;
        // It ends with its sender; what fails about it, the calls say.
        tokio::spawn(async move { drop(connected.await) });
        let client =
            GrpcInferenceServiceClient::with_origin(Sender(sender), Uri::from_static("http://localhost"));
        let exchanges = tensors(setting.bytes, connection).map(|tensor| exchange(setting.bytes, tensor));
        Ok(Self { client, exchanges })
    }

    /// Sends the request of that turn and checks the answer.
    pub(crate) async fn ask(&mut self, turn: usize) -> Result<(), Fault> {
        let (request, expected) = &self.exchanges[turn];
        let answer = self.client.model_infer(request.clone()).await.map_err(Fault::Call)?.into_inner();
        if answer == *expected {
            Ok(())
        } else {
            Err(Fault::Wrong("it is not the tensor that was sent, or named otherwise".into()))
        }
    }
}

/// A request, and the answer that it must get.
fn exchange(bytes: usize, tensor: bytes::Bytes) -> (ModelInferRequest, ModelInferResponse) {
    let shape = vec![1, elements(bytes)];
    let input = InferInputTensor {
        name: "x".into(),
        datatype: "FP32".into(),
        shape: shape.clone(),
        ..InferInputTensor::default()
    };
    let output = InferOutputTensor {
        name: "y".into(),
        datatype: "FP32".into(),
        shape,
        ..InferOutputTensor::default()
    };
    let request = ModelInferRequest {
        model_name: model(bytes),
        inputs: vec![input],
        raw_input_contents: vec![tensor.clone()],
        ..ModelInferRequest::default()
    };
    let response = ModelInferResponse {
        model_name: model(bytes),
        model_version: "1".into(),
        outputs: vec![output],
        raw_output_contents: vec![tensor],
        ..ModelInferResponse::default()
    };
    (request, response)
}

/// An HTTP/2 connection as a service. Tonic's own channel has a queue and a task in between.
struct Sender(http2::SendRequest<Body>);

impl Service<Request<Body>> for Sender {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}
