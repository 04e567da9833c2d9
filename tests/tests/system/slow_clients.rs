//! Tests with slow clients. Latencies must count from the first byte of a request to the last byte
//! of its answer.

use std::time::{Duration, Instant};

use shadowslice_tests::cases::ClientTensor;
use shadowslice_tests::client::framed;
use shadowslice_tests::home::Home;
use shadowslice_tests::load::RequestOutcome;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::ModelStatusJson;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::fixtures::{EMULATED, ask, echo_case, profile};
use crate::hostile::{AnyResult, SOON, call_head, connect, exchange, frame, large, post, preface};
use crate::metrics::scrape;

const SLO: Duration = Duration::from_secs(2);

/// A number of bytes that exceeds the buffer of a socket and the flow-control window of a call.
const LARGE: usize = 600_000;

/// The largest frame that a server accepts by default, in bytes.
const FRAME: usize = 16 << 10;

/// Starts a server with a model whose input may have any length.
async fn started() -> AnyResult<ServerUnderTest> {
    let home = Home::with_config(
        "listen: {http: [\"unix:http.sock\"], grpc: [\"unix:grpc.sock\"], metrics: [\"unix:metrics.sock\"]}\n\
         gpus: [{device: emulated, sms: 132}]\ncontroller: {policy: static}\n\
         models:\n  - {name: echo, engine: emulated, slo: 2s, profile: profile.yaml, batch: {max: 1},\n     \
         queue: {on_late: serve}, tensors: [{input: x, output: y, datatype: FP32, shape: [-1]}]}\n",
    )?;
    home.write("profile.yaml", profile(1.0))?;
    Ok(ServerUnderTest::start_ready(home).await?)
}

/// Sends other requests until the slow request, which the server has already begun to read, is
/// late. Returns the number of other requests.
async fn until_it_is_late(server: &ServerUnderTest) -> u64 {
    let (begun, mut others) = (Instant::now(), 0);
    while begun.elapsed() <= SLO {
        assert_eq!(ask(server.client(), "echo", &echo_case(1), 0.0).await, RequestOutcome::Right);
        others += 1;
    }
    others
}

/// Waits until `answered` requests have been answered. Checks that exactly `late` of these requests
/// missed the SLO.
async fn counted(server: &ServerUnderTest, answered: u64, late: u64) -> AnyResult<()> {
    let all = |model: &ModelStatusJson| model.requests.succeeded >= answered;
    let status = server.wait_status("echo", "the ends of all requests", all).await?;
    assert_eq!((status.requests.succeeded, status.requests.failed), (answered, 0));
    let within = (answered - late) as f64;
    assert_eq!(status.slo.attainment, Some(within / answered as f64));
    let metrics = scrape(server, "metrics.sock").await?;
    assert_eq!(metrics.of("echo", "requests_within_slo_total", ""), Some(within));
    assert_eq!(metrics.of("echo", "request_latency_seconds_bucket", ",le=\"2\""), Some(within));
    Ok(())
}

/// Returns the sum of a summary metric, in seconds.
async fn spent(server: &ServerUnderTest, doing: &str) -> AnyResult<f64> {
    let metrics = scrape(server, "metrics.sock").await?;
    metrics.of("echo", &format!("{doing}_seconds_sum"), "").ok_or_else(|| format!("no {doing}").into())
}

/// Waits until the worker has answered this many requests.
async fn computed(server: &ServerUnderTest, requests: u64) -> AnyResult<()> {
    let all = |model: &ModelStatusJson| model.more["batches"].as_u64() >= Some(requests);
    server.wait_status("echo", "answers of the worker", all).await?;
    Ok(())
}

/// Reads an HTTP answer on a connection that stays open.
async fn read_answer(stream: &mut UnixStream) -> AnyResult<()> {
    let mut answer = Vec::new();
    loop {
        let head = answer.windows(4).position(|end| end == b"\r\n\r\n");
        if let Some(head) = head {
            let text = String::from_utf8_lossy(&answer[..head]).to_ascii_lowercase();
            assert!(text.starts_with("http/1.1 200"), "{text}");
            let length = text.split("\r\ncontent-length: ").nth(1).and_then(|rest| rest.lines().next());
            if answer.len() == head + 4 + length.ok_or("no length")?.parse::<usize>()? {
                return Ok(());
            }
        }
        assert!(timeout(SOON, stream.read_buf(&mut answer)).await?? > 0);
    }
}

