//! An HTTP/1.1 client with a low CPU cost. It builds its requests only once. It parses only the
//! JSON of the first answer, because later answers must contain the same JSON byte for byte.

use std::io;

use bytes::{Bytes, BytesMut};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::exchange::{ClientStream, ExchangeError, TURNS, elements, model, tensors};

const HEADER_LENGTH: &str = "Inference-Header-Content-Length";

/// The maximum number of headers in an answer.
const MAX_HEADERS: usize = 32;

/// The capacity of the buffer before the first read of an answer, in bytes.
const READ_BYTES: usize = 16 * 1024;

/// An HTTP/1.1 client with one connection.
pub(crate) struct HttpEchoClient {
    stream: ClientStream,
    requests: [Bytes; TURNS],
    tensors: [Bytes; TURNS],
    /// The expected JSON that precedes the tensor in an answer, in parsed form.
    expected_json: Value,
    /// The bytes of that JSON as the server writes them, or `None` before the first answer.
    json: Option<Bytes>,
    answer: BytesMut,
}

impl HttpEchoClient {
    /// Returns a client that sends tensors of `bytes` bytes. `connection` is the client's number,
    /// which determines the values of its tensors.
    pub(crate) fn new(stream: ClientStream, bytes: usize, connection: u16) -> Self {
        Self::for_model(&model(bytes), stream, bytes, connection)
    }

    /// Returns a client of the model `name`, which returns its input.
    pub(crate) fn for_model(name: &str, stream: ClientStream, bytes: usize, connection: u16) -> Self {
        Self::expecting(name, response_json(name, bytes), stream, bytes, connection)
    }

    /// Returns a client for a server that returns the request's body unchanged.
    pub(crate) fn bare(stream: ClientStream, bytes: usize, connection: u16) -> Self {
        Self::expecting(&model(bytes), request_json(bytes), stream, bytes, connection)
    }

    fn expecting(
        name: &str,
        expected_json: Value,
        stream: ClientStream,
        bytes: usize,
        connection: u16,
    ) -> Self {
        let tensors = tensors(bytes, connection);
        let json = request_json(bytes);
        let requests = tensors.each_ref().map(|tensor| request(name, &json, tensor));
        Self {
            stream,
            requests,
            tensors,
            expected_json,
            json: None,
            answer: BytesMut::with_capacity(READ_BYTES),
        }
    }

    /// Sends the request with the number `turn` and checks the answer.
    pub(crate) async fn exchange(&mut self, turn: usize) -> Result<(), ExchangeError> {
        self.stream.write_all(&self.requests[turn]).await.map_err(ExchangeError::Connection)?;
        self.answer.clear();
        let (head, length) = loop {
            self.read().await?;
            if let Some(found) = read_head(&self.answer)? {
                break found;
            }
        };
        self.answer.reserve((head + length).saturating_sub(self.answer.len()));
        while self.answer.len() < head + length {
            self.read().await?;
        }
        self.check(&self.answer[head..], turn).map_err(ExchangeError::Wrong).map(|json| {
            if self.json.is_none() {
                self.json = Some(json);
            }
        })
    }

    async fn read(&mut self) -> Result<(), ExchangeError> {
        self.answer.reserve(1);
        match self.stream.read(&mut self.answer).await.map_err(ExchangeError::Connection)? {
            0 => Err(ExchangeError::Closed),
            _ => Ok(()),
        }
    }

    /// Compares an answer's body with the expected body, and returns the JSON part of the answer.
    fn check(&self, body: &[u8], turn: usize) -> Result<Bytes, String> {
        let tensor = &self.tensors[turn];
        let Some((json, data)) = body.len().checked_sub(tensor.len()).map(|json| body.split_at(json)) else {
            return Err(format!(
                "the body has {} bytes, less than the tensor's {}",
                body.len(),
                tensor.len()
            ));
        };
        if data != tensor {
            return Err("the tensor differs from the one that was sent".into());
        }
        match &self.json {
            Some(known) if known == json => Ok(known.clone()),
            _ => match serde_json::from_slice::<Value>(json) {
                Ok(found) if found == self.expected_json => Ok(Bytes::copy_from_slice(json)),
                _ => Err(format!("{} instead of {}", String::from_utf8_lossy(json), self.expected_json)),
            },
        }
    }
}

