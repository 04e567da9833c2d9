//! An HTTP client of the Open Inference Protocol over TCP, which keeps connections open.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::cases::ClientTensor;

type Connection = BufReader<TcpStream>;

/// An HTTP client. Clones share the connections. A request uses an idle connection or opens a new
/// one.
#[derive(Debug, Clone)]
pub struct InferHttpClient {
    address: SocketAddr,
    idle: Arc<Mutex<Vec<Connection>>>,
}

struct Response {
    status: u16,
    closes: bool,
    body: Vec<u8>,
}

impl InferHttpClient {
    /// Creates a client for the server at this address.
    pub fn new(address: SocketAddr) -> Self {
        Self { address, idle: Arc::default() }
    }

    /// Sends one request with FP32 tensors. Returns the output tensors or the reason for the
    /// failure.
    pub async fn infer(&self, model: &str, inputs: &[ClientTensor]) -> Result<Vec<ClientTensor>, String> {
        let request = request(model, inputs)?;
        let answer = self.send(&request).await.map_err(|error| format!("HTTP: {error}"))?;
        if answer.status != 200 {
            return Err(format!("{}: {}", answer.status, String::from_utf8_lossy(&answer.body)));
        }
        tensors(&answer.body).ok_or_else(|| "the response has no FP32 tensors".to_owned())
    }

    async fn send(&self, request: &[u8]) -> io::Result<Response> {
        loop {
            let idle = self.idle.lock().pop();
            let was_idle = idle.is_some();
            let mut connection = match idle {
                Some(idle) => idle,
                None => connect(self.address).await?,
            };
            // The server may close an idle connection just when the client uses it again. The
            // request is then sent over another connection.
            match exchange(&mut connection, request).await? {
                Some(answer) => {
                    if !answer.closes {
                        self.idle.lock().push(connection);
                    }
                    return Ok(answer);
                }
                None if was_idle => {}
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }
}

async fn connect(address: SocketAddr) -> io::Result<Connection> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(BufReader::new(stream))
}

/// Sends a request and reads the response. Returns `None` if the connection closed before the
/// response.
async fn exchange(connection: &mut Connection, request: &[u8]) -> io::Result<Option<Response>> {
    let mut line = String::new();
    let begun = match connection.write_all(request).await {
        Ok(()) => connection.read_line(&mut line).await,
        Err(error) => Err(error),
    };
    if !matches!(begun, Ok(1..)) {
        return Ok(None);
    }
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or(io::ErrorKind::InvalidData)?;
    let (mut length, mut closes) = (0, false);
    loop {
        line.clear();
        connection.read_line(&mut line).await?;
        let header = line.trim_end().to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(bytes) = header.strip_prefix("content-length:") {
            length = bytes.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
        }
        closes |= header == "connection: close";
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body).await?;
    Ok(Some(Response { status, closes, body }))
}

fn request(model: &str, inputs: &[ClientTensor]) -> Result<Vec<u8>, String> {
    let described = |tensor: &ClientTensor| {
        let data: Vec<f32> = tensor.as_fp32().ok_or("an input is not FP32")?.collect();
        Ok(json!({"name": tensor.name, "datatype": "FP32", "shape": tensor.shape, "data": data}))
    };
    let inputs = inputs.iter().map(described).collect::<Result<Vec<Value>, String>>()?;
    let body = json!({"inputs": inputs}).to_string();
    let length = body.len();
    Ok(format!(
        "POST /v2/models/{model}/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes())
}

fn tensors(body: &[u8]) -> Option<Vec<ClientTensor>> {
    let body: Value = serde_json::from_slice(body).ok()?;
    let tensor = |output: &Value| {
        let shape: Vec<i64> = serde_json::from_value(output["shape"].clone()).ok()?;
        let data: Vec<f32> = serde_json::from_value(output["data"].clone()).ok()?;
        let name = output["name"].as_str().filter(|_| output["datatype"] == "FP32")?;
        Some(ClientTensor::fp32(name, &shape, &data))
    };
    body["outputs"].as_array()?.iter().map(tensor).collect()
}