#[tokio::test]
async fn an_http_answer_that_is_read_slowly_is_late() {
    let server = started().await.unwrap();
    let mut slow = connect(&server, "http.sock").await.unwrap();
    slow.write_all(&large(LARGE)).await.unwrap();
    read_answer(&mut slow).await.unwrap();
    slow.write_all(&large(LARGE)).await.unwrap();
    computed(&server, 2).await.unwrap();
    let others = until_it_is_late(&server).await;
    counted(&server, 1 + others, 0).await.unwrap();
    read_answer(&mut slow).await.unwrap();
    counted(&server, 2 + others, 1).await.unwrap();
    let (writing, latency) =
        (spent(&server, "answer_write").await.unwrap(), spent(&server, "request_latency").await.unwrap());
    assert!(latency > SLO.as_secs_f64() && writing > 0.5 * SLO.as_secs_f64(), "{writing} of {latency} s");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_http_request_that_arrives_slowly_is_late() {
    let server = started().await.unwrap();
    let mut slow = connect(&server, "http.sock").await.unwrap();
    let request = large(LARGE);
    slow.write_all(&request[..1000]).await.unwrap();
    // The answer to another request of the same kind shows that the server has read the first
    // bytes.
    let mut other = connect(&server, "http.sock").await.unwrap();
    other.write_all(&request).await.unwrap();
    read_answer(&mut other).await.unwrap();
    let others = 1 + until_it_is_late(&server).await;
    slow.write_all(&request[1000..]).await.unwrap();
    read_answer(&mut slow).await.unwrap();
    counted(&server, 1 + others, 1).await.unwrap();
    assert!(spent(&server, "request_receive").await.unwrap() >= SLO.as_secs_f64());
    server.stop().await.unwrap();
}

/// Makes the message of a large request.
fn message() -> Vec<u8> {
    let floats = LARGE / 4;
    framed("echo", &[ClientTensor::fp32("x", &[1, floats as i64], &vec![1.0; floats])])
}

/// Makes frames that contain a part of a call's body.
fn data(stream: u32, bytes: &[u8], ends: bool) -> Vec<u8> {
    let frames: Vec<_> = bytes.chunks(FRAME).map(|piece| frame(0, 0, stream, piece)).collect();
    let end = if ends { frame(0, 1, stream, &[]) } else { Vec::new() };
    [frames.concat(), end].concat()
}

/// Makes all frames of a large call.
fn whole_call(method: &str, stream: u32) -> Vec<u8> {
    [call_head(method, stream), data(stream, &message(), true)].concat()
}

/// Makes the frames that allow the server to send more bytes on a call.
fn take(stream: u32, bytes: u32) -> Vec<u8> {
    let room = &bytes.to_be_bytes();
    [frame(8, 0, 0, room), frame(8, 0, stream, room)].concat()
}

/// The frame type of data.
const DATA: u8 = 0;
/// The frame type of headers and trailers.
const HEADERS: u8 = 1;
/// The frame type of settings.
const SETTINGS: u8 = 4;

struct Frame {
    /// True for the last frame of a call.
    ends: bool,
    /// The length of the payload, in bytes.
    length: usize,
}

/// The frames that the server sends over a gRPC connection.
struct Frames {
    stream: UnixStream,
    received: Vec<u8>,
}

impl Frames {
    /// Opens a connection and acknowledges the server's settings, which set large flow-control
    /// windows.
    async fn connect(server: &ServerUnderTest) -> AnyResult<Self> {
        let mut frames = Self { stream: connect(server, "grpc.sock").await?, received: Vec::new() };
        frames.send(&preface()).await?;
        frames.next(SETTINGS, 0).await?;
        frames.send(&frame(SETTINGS, 1, 0, &[])).await?;
        Ok(frames)
    }

    async fn send(&mut self, bytes: &[u8]) -> AnyResult<()> {
        Ok(self.stream.write_all(bytes).await?)
    }

    /// Waits for the next frame of this type on this call.
    async fn next(&mut self, kind: u8, stream: u32) -> AnyResult<Frame> {
        loop {
            let length = self.received.first_chunk::<3>().map(|&[a, b, c]| u32::from_be_bytes([0, a, b, c]));
            let whole =
                length.map(|length| 9 + length as usize).filter(|whole| *whole <= self.received.len());
            let Some(whole) = whole else {
                let read = timeout(SOON, self.stream.read_buf(&mut self.received)).await??;
                assert!(read > 0, "the server closed the connection");
                continue;
            };
            let frame: Vec<u8> = self.received.drain(..whole).collect();
            if frame[3] == kind && frame[5..9] == stream.to_be_bytes() {
                return Ok(Frame { ends: frame[4] & 1 > 0, length: whole - 9 });
            }
        }
    }

    /// Waits for this many bytes of the answer to this call.
    async fn wait_data(&mut self, stream: u32, bytes: usize) -> AnyResult<()> {
        let mut taken = 0;
        while taken < bytes {
            taken += self.next(DATA, stream).await?.length;
        }
        Ok(())
    }

    /// Waits for the trailers of a call.
    async fn wait_stream_end(&mut self, stream: u32) -> AnyResult<()> {
        while !self.next(HEADERS, stream).await?.ends {}
        Ok(())
    }
}

#[tokio::test]
async fn a_client_that_disconnects_during_its_answer_has_cancelled_the_request() {
    let server = started().await.unwrap();
    let assert_cancelled = async |count| {
        let is_counted = |model: &ModelStatusJson| model.requests.cancelled == count;
        let status = server.wait_status("echo", "a cancelled request", is_counted).await.unwrap();
        assert_eq!((status.requests.succeeded, status.requests.failed), (0, 0));
    };
    let mut leaves = connect(&server, "http.sock").await.unwrap();
    leaves.write_all(&large(LARGE)).await.unwrap();
    computed(&server, 1).await.unwrap();
    assert_cancelled(0).await;
    drop(leaves);
    assert_cancelled(1).await;
    for (before, method) in [(1, "ModelInfer"), (2, "ModelStreamInfer")] {
        let mut leaves = Frames::connect(&server).await.unwrap();
        leaves.send(&whole_call(method, 1)).await.unwrap();
        computed(&server, before + 1).await.unwrap();
        assert_cancelled(before).await;
        drop(leaves);
        assert_cancelled(before + 1).await;
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_answer_that_json_cannot_represent_is_the_clients_error() {
    let models = "models: [{name: echo, engine: emulated, slo: 2s, \
                  tensors: [{input: x, output: y, datatype: BYTES, shape: [1]}]}]\n";
    let server = ServerUnderTest::start_ready(Home::with_config(&format!("{EMULATED}{models}")).unwrap())
        .await
        .unwrap();
    let json =
        r#"{"inputs":[{"name":"x","datatype":"BYTES","shape":[1,1],"parameters":{"binary_data_size":5}}]}"#;
    let headers = format!("inference-header-content-length: {}\r\n", json.len());
    // The input is a string of one byte, which is not valid UTF-8.
    let body = [json.as_bytes(), b"\x01\0\0\0\xff"].concat();
    let request = [post("echo", &headers, body.len()).as_bytes(), &body].concat();
    let answer = exchange(&mut connect(&server, "http.sock").await.unwrap(), &request).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("binary_data"), "{answer}");
    let status = server.model("echo").await.unwrap();
    let requests = status.requests;
    assert_eq!((requests.accepted, requests.invalid, requests.succeeded, requests.failed), (1, 1, 0, 0));
    assert_eq!((requests.cancelled, status.slo.attainment), (0, Some(1.0)));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_grpc_answer_that_is_read_slowly_is_late() {
    let server = started().await.unwrap();
    let mut slow = Frames::connect(&server).await.unwrap();
    slow.send(&whole_call("ModelInfer", 1)).await.unwrap();
    slow.next(HEADERS, 1).await.unwrap();
    // The client allows the server to send the first half of the answer, but not the second half.
    slow.send(&take(1, LARGE as u32 / 2)).await.unwrap();
    slow.wait_data(1, LARGE / 2).await.unwrap();
    let others = until_it_is_late(&server).await;
    counted(&server, others, 0).await.unwrap();
    slow.send(&take(1, 1 << 20)).await.unwrap();
    slow.wait_stream_end(1).await.unwrap();
    counted(&server, 1 + others, 1).await.unwrap();
    assert!(spent(&server, "answer_write").await.unwrap() > SLO.as_secs_f64() / 2.0);
    drop(slow);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_answer_of_a_stream_that_is_read_slowly_is_late() {
    let server = started().await.unwrap();
    let mut slow = Frames::connect(&server).await.unwrap();
    slow.send(&whole_call("ModelStreamInfer", 1)).await.unwrap();
    computed(&server, 1).await.unwrap();
    let others = until_it_is_late(&server).await;
    counted(&server, others, 0).await.unwrap();
    slow.next(HEADERS, 1).await.unwrap();
    slow.send(&take(1, 1 << 20)).await.unwrap();
    slow.wait_stream_end(1).await.unwrap();
    counted(&server, 1 + others, 1).await.unwrap();
    drop(slow);
    server.stop().await.unwrap();
}

/// Checks a call whose message arrives slowly over a connection that other calls share.
async fn assert_slow_message_is_late(method: &str) -> AnyResult<()> {
    let server = started().await?;
    let (message, mut slow) = (message(), Frames::connect(&server).await?);
    slow.send(&[call_head(method, 1), data(1, &message[..1000], false)].concat()).await?;
    // This call begins early. Its message arrives late, but in one piece.
    slow.send(&call_head("ModelStreamInfer", 3)).await?;
    // The server reads all these bytes before it answers another call on the connection.
    let small = framed("echo", &echo_case(1).inputs);
    slow.send(&[call_head("ModelInfer", 5), data(5, &small, true)].concat()).await?;
    slow.wait_stream_end(5).await?;
    let others = 1 + until_it_is_late(&server).await;
    counted(&server, others, 0).await?;
    slow.send(&data(3, &small, true)).await?;
    slow.send(&[take(1, 1 << 20), data(1, &message[1000..], true)].concat()).await?;
    slow.wait_stream_end(1).await?;
    counted(&server, 2 + others, 1).await?;
    drop(slow);
    server.stop().await?;
    Ok(())
}

#[tokio::test]
async fn a_grpc_request_that_arrives_slowly_is_late() {
    assert_slow_message_is_late("ModelInfer").await.unwrap();
}

#[tokio::test]
async fn a_request_of_a_stream_that_arrives_slowly_is_late() {
    assert_slow_message_is_late("ModelStreamInfer").await.unwrap();
}
