//! The requests that hostile clients send.

use std::error::Error;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use flate2::Compression;
use flate2::read::GzEncoder;
use shadowslice_tests::home::Home;
use shadowslice_tests::server::ServerUnderTest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// A result whose error may have any type.
pub(crate) type AnyResult<T> = Result<T, Box<dyn Error + Send + Sync>>;

pub(crate) const MIB: usize = 1 << 20;

/// A time limit far below the limits that the server sets for clients.
pub(crate) const SOON: Duration = Duration::from_secs(20);

pub(crate) async fn connect(server: &ServerUnderTest, socket: &str) -> io::Result<UnixStream> {
    UnixStream::connect(server.home().run_dir().join(socket)).await
}

pub(crate) fn post(model: &str, headers: &str, length: usize) -> String {
    format!("POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{headers}\r\n")
}

/// Makes a request whose answer has this number of bytes.
pub(crate) fn large(bytes: usize) -> Vec<u8> {
    let json = format!(
        r#"{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,{}],"parameters":{{"binary_data_size":{bytes}}}}}],"parameters":{{"binary_data_output":true}}}}"#,
        bytes / 4
    );
    let headers = format!("inference-header-content-length: {}\r\n", json.len());
    let mut request = post("echo", &headers, json.len() + bytes).into_bytes();
    request.extend_from_slice(json.as_bytes());
    request.resize(request.len() + bytes, 0);
    request
}

/// Sends as much of a request as the server reads, and then reads the beginning of the answer.
pub(crate) async fn exchange(stream: &mut UnixStream, request: &[u8]) -> AnyResult<String> {
    let (mut from, mut to) = stream.split();
    let sending = async {
        // A server that refuses a request early closes the connection, so the error is ignored.
        let _ = to.write_all(request).await;
        std::future::pending::<()>().await
    };
    let mut beginning = vec![0; 1024];
    let read = tokio::select! {
        read = timeout(SOON, from.read(&mut beginning)) => read?.unwrap_or(0),
        () = sending => unreachable!("sending never returns"),
    };
    Ok(String::from_utf8_lossy(&beginning[..read]).into_owned())
}

/// Makes a compressed request that expands to 64 MiB.
pub(crate) fn bomb() -> io::Result<Vec<u8>> {
    let mut bomb = Vec::new();
    GzEncoder::new(io::repeat(0).take(64 * MIB as u64), Compression::fast()).read_to_end(&mut bomb)?;
    Ok([post("echo", "content-encoding: gzip\r\n", bomb.len()).into_bytes(), bomb].concat())
}

/// Makes the beginning of a request of 60 MiB to an unknown model.
pub(crate) fn absent() -> Vec<u8> {
    [post("absent", "", 60 * MIB).into_bytes(), vec![0; 8 * MIB]].concat()
}

pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Makes the frame with the headers of an inference call.
pub(crate) fn call_head(method: &str, stream: u32) -> Vec<u8> {
    // All texts are shorter than 128 bytes, so one byte is enough for the length.
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    let named = |name: &str, value: &str| [vec![0], text(name), text(value)].concat();
    let head = [
        &[0x83, 0x86, 0x04][..],
        &text(&format!("/inference.GRPCInferenceService/{method}")),
        &[0x01, 0x01, b'x'],
        &named("te", "trailers"),
        &named("content-type", "application/grpc"),
    ]
    .concat();
    frame(1, 4, stream, &head)
}

/// Returns the first bytes of an HTTP/2 connection.
pub(crate) fn preface() -> Vec<u8> {
    [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(4, 0, 0, &[])].concat()
}

/// Makes the headers of several calls of ModelInfer, followed by a ping.
pub(crate) fn heads(calls: u32) -> Vec<u8> {
    let mut sent = preface();
    (0..calls).for_each(|call| sent.extend(call_head("ModelInfer", 2 * call + 1)));
    sent.extend(frame(6, 0, 0, b"all read"));
    sent
}

/// Opens a connection on which this number of calls have started, and waits until the server has
/// read them.
pub(crate) async fn called(server: &ServerUnderTest, calls: u32) -> AnyResult<UnixStream> {
    let mut stream = connect(server, "grpc.sock").await?;
    stream.write_all(&heads(calls)).await?;
    let mut got = Vec::new();
    while !got.windows(8).any(|window| window == b"all read") {
        if timeout(SOON, stream.read_buf(&mut got)).await?? == 0 {
            return Err("the server closed the connection".into());
        }
    }
    Ok(stream)
}

/// Makes the beginning of a call that announces a message of 1.9 GiB.
pub(crate) fn endless_call() -> Vec<u8> {
    let mut call = heads(1);
    call.truncate(call.len() - 17);
    call.extend_from_slice(b"\0\0\x05\0\0\0\0\0\x01\0\x7a\0\0\0");
    call
}

/// Returns true if these frames contain the headers of an answer.
pub(crate) fn has_answer(mut frames: &[u8]) -> bool {
    while let [a, b, c, kind, ..] = *frames {
        if kind == 1 {
            return true;
        }
        frames = frames.get(9 + u32::from_be_bytes([0, a, b, c]) as usize..).unwrap_or_default();
    }
    false
}

/// Limits the address space of the server, in MiB.
pub(crate) fn confine(home: &mut Home, mib: usize) -> AnyResult<()> {
    let own = std::env::current_exe()?;
    let binary = own.ancestors().nth(2).unwrap_or(Path::new(".")).join("shadowslice");
    let binary = std::env::var_os("SHADOWSLICE_BIN").map_or(binary, Into::into);
    let script = format!("#!/bin/sh\nulimit -v {}\nexec {} \"$@\"\n", mib * 1024, binary.display());
    let path = home.write("confined", script)?;
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755))?;
    home.set_binary(path);
    Ok(())
}
