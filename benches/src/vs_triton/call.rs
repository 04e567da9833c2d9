//! HTTP calls other than inference. Each call opens a new connection.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::MeasureError;

const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Sends a request, and returns the body of the answer. A status other than 200 is an error.
pub(crate) async fn call(
    address: SocketAddr,
    method: Method,
    path: &str,
    body: String,
) -> Result<Bytes, MeasureError> {
    let calling = async {
        let stream = TcpStream::connect(address).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // An error of this task is ignored, because the sender of the request reports a failed
        // connection.
        tokio::spawn(async move { drop(connection.await) });
        let request = Request::builder().method(method).uri(path).header("host", "localhost");
        let response = sender.send_request(request.body(Full::new(Bytes::from(body)))?).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        if status != 200 {
            return Err(format!("{path}: {status}: {}", String::from_utf8_lossy(&body)).into());
        }
        Ok::<_, MeasureError>(body)
    };
    timeout(CALL_TIMEOUT, calling).await.map_err(|_| format!("{path}: no answer within {CALL_TIMEOUT:?}"))?
}

/// Loads a model through the model repository extension. `config` overrides keys of the model's
/// configuration.
pub(crate) async fn load(address: SocketAddr, model: &str, config: &Value) -> Result<(), MeasureError> {
    let body = json!({"parameters": {"config": config.to_string()}}).to_string();
    call(address, Method::POST, &format!("/v2/repository/models/{model}/load"), body).await.map(drop)
}
