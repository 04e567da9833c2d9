//! The framing of the messages that a worker exchanges with the supervisor during its start. A frame is
//! a little-endian length of four bytes, followed by the message. The receiver checks the length before
//! it allocates memory.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A type of message that can be sent in a frame.
pub trait Message: Serialize + DeserializeOwned {
    /// The maximum size of an encoded message in bytes, without the length prefix.
    const MAX_BYTES: usize;
}

/// The size of the length prefix in bytes.
pub const HEAD: usize = 4;

/// Returns the encoded message with its length prefix.
///
/// # Errors
///
/// Returns an error if the encoded message is longer than [`Message::MAX_BYTES`].
pub fn encode<M: Message>(message: &M) -> io::Result<Vec<u8>> {
    let mut frame = postcard::to_extend(message, vec![0; HEAD]).map_err(io::Error::other)?;
    let length = frame.len() - HEAD;
    if length > M::MAX_BYTES {
        return Err(too_long::<M>(length));
    }
    frame[..HEAD].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

/// Returns the message length that the prefix `head` contains.
///
/// # Errors
///
/// Returns an error if the length exceeds [`Message::MAX_BYTES`].
pub fn length<M: Message>(head: [u8; HEAD]) -> io::Result<usize> {
    let length = u32::from_le_bytes(head) as usize;
    if length > M::MAX_BYTES { Err(too_long::<M>(length)) } else { Ok(length) }
}

/// Decodes a message from bytes without the length prefix.
///
/// # Errors
///
/// Returns [`io::ErrorKind::InvalidData`] if the bytes are not a message of this type.
pub fn decode<M: Message>(bytes: &[u8]) -> io::Result<M> {
    postcard::from_bytes(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Writes a message with its length prefix.
pub fn send(mut socket: impl Write, message: &impl Message) -> io::Result<()> {
    socket.write_all(&encode(message)?)
}

/// Reads a message. Blocks until the message has arrived.
///
/// # Errors
///
/// Returns [`io::ErrorKind::UnexpectedEof`] if the peer has closed the socket, and
/// [`io::ErrorKind::InvalidData`] if the message is invalid.
pub fn receive<M: Message>(mut socket: impl Read) -> io::Result<M> {
    let mut head = [0; HEAD];
    socket.read_exact(&mut head)?;
    let mut bytes = vec![0; length::<M>(head)?];
    socket.read_exact(&mut bytes)?;
    decode(&bytes)
}

fn too_long<M: Message>(length: usize) -> io::Error {
    let why = format!("a message of {length} bytes exceeds the limit of {} bytes", M::MAX_BYTES);
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, serde::Deserialize)]
    struct TestMessage(Vec<u8>);

    impl Message for TestMessage {
        const MAX_BYTES: usize = 1000;
    }

    #[test]
    fn sent_messages_arrive_in_order() {
        let mut socket = Vec::new();
        send(&mut socket, &TestMessage(vec![1])).unwrap();
        send(&mut socket, &TestMessage(vec![2, 3])).unwrap();
        let mut socket = socket.as_slice();
        assert_eq!(receive::<TestMessage>(&mut socket).unwrap(), TestMessage(vec![1]));
        assert_eq!(receive::<TestMessage>(&mut socket).unwrap(), TestMessage(vec![2, 3]));
        let end = receive::<TestMessage>(&mut socket).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn invalid_lengths_and_messages_are_refused() {
        for head in [u32::MAX, TestMessage::MAX_BYTES as u32 + 1] {
            let error = receive::<TestMessage>(&head.to_le_bytes()[..]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        let nonsense = [&4_u32.to_le_bytes()[..], &[0xff; 4]].concat();
        assert_eq!(
            receive::<TestMessage>(nonsense.as_slice()).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        assert!(encode(&TestMessage(vec![7; TestMessage::MAX_BYTES])).is_err());
    }
}
