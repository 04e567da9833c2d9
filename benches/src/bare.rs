//! HTTP and gRPC servers that only echo, as a baseline for the supervisor. They use the same
//! libraries and the same number of threads as the supervisor, but they have no queue, no slab and
//! no worker.

use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::path::Path;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use shadowslice_tests::proto::model_infer_response::InferOutputTensor;
use shadowslice_tests::proto::{ModelInferRequest, ModelInferResponse};
use tokio::net::{UnixListener, UnixStream};
use tonic::Status;
use tonic_prost::ProstCodec;

/// The name of the HTTP socket in the server's folder.
pub(crate) const HTTP_SOCKET: &str = "http.sock";
/// The name of the gRPC socket in the server's folder.
pub(crate) const GRPC_SOCKET: &str = "grpc.sock";

/// Serves until the standard input ends. Writes `ready` to the standard output once both sockets
/// are listening.
pub(crate) fn run(folder: &Path) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(shadowslice_control::host::data_path_threads())
        .enable_all()
        .build()?;
    {
        let _inside = runtime.enter();
        let http = UnixListener::bind(folder.join(HTTP_SOCKET))?;
        let grpc = UnixListener::bind(folder.join(GRPC_SOCKET))?;
        runtime.spawn(async move {
            while let Ok((stream, _)) = http.accept().await {
                tokio::spawn(serve_http(stream));
            }
        });
        runtime.spawn(async move {
            while let Ok((stream, _)) = grpc.accept().await {
                tokio::spawn(serve_grpc(stream));
            }
        });
    }
    io::stdout().write_all(b"ready\n")?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

async fn serve_http(stream: UnixStream) {
    // An error is ignored, because the client reports a broken connection.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(echo)).await;
}

async fn echo(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let body = request.into_body().collect().await?.to_bytes();
    let mut response = Response::new(Full::new(body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    Ok(response)
}

async fn serve_grpc(stream: UnixStream) {
    let service = service_fn(|request: Request<Incoming>| async {
        let codec = ProstCodec::<ModelInferResponse, ModelInferRequest>::default();
        let echo = tower::service_fn(async |request: tonic::Request<ModelInferRequest>| {
            Ok::<_, Status>(tonic::Response::new(answer(request.into_inner())))
        });
        Ok::<_, Infallible>(tonic::server::Grpc::new(codec).unary(echo, request).await)
    });
    let builder = http2::Builder::new(TokioExecutor::new());
    // An error is ignored, because the client reports a broken connection.
    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
}

/// Returns an answer that contains every input as an output. The output has the name of the model's
/// output.
fn answer(request: ModelInferRequest) -> ModelInferResponse {
    let outputs = request.inputs.into_iter().map(|input| InferOutputTensor {
        name: "y".into(),
        datatype: input.datatype,
        shape: input.shape,
        ..InferOutputTensor::default()
    });
    ModelInferResponse {
        model_name: request.model_name,
        model_version: "1".into(),
        outputs: outputs.collect(),
        raw_output_contents: request.raw_input_contents,
        ..ModelInferResponse::default()
    }
}
