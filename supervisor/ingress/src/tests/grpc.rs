use std::convert::Infallible;

use bytes::{BufMut, BytesMut};
use http_body_util::{BodyExt, Either, Full, StreamBody};
use hyper::Request;
use hyper::body::Body as _;
use hyper::body::{Bytes, Frame};
use hyper::client::conn::http2;
use hyper::header::{HeaderMap, HeaderValue};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::task::JoinSet;
use tonic::Code;

use super::*;
use crate::proto::reflection::server_reflection_request::MessageRequest;
use crate::proto::reflection::server_reflection_response::MessageResponse;
use crate::proto::reflection::{ServerReflectionRequest, ServerReflectionResponse};
use crate::proto::{
    ModelInferRequest, ModelMetadataRequest, ModelReadyRequest, ModelReadyResponse, ServerMetadataRequest,
    ServerMetadataResponse,
};

/// A connection of a client whose authority needs no repair.
struct Client(http2::SendRequest<Sent>);

/// A whole body, or a body that never arrives.
type Sent = Either<Full<Bytes>, StreamBody<tokio_stream::Pending<Result<Frame<Bytes>, Infallible>>>>;

impl Client {
    async fn connect(server: &Server) -> Self {
        let io = TokioIo::new(server.connect("grpc").await);
        let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    fn request(method: &str, body: Sent) -> Request<Sent> {
        // The method is a whole path, or a method of the protocol's service.
        let path = match method.starts_with('/') {
            true => method.to_owned(),
            false => format!("/inference.GRPCInferenceService/{method}"),
        };
        Request::post(format!("http://x{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(body)
            .unwrap()
    }

    /// Starts a call without a body. The call ends with its task.
    fn begin(&mut self, method: &str) -> JoinSet<()> {
        let body = Either::Right(StreamBody::new(tokio_stream::pending()));
        let answer = self.0.send_request(Self::request(method, body));
        let mut begun = JoinSet::new();
        begun.spawn(async { drop(answer.await) });
        begun
    }

    /// Calls a method. Returns the status and the body of the answer.
    async fn call(&mut self, method: &str, body: Bytes) -> (Code, Bytes) {
        let (code, _, body) = self.call_with(&[], method, body).await;
        (code, body)
    }

    /// Calls a method with further headers. Also returns the headers of the answer.
    async fn call_with(
        &mut self,
        headers: &[(&'static str, &'static str)],
        method: &str,
        body: Bytes,
    ) -> (Code, HeaderMap, Bytes) {
        let mut request = Self::request(method, Either::Left(Full::new(body)));
        for (name, value) in headers {
            request.headers_mut().insert(*name, HeaderValue::from_static(value));
        }
        let (head, body) =
            timeout(PATIENCE, self.0.send_request(request)).await.unwrap().unwrap().into_parts();
        // Clients read a status in the head only if nothing follows.
        assert_eq!(head.headers.contains_key("grpc-status"), body.is_end_stream(), "{method}");
        let body = body.collect().await.unwrap();
        let trailers = body.trailers().cloned().unwrap_or_else(|| head.headers.clone());
        (Code::from_bytes(trailers["grpc-status"].as_bytes()), head.headers, body.to_bytes())
    }
}

/// Returns a message with gRPC's prefix.
fn message(message: &impl Message) -> Bytes {
    let mut body = BytesMut::new();
    body.put_u8(0);
    body.put_u32(u32::try_from(message.encoded_len()).unwrap());
    message.encode(&mut body).unwrap();
    body.freeze()
}

#[tokio::test]
async fn a_connection_outlives_the_requests_that_are_refused() {
    let server = Server::start(9).await;
    let mut client = Client::connect(&server).await;
    let infer = ModelInferRequest { model_name: "m".into(), ..Default::default() };
    let garbage = Bytes::from_static(b"\0\0\0\0\x03\xff\xff\xff");
    let announced = Bytes::from_static(b"\0\x7f\xff\xff\xff....");
    let large = ModelInferRequest { raw_input_contents: vec![vec![0; 200_000].into()], ..infer.clone() };
    let many = ModelInferRequest { inputs: vec![Default::default(); 10_000], ..infer.clone() };
    for (method, body, code) in [
        ("ServerReady", message(&ServerMetadataRequest {}), Code::Ok),
        (
            "ModelMetadata",
            message(&ModelMetadataRequest { name: "m".into(), version: String::new() }),
            Code::NotFound,
        ),
        ("ModelInfer", message(&infer), Code::NotFound),
        ("ModelInfer", garbage, Code::InvalidArgument),
        ("ModelInfer", announced, Code::OutOfRange),
        ("ModelInfer", message(&large), Code::OutOfRange),
        ("ModelInfer", Bytes::new(), Code::Internal),
        ("ModelInfer", message(&many), Code::InvalidArgument),
        ("Nothing", message(&ServerMetadataRequest {}), Code::Unimplemented),
    ] {
        let answered = client.call(method, body).await;
        assert_eq!(answered.0, code, "{method}");
    }
    let ready = message(&ModelReadyRequest { name: "m".into(), version: String::new() });
    let (code, body) = client.call("ModelReady", ready).await;
    assert_eq!((code, ModelReadyResponse::decode(&body[5..]).unwrap().ready), (Code::Ok, false));
    let (code, body) = client.call("ServerMetadata", message(&ServerMetadataRequest {})).await;
    assert_eq!(code, Code::Ok);
    let metadata = ServerMetadataResponse::decode(&body[5..]).unwrap();
    assert_eq!((&metadata.name[..], &metadata.version[..]), ("shadowslice", env!("CARGO_PKG_VERSION")));
    server.stop().await;
}

#[tokio::test]
async fn only_inferences_are_large() {
    let server = Server::with_request_bytes(9, 8 << 20).await;
    let mut client = Client::connect(&server).await;
    let large = "m".repeat(5 << 20);
    let infer = ModelInferRequest { model_name: large.clone(), ..Default::default() };
    assert_eq!(client.call("ModelInfer", message(&infer)).await.0, Code::NotFound);
    let ready = ModelReadyRequest { name: large, version: String::new() };
    for method in ["ServerLive", "ModelReady", "ModelConfig", "RepositoryModelLoad"] {
        assert_eq!(client.call(method, message(&ready)).await.0, Code::OutOfRange, "{method}");
    }
    server.stop().await;
}

#[tokio::test]
async fn unsupported_calls_are_refused_with_a_message() {
    let server = Server::start(9).await;
    let mut client = Client::connect(&server).await;
    for (method, code, said) in [
        ("NoSuchCall", Code::Unimplemented, "not support /inference.GRPCInferenceService/NoSuchCall"),
        ("TraceSetting", Code::Unavailable, "not support tracing"),
        ("LogSettings", Code::Unavailable, "not support dynamic logging"),
        ("CudaSharedMemoryRegister", Code::InvalidArgument, "CUDA shared memory is not supported"),
    ] {
        let (answered, headers, _) = client.call_with(&[], method, message(&ServerMetadataRequest {})).await;
        let told = String::from_utf8_lossy(headers["grpc-message"].as_bytes()).replace("%20", " ");
        assert!(answered == code && told.contains(said), "{method}: {answered:?} {told}");
    }
    for method in ["CudaSharedMemoryUnregister", "CudaSharedMemoryStatus"] {
        assert_eq!(client.call(method, message(&ServerMetadataRequest {})).await.0, Code::Ok, "{method}");
    }
    server.stop().await;
}

#[tokio::test]
async fn requests_other_than_grpc_get_415_and_the_connection_continues() {
    let server = Server::start(9).await;
    let mut client = Client::connect(&server).await;
    let live = message(&ServerMetadataRequest {});
    for (method, content_type, status) in [
        ("POST", "application/json", 415),
        ("POST", "application/grpc-web+proto", 415),
        ("POST", "text/plain", 415),
        ("GET", "", 415),
        ("GET", "application/grpc", 405),
        ("POST", "application/grpc+proto", 200),
    ] {
        let mut request = Client::request("ServerLive", Either::Left(Full::new(live.clone())));
        *request.method_mut() = method.parse().unwrap();
        request.headers_mut().insert("content-type", HeaderValue::from_static(content_type));
        if content_type.is_empty() {
            request.headers_mut().remove("content-type");
        }
        let answer = timeout(PATIENCE, client.0.send_request(request)).await.unwrap().unwrap();
        assert_eq!(answer.status(), status, "{method} {content_type}");
        assert_eq!(answer.headers()["content-type"] == "application/grpc", status == 200);
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        assert!(status == 200 || String::from_utf8_lossy(&body).contains("gRPC"), "{body:?}");
    }
    assert_eq!(client.call("ServerLive", live).await.0, Code::Ok);
    server.stop().await;
}

#[tokio::test]
async fn metadata_may_be_as_long_as_the_head_of_an_http_request() {
    let server = Server::start(9).await;
    let mut client = Client::connect(&server).await;
    let live = message(&ServerMetadataRequest {});
    for (bytes, status, code) in
        [(60_000, 200, Some(Code::Ok)), (70_000, 200, Some(Code::ResourceExhausted)), (120_000, 431, None)]
    {
        let mut request = Client::request("ServerLive", Either::Left(Full::new(live.clone())));
        let token = HeaderValue::from_bytes(&vec![b'x'; bytes]).unwrap();
        request.headers_mut().insert("authorization", token);
        let answer = timeout(PATIENCE, client.0.send_request(request)).await.unwrap().unwrap();
        assert_eq!(answer.status(), status, "{bytes}");
        let head = answer.headers().clone();
        let body = answer.into_body().collect().await.unwrap();
        let trailers = body.trailers().unwrap_or(&head);
        let told = trailers.get("grpc-status").map(|status| Code::from_bytes(status.as_bytes()));
        assert_eq!(told, code, "{bytes}");
    }
    assert_eq!(client.call("ServerLive", live).await.0, Code::Ok);
    server.stop().await;
}

#[tokio::test]
async fn reflection_answers_each_request_of_a_call_in_both_versions() {
    let server = Server::start(9).await;
    let mut client = Client::connect(&server).await;
    let ask =
        |request| message(&ServerReflectionRequest { message_request: Some(request), ..Default::default() });
    let asked = [
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol("inference.GRPCInferenceService".to_owned())),
        ask(MessageRequest::FileByFilename("absent.proto".to_owned())),
    ]
    .concat();
    for version in ["v1", "v1alpha"] {
        let path = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
        let (code, mut body) = client.call(&path, asked.clone().into()).await;
        assert_eq!(code, Code::Ok, "{version}");
        let mut answers = Vec::new();
        while !body.is_empty() {
            let length = usize::try_from(u32::from_be_bytes(body[1..5].try_into().unwrap())).unwrap();
            let answer = body.split_to(5 + length).slice(5..);
            answers.push(ServerReflectionResponse::decode(answer).unwrap().message_response.unwrap());
        }
        let [
            MessageResponse::ListServicesResponse(services),
            MessageResponse::FileDescriptorResponse(files),
            MessageResponse::ErrorResponse(fault),
        ] = &answers[..]
        else {
            panic!("{version}: {answers:?}")
        };
        assert_eq!(services.service.len(), 4, "{services:?}");
        assert!(!files.file_descriptor_proto[0].is_empty());
        assert!(fault.error_message.contains("absent.proto"), "{fault:?}");
    }
    let unknown = client.call("/grpc.reflection.v1.ServerReflection/Other", Bytes::new()).await;
    assert_eq!(unknown.0, Code::Unimplemented);
    // A call that is still open ends with serving.
    let held = client.begin("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo");
    assert_eq!(client.call("ServerLive", message(&ServerMetadataRequest {})).await.0, Code::Ok);
    server.stop().await;
    drop(held);
}

#[tokio::test]
async fn a_connection_with_too_many_calls_is_refused_more_but_its_health_and_others_are_not() {
    let server = Server::with_memory(9, LIMIT, Some(4 << 20)).await;
    let (mut greedy, mut other) = (Client::connect(&server).await, Client::connect(&server).await);
    let infer = message(&ModelInferRequest { model_name: "m".into(), ..Default::default() });
    // A connection gets at most half of the 4 MiB, and a call takes at least 32 KiB.
    let calls: Vec<_> = (0..64).map(|_| greedy.begin("ModelInfer")).collect();
    while greedy.call("ModelInfer", infer.clone()).await.0 != Code::ResourceExhausted {}
    assert_eq!(greedy.call("ServerLive", message(&ServerMetadataRequest {})).await.0, Code::Ok);
    assert_eq!(other.call("ModelInfer", infer.clone()).await.0, Code::NotFound);
    drop(calls);
    while greedy.call("ModelInfer", infer.clone()).await.0 != Code::NotFound {}
    server.stop().await;
}

#[tokio::test]
async fn answers_are_compressed_as_the_request_was_and_if_the_client_reads_that() {
    let server = Server::start(9).await;
    let mut client = Client::connect(&server).await;
    // The empty message, as gzip and zlib write it.
    let gzip = b"\x01\0\0\0\x14\x1f\x8b\x08\0\0\0\0\0\x02\x03\x03\0\0\0\0\0\0\0\0\0";
    let zlib = b"\x01\0\0\0\x08\x78\x9c\x03\0\0\0\0\x01";
    for (encoding, accepted, body, answered) in [
        ("gzip", "gzip", &gzip[..], Some("gzip")),
        ("deflate", "identity, deflate", zlib, Some("deflate")),
        ("gzip", "identity", gzip, None),
        ("gzip", "gzip", b"\0\0\0\0\0", Some("gzip")),
        ("identity", "gzip, deflate", b"\0\0\0\0\0", None),
    ] {
        let headers = [("grpc-encoding", encoding), ("grpc-accept-encoding", accepted)];
        let call = client.call_with(&headers, "ServerMetadata", body.to_vec().into());
        let (code, headers, answer) = call.await;
        assert_eq!(code, Code::Ok, "{encoding}");
        assert_eq!(headers.get("grpc-encoding").map(HeaderValue::as_bytes), answered.map(str::as_bytes));
        assert_eq!(answer[0], u8::from(answered.is_some()));
        let length = u32::from_be_bytes(answer[1..5].try_into().unwrap());
        assert_eq!(answer.len(), 5 + length as usize);
    }
    for encoding in ["gzip", "deflate"] {
        let headers = [("grpc-encoding", encoding), ("grpc-accept-encoding", encoding)];
        let unknown = message(&ModelMetadataRequest { name: "m".into(), version: String::new() });
        assert_eq!(
            client.call_with(&headers, "ModelMetadata", unknown).await.0,
            Code::NotFound,
            "{encoding}"
        );
    }
    for (encoding, body, expected) in [
        ("snappy", &gzip[..], Code::Unimplemented),
        ("deflate", gzip, Code::InvalidArgument),
        ("gzip", &gzip[..12], Code::Internal),
        ("gzip", b"\x01\0\0\0\0", Code::InvalidArgument),
        ("identity", gzip, Code::Internal),
    ] {
        let headers = [("grpc-encoding", encoding)];
        let call = client.call_with(&headers, "ServerMetadata", body.to_vec().into());
        assert_eq!(call.await.0, expected, "{encoding}");
    }
    assert_eq!(client.call("ServerLive", message(&ServerMetadataRequest {})).await.0, Code::Ok);
    server.stop().await;
}

/// Returns the bytes that gRPC's C core sends on a Unix socket. They are a whole call for
/// ServerLive, and the beginning of a call for other methods.
pub(super) fn c_core(authority: &str, method: &str) -> Vec<u8> {
    let literal =
        |first: u8, text: &str| [&[first, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let named = |name: &str, value: &str| [literal(0x40, name), literal(0, value)[1..].to_vec()].concat();
    let block = [
        vec![0x83, 0x86],
        literal(0x44, &format!("/inference.GRPCInferenceService/{method}")),
        literal(0x41, authority),
        named("te", "trailers"),
        named("content-type", "application/grpc"),
    ]
    .concat();
    let head =
        |length: usize, kind: u8, flags: u8| [0, 0, u8::try_from(length).unwrap(), kind, flags, 0, 0, 0, 1];
    [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
        &[0, 0, 0, 4, 0, 0, 0, 0, 0],
        &head(block.len(), 1, 4),
        &block,
        &head(5, 0, u8::from(method == "ServerLive")),
        if method == "ServerLive" { &[0; 5] } else { &[0, 0, 0, 0, 9] },
    ]
    .concat()
}

#[tokio::test]
async fn clients_that_send_the_sockets_path_as_authority_are_served() {
    let server = Server::start(9).await;
    // This is ServerLiveResponse { live: true } with its prefix.
    let answer = b"\0\0\0\0\x02\x08\x01";
    for authority in ["%2Frun%2Fshadowslice%2Fgrpc.sock", "localhost"] {
        let mut stream = server.connect("grpc").await;
        stream.write_all(&c_core(authority, "ServerLive")).await.unwrap();
        let mut got = Vec::new();
        while !got.windows(answer.len()).any(|window| window == answer) {
            let read = timeout(PATIENCE, stream.read_buf(&mut got)).await.unwrap().unwrap();
            assert!(read > 0, "{authority}: {got:?}");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn bytes_that_are_not_http2_are_refused_and_harm_no_other_client() {
    let server = Server::start(9).await;
    let mut witness = Client::connect(&server).await;
    for garbage in [
        &b"GET /v2 HTTP/1.1\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        &[0; 99],
    ] {
        let mut stream = server.connect("grpc").await;
        stream.write_all(garbage).await.unwrap();
        while timeout(PATIENCE, stream.read(&mut [0; 999])).await.unwrap().is_ok_and(|read| read > 0) {}
        assert_eq!(witness.call("ServerLive", message(&ServerMetadataRequest {})).await.0, Code::Ok);
    }
    server.stop().await;
}

/// The HTTP/2 settings of a peer that has no room for answers.
const NO_ROOM: [u8; 15] = [0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0];

#[tokio::test(start_paused = true)]
async fn a_peer_that_has_no_room_for_its_answer_is_given_up_before_it_is_pinged() {
    let server = Server::start(9).await;
    let mut stream = server.connect("grpc").await;
    let call = c_core("x", "ServerLive");
    let (preface, rest) = call.split_at(24);
    stream.write_all(&[preface, &NO_ROOM, &rest[9..]].concat()).await.unwrap();
    let mut got = Vec::new();
    let ended = timeout(Duration::from_secs(50), stream.read_to_end(&mut got)).await;
    assert!(ended.is_ok(), "it is still open");
    server.stop().await;
}

// The paused clock jumps ahead when all tasks are idle, so the test does not wait.
#[tokio::test(start_paused = true)]
async fn a_peer_that_answers_no_ping_is_given_up() {
    let server = Server::start(9).await;
    let mut stream = server.connect("grpc").await;
    stream.write_all(&c_core("x", "ServerLive")).await.unwrap();
    let mut got = Vec::new();
    let ended = timeout(Duration::from_secs(100), stream.read_to_end(&mut got)).await;
    assert!(ended.is_ok(), "it is still open");
    // The frame is a ping of eight bytes, and no answer.
    assert!(got.windows(9).any(|frame| frame == [0, 0, 8, 6, 0, 0, 0, 0, 0]), "it was asked first");
    server.stop().await;
}
