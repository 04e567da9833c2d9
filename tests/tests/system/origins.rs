//! Tests of requests that a hostile web page may send over TCP from a browser, and of warnings
//! about addresses that other hosts can reach.

use std::io;
use std::net::SocketAddr;

use shadowslice_tests::home::{DEFAULT_TIMEOUT, HarnessError, Home};
use shadowslice_tests::proto::ServerLiveRequest;
use shadowslice_tests::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use shadowslice_tests::server::ServerUnderTest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::transport::{Endpoint, Uri};
use tonic::{Code, Status};

use crate::fixtures::echo;

async fn server() -> Result<ServerUnderTest, HarnessError> {
    let yaml = format!(
        "listen: {{http: [\"127.0.0.1:0\"], grpc: [\"unix:grpc.sock\", \"127.0.0.1:0\"], metrics: [\"0.0.0.0:0\"]}}\n\
         gpus: [{{device: emulated, sms: 132}}]\ncontroller: {{policy: static}}\nmodel_control: explicit\n\
         models:\n  - {}\n",
        echo("m", "share: {initial: 40%}")
    );
    ServerUnderTest::start_ready(Home::with_config(&yaml)?).await
}

/// Sends a request with these headers, and returns the status line of the answer.
async fn status_line(at: SocketAddr, request: &str, headers: &str) -> io::Result<String> {
    let asking = async {
        let mut stream = TcpStream::connect(at).await?;
        let head = format!("{request} HTTP/1.1\r\n{headers}content-length: 0\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer.lines().next().unwrap_or_default().to_owned())
    };
    timeout(DEFAULT_TIMEOUT, asking).await.map_err(|_| io::ErrorKind::TimedOut)?
}

#[tokio::test]
async fn requests_after_dns_rebinding_and_from_other_origins_are_refused() {
    let server = server().await.unwrap();
    let at = server.tcp_address("HTTP").await.unwrap();
    let unload = "POST /v2/repository/models/m/unload";
    for headers in [
        "host: evil.example:8000\r\n",
        "host: evil.example:8000\r\norigin: http://evil.example:8000\r\n",
        "host: localhost\r\norigin: http://evil.example\r\n",
        "host: localhost\r\norigin: null\r\n",
    ] {
        assert_eq!(status_line(at, unload, headers).await.unwrap(), "HTTP/1.1 403 Forbidden", "{headers}");
    }
    for host in ["localhost", "127.0.0.1", "[::1]:9", &at.to_string()] {
        let answer = status_line(at, "GET /v2/models/m/ready", &format!("host: {host}\r\n")).await.unwrap();
        assert_eq!(answer, "HTTP/1.1 200 OK", "{host}");
    }
    server.stop().await.unwrap();
}

async fn live(at: SocketAddr, authority: &str) -> Result<bool, Status> {
    let uri =
        |authority: &str| Uri::builder().scheme("http").authority(authority).path_and_query("/").build();
    let (Ok(to), Ok(origin)) = (uri(&at.to_string()), uri(authority)) else {
        return Err(Status::internal("no authority"));
    };
    let channel = Endpoint::from(to).origin(origin).connect_lazy();
    let answer = GrpcInferenceServiceClient::new(channel).server_live(ServerLiveRequest {}).await;
    answer.map(|answer| answer.into_inner().live)
}

#[tokio::test]
async fn grpc_accepts_only_its_own_names() {
    let server = server().await.unwrap();
    let at = server.tcp_address("gRPC").await.unwrap();
    for name in ["localhost:1", "127.0.0.1", &at.to_string()] {
        assert!(live(at, name).await.unwrap(), "{name}");
    }
    let refused = live(at, "evil.example:8001").await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_address_open_to_other_hosts_causes_a_warning_and_accepts_any_name() {
    let server = server().await.unwrap();
    let warned =
        server.wait_line(&["WARN", "open to other hosts", "protocol=\"metrics\"", "0.0.0.0:"]).await.unwrap();
    assert!(warned.contains("missing=\"encryption and authentication\""), "{warned}");
    let port = server.tcp_address("metrics").await.unwrap().port();
    let at = SocketAddr::from(([127, 0, 0, 1], port));
    let ask = async |headers: &str| status_line(at, "GET /metrics", headers).await.unwrap();
    assert_eq!(ask("host: gpu-7.example\r\n").await, "HTTP/1.1 200 OK");
    let page = "host: gpu-7.example\r\norigin: http://evil.example\r\n";
    assert_eq!(ask(page).await, "HTTP/1.1 403 Forbidden");
    server.stop().await.unwrap();
}
