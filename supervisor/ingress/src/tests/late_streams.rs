//! Tests of streams that a client opens before it reads that its connection ends.

use super::*;

/// Returns an HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags, 0, 0, 0, stream], payload].concat()
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;

/// A frame that the server sent.
#[derive(Debug)]
struct Received {
    kind: u8,
    flags: u8,
    stream: u8,
    payload: Vec<u8>,
}

async fn receive(stream: &mut UnixStream) -> Received {
    let mut head = [0; 9];
    timeout(PATIENCE, stream.read_exact(&mut head)).await.unwrap().unwrap();
    let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
    stream.read_exact(&mut payload).await.unwrap();
    Received { kind: head[3], flags: head[4], stream: head[8], payload }
}

async fn receive_kind(stream: &mut UnixStream, kind: u8) -> Received {
    loop {
        let received = receive(stream).await;
        if received.kind == kind && received.flags & ACK == 0 {
            return received;
        }
    }
}

/// Sends what gRPC's C core sends when it has numbered a stream before it reads the GOAWAY: the
/// reply to the PING first, then the stream.
#[tokio::test]
async fn a_stream_opened_as_the_connection_ends_harms_no_stream_before_it() {
    let server = Server::start(9).await;
    let mut stream = server.connect("grpc").await;
    let call = grpc::c_core("x", "ServerLive");
    let (head, _) = call.split_at(call.len() - 14);
    stream.write_all(head).await.unwrap();
    stream.write_all(&frame(DATA, 0, 1, &[0; 5])).await.unwrap();
    stream.write_all(&frame(PING, 0, 0, &[7; 8])).await.unwrap();
    while receive(&mut stream).await.kind != PING {}
    server.stop.send_replace(Phase::Stopping);
    assert_eq!(receive_kind(&mut stream, GOAWAY).await.payload[..4], [0x7f, 0xff, 0xff, 0xff]);
    let ping = receive_kind(&mut stream, PING).await.payload;
    let block = &head[24 + 9 + 9..];
    let late = [
        frame(PING, ACK, 0, &ping),
        frame(HEADERS, END_HEADERS, 3, block),
        frame(WINDOW_UPDATE, 0, 3, &[0, 0, 0, 5]),
        frame(DATA, END_STREAM, 3, &[0; 5]),
    ];
    stream.write_all(&late.concat()).await.unwrap();
    assert_eq!(receive_kind(&mut stream, GOAWAY).await.payload, [0, 0, 0, 1, 0, 0, 0, 0]);
    stream.write_all(&frame(DATA, END_STREAM, 1, &[])).await.unwrap();
    let answer = receive_kind(&mut stream, DATA).await;
    assert_eq!((answer.stream, &answer.payload[..]), (1, &b"\0\0\0\0\x02\x08\x01"[..]));
    // A client that fails to write may not read the last GOAWAY.
    stream.read_to_end(&mut Vec::new()).await.unwrap();
    stream.write_all(&frame(PING, 0, 0, &[7; 8])).await.unwrap();
    drop(stream);
    server.stop().await;
}