impl ClientStream {
    async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.write_all(bytes).await,
            Self::Tcp(stream) => stream.write_all(bytes).await,
        }
    }

    async fn read(&mut self, buffer: &mut BytesMut) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read_buf(buffer).await,
            Self::Tcp(stream) => stream.read_buf(buffer).await,
        }
    }
}

/// Returns the length of an answer's head and the length of its body. Returns `None` if the head is
/// incomplete, and an error if the status is not 200.
fn read_head(bytes: &[u8]) -> Result<Option<(usize, usize)>, ExchangeError> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(head) = response.parse(bytes).map_err(ExchangeError::NotHttp)? else {
        return Ok(None);
    };
    let status = response.code.unwrap_or(0);
    if status != 200 {
        return Err(ExchangeError::Refused {
            status,
            body: String::from_utf8_lossy(&bytes[head..]).into_owned(),
        });
    }
    let length = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|header| std::str::from_utf8(header.value).ok()?.parse().ok());
    let length = length.ok_or_else(|| ExchangeError::Wrong("the answer has no Content-Length".into()))?;
    Ok(Some((head, length)))
}

fn request_json(bytes: usize) -> Value {
    json!({
        "inputs": [{
            "name": "x", "datatype": "FP32", "shape": [1, elements(bytes)],
            "parameters": {"binary_data_size": bytes},
        }],
        "parameters": {"binary_data_output": true},
    })
}

fn response_json(name: &str, bytes: usize) -> Value {
    json!({
        "model_name": name, "model_version": "1",
        "outputs": [{
            "name": "y", "datatype": "FP32", "shape": [1, elements(bytes)],
            "parameters": {"binary_data_size": bytes},
        }],
    })
}

fn request(name: &str, json: &Value, tensor: &[u8]) -> Bytes {
    let json = json.to_string();
    let head = format!(
        "POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\n{HEADER_LENGTH}: {}\r\nContent-Length: {}\r\n\r\n",
        json.len(),
        json.len() + tensor.len()
    );
    [head.as_bytes(), json.as_bytes(), tensor].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixStream;

    #[tokio::test]
    async fn only_the_answer_to_the_request_passes() {
        let (stream, _) = UnixStream::pair().unwrap();
        let client = HttpEchoClient::new(ClientStream::Unix(stream), 64, 0);
        let body = |json: &Value, tensor: &[u8]| [json.to_string().as_bytes(), tensor].concat();
        let right = body(&response_json("echo-64", 64), &client.tensors[0]);
        assert!(client.check(&right, 0).is_ok());
        assert!(client.check(&right, 1).unwrap_err().contains("tensor"), "the answer of another turn");
        assert!(
            client.check(&body(&request_json(64), &client.tensors[0]), 0).unwrap_err().contains("instead")
        );
        assert!(client.check(&right[1..], 0).is_err());
        assert!(client.check(&[], 0).unwrap_err().contains("0 bytes"));
    }

    #[test]
    fn heads_in_pieces_and_refusals() {
        let whole = b"HTTP/1.1 200 OK\r\ncontent-Length: 7\r\n\r\nabc";
        assert_eq!(read_head(whole).unwrap(), Some((whole.len() - 3, 7)));
        assert_eq!(read_head(&whole[..20]).unwrap(), None);
        let refused = read_head(b"HTTP/1.1 503 X\r\ncontent-length: 4\r\n\r\nfull").unwrap_err();
        assert_eq!(refused.to_string(), "the server answered 503: full");
        assert!(read_head(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
    }
}
