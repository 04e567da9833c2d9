//! A gRPC client. It uses the generated client code over an HTTP/2 connection.

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
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::body::Body;
use tower::Service;

use crate::exchange::{ClientStream, ExchangeError, TURNS, elements, model, tensors};

/// A gRPC client with one connection.
pub(crate) struct GrpcEchoClient {
    client: GrpcInferenceServiceClient<Sender>,
    exchanges: [(ModelInferRequest, ModelInferResponse); TURNS],
}

impl GrpcEchoClient {
    /// Returns a client that sends tensors of `bytes` bytes. `connection` is the client's number,
    /// which determines the values of its tensors.
    pub(crate) async fn new(
        stream: ClientStream,
        bytes: usize,
        connection: u16,
    ) -> Result<Self, ExchangeError> {
        let sender = match stream {
            ClientStream::Unix(stream) => sender(stream).await?,
            ClientStream::Tcp(stream) => sender(stream).await?,
        };
        let client = GrpcInferenceServiceClient::with_origin(sender, Uri::from_static("http://localhost"))
            .max_decoding_message_size(usize::MAX);
        let exchanges = tensors(bytes, connection).map(|tensor| exchange(bytes, tensor));
        Ok(Self { client, exchanges })
    }

    /// Sends the request with the number `turn` and checks the answer.
    pub(crate) async fn exchange(&mut self, turn: usize) -> Result<(), ExchangeError> {
        let (request, expected) = &self.exchanges[turn];
        let answer =
            self.client.model_infer(request.clone()).await.map_err(ExchangeError::Call)?.into_inner();
        if answer == *expected {
            Ok(())
        } else {
            Err(ExchangeError::Wrong("the tensor or its name differs from the expected one".into()))
        }
    }
}

/// Opens an HTTP/2 connection. A task reads from and writes to the connection until the sender is
/// dropped.
async fn sender<I>(stream: I) -> Result<Sender, ExchangeError>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connected) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.map_err(ExchangeError::Http2)?;
    // An error of this task is ignored, because the calls report a failed connection.
    tokio::spawn(async move { drop(connected.await) });
    Ok(Sender(sender))
}

/// Returns a request and the expected answer.
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

/// An HTTP/2 connection as a Tower service. Tonic's channel would add a queue and a task.
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
